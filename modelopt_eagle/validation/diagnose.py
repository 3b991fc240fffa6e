"""Which convention a head was trained under: the usual wrong ones are tried, and acceptance tells.

A head whose folder declares another convention than it was trained with drafts badly and fails nowhere. Here the target
answers a few prompts greedily, once; every variant of the declared conventions walks over those answers
(:func:`~modelopt_eagle.training.acceptance.acceptance_walk`), so it costs one draft pass and no decoding.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_eagle.common.acceptance import length_text
from modelopt_eagle.common.layers import default_layer_ids
from modelopt_eagle.data.prompts import Prompt
from modelopt_eagle.decoding.generator import PlainGenerator
from modelopt_eagle.draft import DraftConfig, DraftVocab, EagleModule
from modelopt_eagle.draft.config import rope_of
from modelopt_eagle.errors import CheckpointError, DecodingError, TargetError
from modelopt_eagle.training.acceptance import WalkResult, acceptance_walk
from modelopt_eagle.validation.dialogues import first_turn

MARGIN = 0.05
"""Another convention is named when its acceptance length is higher by at least this."""


@dataclass(frozen=True)
class Variant:
    """One convention.

    Attributes:
        name: what it is called in the table.
        mends: how a folder is made to say it.
        module: the head under it.
        aux_layer_ids: the layers it reads, in the order in which they are laid side by side.
        features: what is done to each layer's output ``[s, Ht]`` before.
        shift: how many tokens later the embedding is that a state is read beside; 1 is right.
        scale: factor on the target's embeddings.
    """

    name: str
    mends: str
    module: EagleModule
    aux_layer_ids: tuple[int, ...]
    features: Callable[[Tensor], Tensor] | None = None
    shift: int = 1
    scale: float = 1.0


@dataclass
class Diagnosis:
    """What the variants gave.

    Attributes:
        declared: acceptance length as the folder declares the head; ``None`` if nothing was walked.
        results: name to the walk, in the order tried.
        mends: name to how a folder is made to say it.
        best: the name of the best variant, where it beats the declared one by ``MARGIN``; else ``None``.
    """

    results: dict[str, WalkResult] = field(default_factory=dict)
    mends: dict[str, str] = field(default_factory=dict)

    @property
    def declared(self) -> WalkResult:
        """The walk under the declared conventions."""
        return next(iter(self.results.values()))

    @property
    def best(self) -> str | None:
        """The variant under which the head drafts clearly better than as declared."""
        name = max(self.results, key=lambda key: self.results[key].acceptance_length)
        better = self.results[name].acceptance_length - self.declared.acceptance_length
        return name if better >= MARGIN else None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        rows = {name: {**walk.numbers(), "mends": self.mends[name]} for name, walk in self.results.items()}
        return {"best": self.best, "variants": rows}

    def text(self) -> str:
        """A table, best first, and the verdict."""
        order = sorted(self.results, key=lambda name: -self.results[name].acceptance_length)
        width = max(map(len, order))
        lines = [f"{'convention'.ljust(width)}  acceptance length  position 1"]
        for name in order:
            walk = self.results[name]
            lines.append(f"{name.ljust(width)}  {walk.text.rjust(17)}  {walk.per_position[0]:10.3f}")
        if self.best is None:
            lines.append("verdict: no convention that was tried beats the declared one")
        else:
            found = self.results[self.best]
            lines.append(
                f"verdict: {found.text} under {self.best!r} against {length_text(self.declared.acceptance_length)} as "
                f"declared: {self.mends[self.best]}"
            )
        return "\n".join(lines)


@dataclass(frozen=True)
class Answer:
    """A prompt and the target's greedy answer.

    Attributes:
        ids: ``[1, s]`` int64.
        supervised: ``[1, s]`` bool, the answer.
        layers: layer to its output ``[s, Ht]``.
        top1: ``[1, s]`` int64 the target's choice after each token.
    """

    ids: Tensor
    supervised: Tensor
    layers: dict[int, Tensor]
    top1: Tensor


@torch.inference_mode()
def answers_of(target, prompts: Sequence[Prompt], layers: Sequence[int], new_tokens: int) -> list[Answer]:
    """The target's own answers to first turns, with the outputs of some layers.

    Raises:
        DecodingError: not one answer has two tokens.
    """
    encoded = [first_turn(target, prompt) for prompt in prompts]
    replies = PlainGenerator(target).generate(encoded, max_new_tokens=new_tokens).tokens
    found, wanted = [], sorted(layers)
    for asked, reply in zip(encoded, replies, strict=True):
        if len(reply) < 2:
            continue
        ids = torch.tensor([asked + list(reply)], device=target.device)  # [1,s]
        output = target.features(ids, None, wanted)
        parts = output.aux_hidden[0].float().chunk(len(wanted), dim=-1)  # [s,Ht] each
        supervised = torch.arange(ids.shape[1], device=ids.device)[None] >= len(asked)  # [1,s]
        found.append(
            Answer(
                ids, supervised, dict(zip(wanted, parts, strict=True)), target.logits(output.final_hidden).argmax(-1)
            )
        )
    if not found:
        raise DecodingError("the target answers none of these prompts with two tokens: give others")
    return found


def changed(module: EagleModule, **fields: Any) -> EagleModule:
    """The same tensors under other settings that change no shape."""
    with torch.random.fork_rng(devices=[]):
        other = EagleModule(dataclasses.replace(module.config, **fields), module.vocab)
    other.load_state_dict(module.state_dict())
    return other.to(module.fc.weight.device).eval()


def remapped(module: EagleModule, ids: Tensor) -> EagleModule | None:
    """The head with other target ids ``[Vd]`` of its rows; ``None`` where they are no map."""
    try:
        vocab = DraftVocab.from_d2t(ids.cpu() - torch.arange(len(ids)), module.config.vocab_size)
    except CheckpointError:
        return None
    other = copy.deepcopy(module)
    other.set_vocab(vocab)
    return other


def with_norms(module: EagleModule, name: str) -> EagleModule:
    """The head with one of its norms applied twice: ``norm`` or layer 0's ``hidden_norm``."""
    other = copy.deepcopy(module)
    holder = other if name == "norm" else other.layers[0]
    setattr(holder, name, nn.Sequential(getattr(holder, name), copy.deepcopy(getattr(holder, name))))
    return other


