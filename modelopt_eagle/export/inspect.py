"""What a folder holds: layout, sizes, kind of vocabulary map, and what each engine would do with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from modelopt_eagle.common.dtypes import dtype_name
from modelopt_eagle.common.text import visible
from modelopt_eagle.draft.algorithm import config_from_dict, known_algorithms
from modelopt_eagle.errors import CheckpointError, EagleError
from modelopt_eagle.export.engines import ENGINES
from modelopt_eagle.export.engines.check import engine_reasons
from modelopt_eagle.export.engines.parallel import parallel_text
from modelopt_eagle.export.engines.versions import needed_version
from modelopt_eagle.export.folders import resolve_checkpoint
from modelopt_eagle.export.foreign import ReadOptions, detect_layout
from modelopt_eagle.export.load import own_layout, read_config, read_head
from modelopt_eagle.export.quant_formats import is_quantised, scaled_layers
from modelopt_eagle.export.tensors import map_kind, module_tensors, of_its_kind, read_json, read_tensors
from modelopt_eagle.export.universal import aux_ids_of


@dataclass
class Inspection:
    """Findings about a folder.

    Attributes:
        layout: which tool's it is, or the drafter whose own it is; ``map``: ``identity``, ``reduced`` or ``missing``.
        config: our reading of it, if it can be read; else ``problem`` says why not.
        quantised: number format of a quantised head's weights.
        left_out: tensors that are not of the head.
        engines: engine to the reasons why it would not serve the head as trained (none: it would).
        notes: what a user should know besides.
    """

    folder: str
    layout: str
    map: str
    draft_vocab_size: int | None
    vocab_size: int | None
    aux_layer_ids: list[int] | None
    dtypes: list[str]
    parameters: int
    tensors: dict[str, list[int]] = field(repr=False)
    config: dict[str, Any] | None = None
    problem: str | None = None
    quantised: str | None = None
    left_out: list[str] = field(default_factory=list)
    engines: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def text(self) -> str:
        """The findings as lines."""
        lines = [
            f"folder      {self.folder}",
            f"layout      {self.layout}",
            f"vocabulary  {self.map}: {self.draft_vocab_size} of {self.vocab_size} tokens",
            f"captures    {self.aux_layer_ids or 'not said'} (output of layer k, 0-based)",
            f"numbers     {self.parameters / 1e6:.1f} M in {', '.join(self.dtypes)}",
        ]
        if self.quantised:
            lines.append(f"quantised   {self.quantised}")
        if self.config:
            shown = {k: v for k, v in self.config.items() if v not in (None, False, {}, [])}
            lines.append("config      " + ", ".join(f"{key} {value}" for key, value in shown.items()))
        if self.left_out:
            lines.append(f"left out    {', '.join(self.left_out)}")
        for engine in self.engines:
            if self.config:
                config, quantised = config_from_dict(self.config), self.quantised is not None
                lines.append(f"needs       {needed_version(engine, config, quantised=quantised).text(engine)}")
        own_layout = self.config is not None and self.layout in known_algorithms()
        if self.config and self.engines and not own_layout:
            lines.append(f"parallel    {parallel_text(config_from_dict(self.config))}")
        good = "reads folders of this kind; this one was not looked into" if own_layout else "serves it as trained"
        for engine, reasons in self.engines.items():
            label = f"{engine} {ENGINES[engine].version}"
            lines.append(f"engine      {label}: " + ("does not:" if reasons else good))
            lines += [f"            - it {reason}" for reason in reasons]
        lines += [f"note        {note}" for note in self.notes]
        if self.problem:
            lines.append(f"problem     {self.problem}")
        return "\n".join(visible(line) for line in lines)


def quantised_text(tensors) -> str:
    """How many layers of a quantised folder hold which numbers."""
    layers = scaled_layers(tensors)
    kinds = sorted({dtype_name(parts["weight"].dtype) for parts in layers.values() if "weight" in parts})
    return f"{len(layers)} layers, weights in {', '.join(kinds)}"


def dtype_notes(dtypes: list[str], target: torch.dtype | None) -> list[str]:
    """What a target of another dtype does to the head's numbers."""
    others = [name for name in dtypes if target is not None and name != dtype_name(target)]
    if not others:
        return []
    named = dtype_name(target)
    return [
        f"the head's numbers are {', '.join(others)}, the target's {named}: vLLM computes drafts in that dtype, "
        f"and rounds them: export with --dtype {named}, and measure that"
    ]


@of_its_kind
def inspect_checkpoint(path: str | Path, options: ReadOptions | None = None) -> Inspection:
    """Look into a folder without refusing what is wrong with it.

    Returns:
        what was found, faults among it.

    Raises:
        CheckpointError: nothing there that could be looked into (no folder, no readable weights or config).
    """
    folder = resolve_checkpoint(path)
    stored = read_tensors(folder)
    try:
        tensors, _ = module_tensors(stored)
    except CheckpointError:
        tensors = stored
    training = not (folder / "config.json").is_file()
    data = read_json(folder / ("draft_config.json" if training else "config.json"))
    layout, known = "training", options or ReadOptions()
    own = own_layout(folder, stored, known)
    if own is not None:
        layout = own.name
    elif not training:
        try:
            layout = detect_layout(data, stored, str(folder))
        except CheckpointError:
            layout = "none that is known"
    layer = data.get("transformer_layer_config") or data
    rows = tensors["lm_head.weight"].shape[0] if "lm_head.weight" in tensors else data.get("draft_vocab_size")
    vocab_size = len(tensors["t2d"]) if "t2d" in tensors else layer.get("vocab_size")
    found = Inspection(
        folder=str(folder),
        layout=layout,
        map=map_kind(tensors, rows, vocab_size),
        draft_vocab_size=rows,
        vocab_size=vocab_size,
        aux_layer_ids=None,
        dtypes=sorted({dtype_name(t.dtype) for t in stored.values() if t.is_floating_point()}),
        parameters=sum(t.numel() for t in stored.values() if t.is_floating_point()),
        tensors={name: list(tensor.shape) for name, tensor in stored.items()},
    )
    found.notes = [] if is_quantised(stored) else dtype_notes(found.dtypes, known.target_dtype)
    try:
        if is_quantised(stored):
            found.quantised = quantised_text(stored)
            found.config = read_config(folder, stored, known, strict=False)[0].to_dict()
            found.aux_layer_ids = found.config["aux_layer_ids"]
            found.engines = {engine: engine_reasons(folder, engine, options=options) for engine in ENGINES}
            return found
        head = read_head(folder, options=options)
        found.config, found.left_out = head.config.to_dict(), head.left_out
        found.aux_layer_ids = list(head.config.aux_layer_ids)
        if own is not None:  # its map and output layer need not lie there under our names
            found.map = "identity" if head.module.vocab.is_identity else "reduced"
            found.draft_vocab_size, found.vocab_size = head.config.draft_vocab_size, head.config.vocab_size
    except EagleError as error:
        found.problem = str(error)
        if not training:
            try:
                ids = aux_ids_of(data, str(folder))
                found.aux_layer_ids = list(ids) if ids else None
            except CheckpointError:
                pass  # the contradiction is the problem above
    if found.config is not None and known.target_architecture:
        found.config["extra"] = {**found.config["extra"], "target_architecture": known.target_architecture}
    if not training and layout != "speculators":
        found.engines = {engine: engine_reasons(folder, engine, options=options) for engine in ENGINES}
    return found
