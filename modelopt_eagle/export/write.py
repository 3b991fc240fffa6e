"""``export_checkpoint``: one folder for three engines, read back and compared before it takes its name."""

from __future__ import annotations

import dataclasses
import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from modelopt_eagle.common.dtypes import dtype_name, parse_dtype
from modelopt_eagle.draft import DraftConfig
from modelopt_eagle.draft.algorithm import Layout, algorithm_of
from modelopt_eagle.draft.base import DraftModule
from modelopt_eagle.errors import ExportError
from modelopt_eagle.export.card import model_card
from modelopt_eagle.export.compare import compare, rebuilt
from modelopt_eagle.export.engines import ENGINES
from modelopt_eagle.export.engines.check import engine_faults
from modelopt_eagle.export.engines.parallel import check_parallel
from modelopt_eagle.export.engines.versions import check_faults, check_versions, needed_version
from modelopt_eagle.export.fitting import (
    table_of,
    target_identity,
    target_notes,
    with_padded_vocabulary,
    with_rope_scaling,
    with_target,
    without_copy,
)
from modelopt_eagle.export.folders import whole_folder
from modelopt_eagle.export.load import load_draft
from modelopt_eagle.export.universal import LAYER_NAMES, universal_files
from modelopt_eagle.target.lora import FOLDER as ADAPTER


@dataclass
class ExportReport:
    """What was written.

    Attributes:
        path: the folder.
        dtype: of the floating tensors.
        tensors: how many were written, all of them compared bit by bit.
        bytes: size of ``model.safetensors``.
        logits_difference: largest difference between the trained and the reloaded head in one forward pass.
        notes: what a user should know: a rope scaling that was added, engines that would not serve it as trained.
        needs: the oldest release of each engine that reads all of the head.
    """

    path: Path
    dtype: str
    tensors: int
    bytes: int
    logits_difference: float
    notes: list[str] = field(default_factory=list)
    needs: list[str] = field(default_factory=list)


def write_folder(
    folder: Path, tensors: dict[str, Tensor], files: dict[str, Any], adapter: str | Path | None = None
) -> None:
    """``model.safetensors``, the given JSON or text files, and a copy of the target's adapter."""
    try:
        save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from error
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content, indent=2) + "\n"
        (folder / name).write_text(text, encoding="utf-8")
    if adapter is not None:
        shutil.copytree(adapter, folder / ADAPTER)


