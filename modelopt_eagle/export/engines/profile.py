"""The form of an engine's facts. One file an engine in this room fills it; nothing else in the package knows an engine.

Every engine says the same things: how it reads a plain draft folder (:class:`LoadRules`), how a quantised one
(:class:`QuantRules`), from which release on it reads each part of a head (:class:`Since`), how a head is served in it,
and, if it can be run here, by which script (:class:`Runner`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from modelopt_eagle.draft import DraftConfig

LAYERS = ("llama", "qwen3", "kimik2")
"""The kinds of layer that the engines' code was read for."""


def kind_of(config: DraftConfig) -> str:
    """The kind of a head's layers as engines tell them apart: ``llama``, ``qwen3`` (with query and key norms), ..."""
    return "qwen3" if config.qk_norm else config.decoder_type


@dataclass(frozen=True)
class LoadRules:
    """How an engine reads a draft folder.

    Attributes:
        architectures: kind of layer (see :func:`kind_of`) to the names it routes to an EAGLE-3 head of that kind.
        rewrites: ``model_type`` to what it makes of a draft that names it.
        rename: (pattern, replacement) applied to tensor names in turn; ``rename_several``: in a head of several layers.
        first_layer: name of layer 0 in the engine; ``first_of_several``: the same in a head of several layers.
        next_layers: pattern of those above (``{n}``).
        norm_above_first: what it calls the norm before attention above layer 0.
        drops_unknown: tensors it does not know are dropped without a word (else loading fails).
        ids_key: where it reads the captured layers: ``top``, ``nested`` or ``serving`` (its own serving options).
        ids_offset: output layer = value read + this.
        window: kind of layer to how it is told of a sliding window: ``config`` (``layer_types`` and
            ``sliding_window``) or ``serving`` (its own serving options); a kind that is not named sees everything.
        required_keys: keys without which it fails or serves something else, with what happens.
        flags: flag to where it is read (``top``, ``nested``, ``both``), kinds of layer that honour it.
        qkv_bias, mlp_bias: kinds of layer whose biases of the attention and of the feed-forward part are loaded.
        output_bias: those whose attention has an output bias with the others.
        skips_fc: heads whose fc it leaves out: of ``one_layer``, of ``equal_widths`` (features as wide as the head).
        norms_both: with ``norm_before_fc`` and ``fc_norm`` on, it applies both.
        ties: ``tie_word_embeddings`` puts the embedding in the place of ``lm_head``.
        shares_embedding: it replaces the head's own table by the target's when their widths are equal.
        rope_keys: the layouts it reads, in order.
        rounds_latent_yarn: it rounds YaRN's bounds in latent attention, whatever ``truncate`` says.
        map_if_full: what a ``d2t`` does beside a full vocabulary: ``fails`` or ``read``.
        needs_q_lora_rank: its latent attention has no plain ``q_proj``.
        single_layer: decoder types of which it serves heads of one layer only.
        counts_captures_by: ``nested``: it makes ``fc`` for as many layers as ``eagle_config`` names, else for 3;
            ``served``: for as many as its serving options name.
        captures_last: whether it can capture the output of the target's last layer.
        drafters: drafter to the kinds of layer that it serves it with, of those whose folders have this form.
        captures: the one number of captured layers that it serves; ``None``: any.
        activations: the activations of the feed-forward part that it has; ``None``: those of transformers.
    """

    architectures: Mapping[str, tuple[str, ...]]
    rewrites: Mapping[str, str]
    rename: tuple[tuple[str, str], ...]
    rename_several: tuple[tuple[str, str], ...]
    first_layer: str
    first_of_several: str
    next_layers: str
    norm_above_first: str
    drops_unknown: bool
    ids_key: str
    ids_offset: int
    window: Mapping[str, str]
    required_keys: Mapping[str, str]
    flags: Mapping[str, tuple[str, tuple[str, ...]]]
    qkv_bias: tuple[str, ...]
    mlp_bias: tuple[str, ...]
    output_bias: tuple[str, ...]
    skips_fc: tuple[str, ...]
    norms_both: bool
    ties: bool
    shares_embedding: bool
    rope_keys: tuple[str, ...]
    rounds_latent_yarn: bool
    map_if_full: str
    needs_q_lora_rank: bool
    single_layer: tuple[str, ...]
    counts_captures_by: str
    captures_last: bool
    drafters: Mapping[str, tuple[str, ...]]
    captures: int | None = None
    activations: tuple[str, ...] | None = None