def layer_variants(module: EagleModule, num_layers: int) -> list[Variant]:
    """Other layers than the declared ones: the numberings taken for each other, the default three, another order."""
    ids = module.config.aux_layer_ids
    found: list[Variant] = []
    choices: list[tuple[str, tuple[int, ...]]] = [
        ("layers one lower", tuple(i - 1 for i in ids)),
        ("layers one higher", tuple(i + 1 for i in ids)),
        ("layers in falling order", tuple(reversed(ids))),
    ]
    try:
        choices.append(("the default layers", default_layer_ids(num_layers)))
    except TargetError:
        pass  # the target is too shallow for a default
    for name, other in choices:
        fits = len(other) == len(ids) and all(0 <= i < num_layers for i in other)
        if fits and other != ids and all(other != earlier.aux_layer_ids for earlier in found):
            mends = f"name them: --aux-layer-ids {','.join(map(str, other))}"
            if name == "layers in falling order":
                mends = "its fc was made for falling order: turn the blocks of fc.weight round, no engine reads it so"
            found.append(Variant(name, mends, module, other))
    return found


def table_variants(module: EagleModule, target_config: Any) -> list[Variant]:
    """Other maps and other rotary tables than the declared ones."""
    config, found = module.config, []
    offsets, absolute = module.d2t.cpu(), module.target_ids.cpu()
    maps = [
        ("the map holds target ids", offsets, "--d2t-convention absolute"),
        ("the map holds offsets", absolute + torch.arange(len(absolute)), "--d2t-convention offset"),
        ("the map one token on", absolute + 1, "the map is shifted: take d2t from the training checkpoint"),
        ("the map one token back", absolute - 1, "the map is shifted: take d2t from the training checkpoint"),
    ]
    for name, ids, mends in maps if not module.vocab.is_identity else []:
        if (other := remapped(module, ids)) is not None:
            found.append(Variant(name, mends, other, config.aux_layer_ids))
    theta, scaling = rope_of(target_config)
    tables = {
        (10000.0, None): "plain, base 10000",
        (config.rope_theta, None): "unscaled",
        (theta, scaling_key(scaling)): "the target's",
    }
    for (base, key), name in tables.items():
        if (base, key) != (config.rope_theta, scaling_key(config.rope_scaling)):
            block = scaling if key is not None else None
            mends = f"declare rope_theta {base:g} and rope_scaling {block} in its config.json"
            other = changed(module, rope_theta=base, rope_scaling=block)
            found.append(Variant(f"rotary table: {name}", mends, other, config.aux_layer_ids))
    return found


def scaling_key(scaling: dict | None) -> str | None:
    """A scaling as something that can be compared."""
    return None if scaling is None else repr(sorted(scaling.items(), key=lambda item: item[0]))