def export_checkpoint(
    module: DraftModule,
    config: DraftConfig | None,
    path: str | Path,
    *,
    target=None,
    dtype: str | torch.dtype | None = None,
    layer_names: str = "midlayer",
    rope_scaling: dict[str, Any] | None = None,
    overwrite: bool = False,
    report: dict[str, Any] | None = None,
    for_engines: dict[str, str] | None = None,
    adapter: str | Path | None = None,
    tensor_parallel: int | None = None,
) -> ExportReport:
    """Write a head so that vLLM, SGLang and TensorRT-LLM load it as it is.

    Args:
        module: the trained head.
        config: its config; ``None`` for ``module.config``.
        path: the folder to make; it appears whole or not at all.
        target: a ``Target``, its tables, or their ``identity()``: completes the config and is checked against it. With
            the first two, an embedding in the head that only repeats the target's is left out.
        dtype: of the floating tensors; ``None`` keeps the module's.
        layer_names: ``midlayer`` (read by all three engines) or ``layers``; heads of several layers use ``layers``.
        rope_scaling: a scaling to declare for long contexts, for a head trained with none.
        overwrite: replace an earlier export.
        report: content of ``acceptance.json``, for the model card.
        for_engines: engine to the version that will serve the head, as ``{"vllm": "0.22.0"}``: one that does not read
            all of it is refused.
        adapter: PEFT folder of the target's adapter that the head was trained with; copied into the export.
        tensor_parallel: the size that will serve the head: its sizes are checked, a reduced draft vocabulary is padded
            to a multiple.

    Returns:
        what was written, and how it compared with the trained head.

    Raises:
        ExportError: the folder exists, the head does not fit the target, or reads back differently.
        CheckpointError: the vocabulary map is unset or broken.
    """
    config, padding = config or module.config, []
    layout = algorithm_of(config).layout
    if layout is not None:
        if tensor_parallel is not None:
            raise ExportError(f"--tensor-parallel speaks of EAGLE-3 heads; this is one of {algorithm_of(config).title}")
        return export_own_layout(
            module, config, path, layout, target=target, dtype=dtype, overwrite=overwrite,
            report=report, for_engines=for_engines, rope_scaling=rope_scaling, adapter=adapter,
        )  # fmt: skip
    if layer_names not in LAYER_NAMES:
        raise ExportError(f"layer_names is {layer_names!r}; use {' or '.join(LAYER_NAMES)}")
    if tensor_parallel is not None:
        check_parallel(config, tensor_parallel)
        module, added = with_padded_vocabulary(module, tensor_parallel)
        config = dataclasses.replace(config, draft_vocab_size=module.config.draft_vocab_size)
        words = f"tokens, never the likeliest, pad the draft vocabulary to a multiple of {tensor_parallel}"
        padding = [f"{added} {words}"] if added else []
    unsure = padding + target_notes(config, target)
    config = with_target(config, target)
    check_versions(for_engines or {}, config, layer_names=layer_names)
    config, notes = with_rope_scaling(config, rope_scaling)
    notes = unsure + notes
    dtype = parse_dtype(dtype) or module.fc.weight.dtype
    exported = without_copy(rebuilt(module, config), table_of(target))
    if config.own_embedding and not exported.config.own_embedding:
        config = exported.config
        notes.append("the embedding was the target's own and was left out: engines take the target's")
    tensors, data = universal_files(exported, dtype, layer_names)
    faults = engine_faults(data, tensors, config, target_layers=target_identity(target).get("num_layers"))
    check_faults(for_engines or {}, faults)
    notes = notes + list(faults.values())
    needs = [needed_version(name, config, layer_names=layer_names).text(name) for name in ENGINES]
    card = model_card(config, data, report=report or {}, notes=notes)
    with whole_folder(path, overwrite) as folder:
        write_folder(folder, tensors, {"config.json": data, "README.md": card}, adapter)
        difference = compare(load_draft(folder), exported, dtype)
        size = (folder / "model.safetensors").stat().st_size
    return ExportReport(Path(path), dtype_name(dtype), len(tensors), size, difference, notes, needs)


def export_own_layout(
    module: DraftModule,
    config: DraftConfig,
    path: str | Path,
    layout: Layout,
    *,
    target: Any = None,
    dtype: str | torch.dtype | None = None,
    overwrite: bool = False,
    report: dict[str, Any] | None = None,
    for_engines: dict[str, str] | None = None,
    rope_scaling: dict[str, Any] | None = None,
    adapter: str | Path | None = None,
) -> ExportReport:
    """Write a head whose drafter has a layout of its own; arguments and errors as for :func:`export_checkpoint`.

    Returns:
        what was written.
    """
    notes = target_notes(config, target)
    config = with_target(config, target)
    check_versions(for_engines or {}, config)
    config, more = with_rope_scaling(config, rope_scaling)
    dtype = parse_dtype(dtype) or module.dtype
    exported = rebuilt(module, config)
    tensors, data = layout.write(exported, dtype)
    faults = engine_faults(data, tensors, config)
    check_faults(for_engines or {}, faults)
    notes = notes + more + list(faults.values())
    needs = [needed_version(name, config).text(name) for name in ENGINES]
    card = model_card(config, data, report=report or {}, notes=notes)
    with whole_folder(path, overwrite) as folder:
        write_folder(folder, tensors, {"config.json": data, "README.md": card}, adapter)
        written = load_draft(folder)
        written.meet_target(lambda ids: exported.output_weights(1)[0])  # what it shares was not written
        difference = compare(written, exported, dtype)
        size = (folder / "model.safetensors").stat().st_size
    return ExportReport(Path(path), dtype_name(dtype), len(tensors), size, difference, notes, needs)