def part_of_name(name: str, excluded: str) -> bool:
    """vLLM and SGLang, ModelOpt formats: the exclusion is part of the layer's name, or a pattern that matches it."""
    return excluded in name or fnmatchcase(name, excluded)


def whole_name(name: str, excluded: str) -> bool:
    """vLLM and SGLang, compressed-tensors: the whole name, or ``re:`` and an expression that matches from its start."""
    return bool(re.match(excluded[3:], name)) if excluded.startswith("re:") else name == excluded


def shell_pattern(name: str, excluded: str) -> bool:
    """TensorRT-LLM: a shell pattern that matches the whole name."""
    return fnmatchcase(name, excluded)


@dataclass(frozen=True)
class QuantRules:
    """How an engine reads a quantised draft.

    Attributes:
        source: the engine's code that was read.
        file: where it looks first: ``config.json`` (its ``quantization_config``) or ``hf_quant_config.json``.
        algorithms: ``(quant_method, algorithm)`` to our name of the format, for all that it can run for a draft.
        matches: ``quant_method`` to how an exclusion meets a layer's name.
        first_layer: the engine's name of layer 0; those above count on from there.
        plain: layers that it never quantises, by decoder type.
        refuses: decoder type to the formats that it does not serve, with what happens.
    """

    source: str
    file: str
    algorithms: Mapping[tuple[str, str], str]
    matches: Mapping[str, Callable[[str, str], bool]]
    first_layer: str
    plain: Mapping[str, tuple[str, ...]]
    refuses: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class Since:
    """A release.

    Attributes:
        version: the first that was found to read it.
        without: the one before, which does not; ``None`` if older ones were not looked at.
        where: the file that tells.
    """

    version: str
    without: str | None
    where: str


@dataclass(frozen=True)
class Targets:
    """The model classes of which an engine hands a draft the captured states; it implements this class by class.

    Attributes:
        source: where its code says so.
        first: release to the architectures (``architectures[0]`` of a ``config.json``) that it is the first to serve.
        complete: whether a class that is not named has no such interface in the release read; else it is not known.
        never: classes that were looked at and have none, where the list is not complete.
        folder: of the package, where its model classes lie.
        interface: the base class or method by which a class is told; ``None``: the list was made by hand.
    """

    source: str
    first: Mapping[str, tuple[str, ...]]
    complete: bool
    never: tuple[str, ...] = ()
    folder: str = ""
    interface: str | None = None

    def since(self, architecture: str) -> str | bool | None:
        """The first release that drafts for a target of this class; ``False``: none; ``None``: not known."""
        for release, names in self.first.items():
            if architecture in names:
                return release
        return False if self.complete or architecture in self.never else None


@dataclass(frozen=True)
class Parallel:
    """How an engine cuts a head for tensor parallelism; heads and feed-forward width must divide in each.

    Attributes:
        source: the code that was read.
        vocab_multiple: it pads the rows of ``lm_head`` to a multiple of this.
        alone: the option that keeps a head whole beside a divided target; ``None`` if there is none.
    """

    source: str
    vocab_multiple: int
    alone: str | None


@dataclass(frozen=True)
class Evidence:
    """A line of an engine's code that a rule was read from.

    Attributes:
        rule: what it says of the engine.
        file: path within the engine's code.
        pattern: a regular expression.
        present: whether it must be found there, or must not.
    """

    rule: str
    file: str
    pattern: str
    present: bool = True


