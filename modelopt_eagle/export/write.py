"""``export_checkpoint``: one folder for three engines, read back and compared before it takes its name."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from modelopt_eagle.draft import DraftConfig, EagleModule
from modelopt_eagle.draft.rotary import check_scaling
from modelopt_eagle.errors import ExportError
from modelopt_eagle.export.card import model_card
from modelopt_eagle.export.embedding import table_of, without_copy
from modelopt_eagle.export.engines.check import PROFILES, engine_faults
from modelopt_eagle.export.engines.versions import check_faults, check_versions, needed_version
from modelopt_eagle.export.folders import whole_folder
from modelopt_eagle.export.load import load_draft
from modelopt_eagle.export.names import LAYER_NAMES, file_tensors
from modelopt_eagle.export.probe import probe
from modelopt_eagle.export.universal import dtype_name, parse_dtype, universal_config
from modelopt_eagle.target.lora import FOLDER as ADAPTER

TOLERANCE = 1e-5
"""Largest difference of draft logits that the read-back comparison allows; both sides compute in float32."""


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


def target_identity(target) -> dict[str, Any]:
    """``identity()`` of a target or of its tables, or a dictionary with the same keys; empty for ``None``."""
    if target is None:
        return {}
    return dict(target if isinstance(target, Mapping) else target.identity())


def with_target(config: DraftConfig, target) -> DraftConfig:
    """The config completed from the target it is exported for, and checked against it.

    The declared length becomes at least the target's: the head is served at the target's positions, however short the
    rows it was trained on.

    Raises:
        ExportError: another width, vocabulary, depth or tokenizer.
    """
    config, identity = copy.deepcopy(config), target_identity(target)
    for key, own, what in (
        ("hidden_size", config.target_hidden_size, "hidden states of width"),
        ("vocab_size", config.vocab_size, "a vocabulary of"),
        ("tokenizer_hash", config.tokenizer_hash, "the tokenizer"),
    ):
        if own and identity.get(key) and identity[key] != own:
            raise ExportError(
                f"the head was trained for {what} {own}, the target {identity.get('model')} has {identity[key]}"
            )
    layers = identity.get("num_layers")
    if layers and max(config.aux_layer_ids) >= layers:
        raise ExportError(f"the head reads layers {list(config.aux_layer_ids)}, the target has {layers} (0-based)")
    config.target_name = config.target_name or identity.get("model")
    config.tokenizer_hash = config.tokenizer_hash or identity.get("tokenizer_hash")
    text = getattr(target, "config", None)
    length = getattr(text, "max_position_embeddings", None)
    if length and config.max_position_embeddings < length:
        config.max_position_embeddings = int(length)
    return config


def target_notes(config: DraftConfig, target) -> list[str]:
    """What cannot be checked of a head that records no tokenizer: that it was made for this target."""
    named, given = config.target_name, target_identity(target).get("model")
    if config.tokenizer_hash or not named or not given or Path(named).name == Path(given).name:
        return []
    return [
        f"the head names {named} as its target and records no tokenizer, the target given is {given}: if they are not "
        "one model, its token ids mean other words, and nothing but the acceptance length tells"
    ]


def with_rope_scaling(config: DraftConfig, rope_scaling: dict[str, Any] | None) -> tuple[DraftConfig, list[str]]:
    """The config with a scaling added for long contexts, and the note that says so.

    Raises:
        CheckpointError: a scaling that no rotary type reads so.
        ExportError: the head was trained with a scaling of its own.
    """
    if rope_scaling is None:
        return config, []
    check_scaling(rope_scaling)
    if config.rope_scaling is not None:
        raise ExportError(
            f"the head was trained with rope_scaling {config.rope_scaling}; adding {rope_scaling} would serve other "
            "numbers than were trained: leave export.rope_scaling empty"
        )
    config = copy.deepcopy(config)
    config.rope_scaling = dict(rope_scaling)
    original = int(rope_scaling.get("original_max_position_embeddings") or config.max_position_embeddings)
    config.rope_scaling.setdefault("original_max_position_embeddings", original)
    stretched = int(original * float(rope_scaling.get("factor", 1.0)))
    config.max_position_embeddings = max(config.max_position_embeddings, stretched)
    kind = rope_scaling.get("rope_type", rope_scaling.get("type"))
    return config, [
        f"rope scaling {kind!r} was added at export and not trained with: the acceptance measured before, on short "
        "contexts, changes with it; measure again with ar_validate.py on the exported folder"
    ]


def rebuilt(module: EagleModule, config: DraftConfig) -> EagleModule:
    """The same tensors under another config (same shapes)."""
    with torch.random.fork_rng(devices=[]):
        other = EagleModule(config, module.vocab)
    other.load_state_dict(module.state_dict(), assign=True)
    return other


def compare(written: EagleModule, module: EagleModule, dtype: torch.dtype) -> float:
    """Hold the reloaded head against the trained one, cast to the written dtype: every tensor, then a forward pass.

    Returns:
        The largest difference of logits.

    Raises:
        ExportError: a config, tensor or result that differs.
    """
    if written.config != module.config:
        mine, theirs = module.config.to_dict(), written.config.to_dict()
        differing = {k: (mine[k], theirs[k]) for k in mine if mine[k] != theirs[k]}
        raise ExportError(f"the exported config reads back differently (trained, exported): {differing}")
    trained = {
        name: tensor.cpu().to(dtype) if tensor.is_floating_point() else tensor.cpu()
        for name, tensor in module.state_dict().items()
    }
    for name, tensor in written.state_dict().items():
        if not torch.equal(tensor, trained[name]):
            raise ExportError(f"the exported tensor {name} differs from the trained one: the folder was not kept")
    cast = rebuilt(module, module.config)
    cast.load_state_dict(trained, assign=True)
    difference = float((probe(written) - probe(cast)).abs().max())
    if not difference <= TOLERANCE:
        raise ExportError(f"the exported head computes other logits than the trained one, by {difference:.2e}")
    return difference


def write_folder(
    folder: Path, tensors: dict[str, torch.Tensor], files: dict[str, Any], adapter: str | Path | None = None
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
    module: EagleModule,
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

    Raises:
        ExportError: the folder exists, the head does not fit the target, or reads back differently.
        CheckpointError: the vocabulary map is unset or broken.
    """
    if layer_names not in LAYER_NAMES:
        raise ExportError(f"layer_names is {layer_names!r}; use {' or '.join(LAYER_NAMES)}")
    unsure = target_notes(config or module.config, target)
    config = with_target(config or module.config, target)
    check_versions(for_engines or {}, config, layer_names=layer_names)
    config, notes = with_rope_scaling(config, rope_scaling)
    notes = unsure + notes
    dtype = parse_dtype(dtype) or module.fc.weight.dtype
    exported = without_copy(rebuilt(module, config), table_of(target))
    if config.own_embedding and not exported.config.own_embedding:
        config = exported.config
        notes.append("the embedding was the target's own and was left out: engines take the target's")
    tensors = file_tensors(exported, dtype, layer_names)
    data = universal_config(config, dtype)
    faults = engine_faults(data, tensors, config, target_layers=target_identity(target).get("num_layers"))
    check_faults(for_engines or {}, faults)
    notes = notes + list(faults.values())
    needs = [needed_version(name, config, layer_names=layer_names).text(name) for name in PROFILES]
    card = model_card(config, data, report=report or {}, notes=notes)
    with whole_folder(path, overwrite) as folder:
        write_folder(folder, tensors, {"config.json": data, "README.md": card}, adapter)
        difference = compare(load_draft(folder), exported, dtype)
        size = (folder / "model.safetensors").stat().st_size
    return ExportReport(Path(path), dtype_name(dtype), len(tensors), size, difference, notes, needs)