def state_variants(module: EagleModule, final_norm: nn.Module, width: int) -> list[Variant]:
    """Other norms, residuals and embeddings than the declared ones."""
    config, ids = module.config, module.config.aux_layer_ids
    flips = {
        "norm_before_residual": "the residual before or after the norm",
        "norm_output": "the state carried on before or after the last norm",
    }
    found = []
    for flag, name in flips.items():
        value = not getattr(config, flag)
        option = f"--norm-before-residual {str(value).lower()}"
        mends = option if flag == "norm_before_residual" else f"declare {flag} {str(value).lower()} in its config.json"
        found.append(Variant(f"{flag} {str(value).lower()}", f"{name}: {mends}", changed(module, **{flag: value}), ids))
    if config.sliding_window is not None:
        whole = changed(module, sliding_window=None)
        found.append(Variant("no sliding window", "--sliding-window 0", whole, ids))
    own = "the features were normed in training: no engine does, train the head on the layers' outputs"
    found.append(Variant("features behind the final norm", own, module, ids, features=final_norm))
    twice = "a norm was applied twice in training: no engine does, train the head again"
    if config.last_norm:
        found.append(Variant("the last norm twice", twice, with_norms(module, "norm"), ids))
    found.append(Variant("the first norm twice", twice, with_norms(module, "hidden_norm"), ids))
    beside = "tokens and features were aligned otherwise in training: no engine does so, train the head again"
    found.append(Variant("the token of the state itself", beside, module, ids, shift=0))
    found.append(Variant("the token after the next", beside, module, ids, shift=2))
    if not config.own_embedding:
        scaled = "it was trained on embeddings scaled as Gemma's: engines hand the table as it is, train the head again"
        found.append(Variant("embeddings scaled by √H", scaled, module, ids, scale=width**0.5))
    return found


@torch.inference_mode()
def measured(variant: Variant, target, answers: Sequence[Answer], steps: int) -> WalkResult:
    """The walk of one variant over all answers."""
    result, module = WalkResult(steps), variant.module
    for answer in answers:
        parts = [answer.layers[i] for i in variant.aux_layer_ids]
        if variant.features is not None:
            parts = [variant.features(part) for part in parts]
        aux = torch.cat(parts, dim=-1)[None].to(module.fc.weight.dtype)  # [1,s,A·Ht]
        embeddings = module.embed(answer.ids, target.embedding).to(aux.dtype) * variant.scale  # [1,s,H]
        embeddings = embeddings.roll(1 - variant.shift, dims=1)  # a state at i reads what stands at i + 1
        result.extend(acceptance_walk(module, embeddings, aux, answer.supervised, answer.top1, steps))
    return result


def diagnose(
    target,
    module: EagleModule,
    prompts: Sequence[Prompt],
    *,
    num_steps: int = 3,
    max_new_tokens: int = 64,
    say: Callable[[str], None] = lambda line: None,
) -> Diagnosis:
    """Try the usual wrong conventions on a head; returns what each of them gives.

    Args:
        target: a loaded :class:`~modelopt_eagle.target.Target`.
        module: the head as its folder declares it.
        prompts: a few are enough; their first turns are answered.
        num_steps: drafted tokens a step.
        max_new_tokens: of an answer.
        say: takes a line for each thing that begins.

    Returns:
        the acceptance under each convention, the declared one first.

    Raises:
        DecodingError: a head that is no EAGLE-3 head, or prompts that the target does not answer.
    """
    if not isinstance(module, EagleModule) or type(module.config) is not DraftConfig:
        raise DecodingError(f"diagnose tries the conventions of EAGLE-3 heads, this is a {type(module).__name__}")
    module = module.eval()
    config: DraftConfig = module.config
    final_norm = copy.deepcopy(target.final_norm).float()
    variants = [
        Variant("as declared", "nothing to mend", module, config.aux_layer_ids),
        *layer_variants(module, target.num_layers),
        *table_variants(module, target.config),
        *state_variants(module, final_norm, target.hidden_size),
    ]
    layers = {layer for variant in variants for layer in variant.aux_layer_ids}
    say(f"the target answers {len(prompts)} prompts")
    answers = answers_of(target, prompts, sorted(layers), max_new_tokens)
    diagnosis = Diagnosis()
    for variant in variants:
        say(f"trying: {variant.name}")
        diagnosis.results[variant.name] = measured(variant, target, answers, num_steps)
        diagnosis.mends[variant.name] = variant.mends
    return diagnosis