@dataclass(frozen=True)
class Order:
    """What serving commands are written for.

    Attributes:
        target: name of the target, or a word in capitals to be replaced.
        config: of the head.
        need: a line about the oldest release that reads the head.
        tested: what the head's export was held against.
    """

    target: str
    config: DraftConfig
    need: str
    tested: str


def _never(config: DraftConfig) -> bool:
    return False


@dataclass(frozen=True)
class Runner:
    """How the engine is run here, see the room ``serving``.

    Attributes:
        script: file in ``serving/`` that runs inside the engine's own environment.
        lacks: the line that the script ends with in an environment without the engine.
        folder: where the environment is looked for.
        setup: the command that makes it.
        options: a head's configuration to the engine's options for it, beside its folder and the number of tokens.
        server: file in ``serving/`` that serves inside that environment; ``None``: only the script can be run.
        gguf: it takes target and head as GGUF files, one request at a time, and decodes some tokens beyond an answer.
        several: the script makes one engine after another in a process.
        mends: whether the engine computes a head of this configuration wrongly and the script can mend that.
    """

    script: str
    lacks: str
    folder: str
    setup: str
    options: Callable[[DraftConfig], dict[str, Any]]
    server: str | None = None
    gguf: bool = False
    several: bool = False
    mends: Callable[[DraftConfig], bool] = _never


@dataclass(frozen=True)
class Counters:
    """What an engine's server counts at ``/metrics``, by the names there.

    Attributes:
        source: the code that was read.
        drafts: rounds of drafting and verifying.
        generated: tokens of answers.
        accepted: drafted tokens that were accepted; ``None``: not counted, what ``generated`` is above one token for
            each round and one for each prompt.
        drafted: tokens that were drafted.
        per_position: drafts of which at least so many tokens were accepted, under the label ``position`` from 0.
        cached: tokens of prompts that were not computed again.
        digits: so many of a number are printed, and larger ones rounded; ``None``: all.
        version: page and key under which the server says which release it is.
    """

    source: str
    drafts: str
    generated: str
    accepted: str | None = None
    drafted: str | None = None
    per_position: str | None = None
    cached: str | None = None
    digits: int | None = None
    version: tuple[str, str] = ("/version", "version")


@dataclass(frozen=True)
class Engine:
    """Everything that is known of an engine.

    Attributes:
        key: its name in commands and data.
        name: its name in prose.
        aliases: other spellings that commands take.
        package: what it is called on the package index, and imported as.
        version, source: of the code that was read.
        evidence: lines of it, looked for in other releases by ``scripts/check_engine_rules.py``.
        code: the folder of its code, where that is not called as the package; its source is then the only package.
        tested: what an export is held against, for the model card.
        loads, quantised: how it reads folders.
        targets: which targets it drafts for.
        parallel: how it divides a head; ``None`` if that was not read.
        since: name of a part of a head (see ``versions.PARTS``) to the first release that reads it.
        serve: the lines of the model card that serve a head.
        serve_adapted: a sentence of the card about serving a head together with its target's adapter
            (``{"rank", "modules", "first"}``), for engines that can.
        runner: for an engine that can be run here.
        counters: what its server counts; ``None`` if that was not read.
    """

    key: str
    name: str
    aliases: tuple[str, ...]
    package: str
    version: str
    source: str
    evidence: tuple[Evidence, ...]
    tested: str
    loads: LoadRules
    quantised: QuantRules
    targets: Targets
    parallel: Parallel | None
    since: Mapping[str, Since]
    serve: Callable[[Order], list[str]]
    serve_adapted: Callable[[str, dict], str] | None = None
    runner: Runner | None = field(default=None)
    counters: Counters | None = None
    code: str | None = None

    def called(self, name: str) -> bool:
        """Whether a name is one of its spellings."""
        return name.lower() in (self.key, self.name.lower(), *self.aliases)
