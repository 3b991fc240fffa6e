"""What is wrong with a recipe, in words: where, which key, what was expected and found, and the nearest valid name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from modelopt_eagle.recipe.recipe import Recipe

# Names that other trainers use for the same option.
SYNONYMS = {
    "lr": "learning_rate",
    "bs": "batch_size",
    "per_device_train_batch_size": "batch_size",
    "train_batch_size": "batch_size",
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "grad_accum": "gradient_accumulation_steps",
    "lr_scheduler_type": "lr_scheduler",
    "max_grad_norm_clip": "max_grad_norm",
    "grad_clip": "max_grad_norm",
    "optim": "optimizer",
    "logging_steps": "log_steps",
    "model_name_or_path": "base_model",
    "target_model": "base_model",
    "model": "base_model",
    "torch_dtype": "dtype",
    "data_path": "train_path",
    "data": "train_path",
    "training_seq_len": "max_length",
    "max_seq_len": "max_length",
    "ttt_length": "ttt_steps",
    "loss_decay_factor": "loss_decay",
    "num_hidden_layers": "num_layers",
    "aux_hidden_state_layer_ids": "aux_layer_ids",
    "steps": "num_steps",
    "max_total_draft_tokens": "num_nodes",
    "dynamic_tree_topk": "topk",
    "export_path": "path",
    "total_steps": "max_steps",
    "max_num_steps": "max_steps",
    "save_interval": "save_steps",
    "eval_interval": "eval_steps",
    "log_interval": "log_steps",
    "train_data_path": "train_path",
    "eval_data_path": "eval_path",
    "train_hidden_states_path": "offline_data_path",
    "hidden_states_path": "offline_data_path",
    "target_model_path": "base_model",
    "attention_backend": "attn_implementation",
    "sp_ulysses_size": "context_parallel",
    "cp_size": "context_parallel",
    "build_dataset_num_proc": "workers",
}

ELSEWHERE = {
    "mode": "online, offline and streamed follow from data.offline_data_path and data.streaming_server_url",
    "eagle_offline": "training from a dump follows from data.offline_data_path",
    "eagle_architecture_config": "its parts are keys of eagle: hidden_size, intermediate_size, num_layers, ...",
    "draft_model_config": "its parts are keys of eagle; a head's own config.json is read with model.draft_init",
    "chat_template": "it is model.chat_template: Jinja text or a file; without it the target's own is used",
    "eagle_freeze_base_model": "the target is always frozen; adapters on it are target_lora.rank",
    "freeze_base_model": "the target is always frozen; adapters on it are target_lora.rank",
    "eagle_reuse_base_decoder": "it is eagle.init: target, which starts the head as the target's last layer",
    "tp_size": "it is model.shards, with model.parallel; over the devices of one process, model.device: auto",
    "is_vlm": "it follows from the target",
    "cache_dir": "features are kept with data.cache_features: disk, in the output folder",
    "gradient_checkpointing": "for the target's adapters it is target_lora.gradient_checkpointing; a head needs none",
}
"""Keys of other trainers' recipes that no key of ours answers alone, and what does."""

SECTIONS_ELSEWHERE = {
    "dataset": "data",
    "optim": "training",
    "optimizer": "training",
    "trainer": "training",
    "eagle_config": "eagle",
    "speculative": "eagle",
    "target": "model",
    "draft": "eagle",
    "output": "training (output_dir) and export",
    "profiling": "none: scripts/benchmark measures",
    "tracker": "training (report_to)",
}
"""Sections of other trainers' recipes, and where their keys are here."""


def explain(error: ValidationError, places: dict[str, str], texts: dict[str, str], path: str | Path | None) -> str:
    """All faults of a recipe, one a line: where, which key, what was expected, found, and meant."""
    faults: dict[str, list[str]] = {}
    for fault in error.errors(include_url=False):
        name = ".".join(str(part) for part in fault["loc"][:2])
        section = name.split(".")[0]
        message = _fault_message(fault)
        given = [text for key, text in texts.items() if key.startswith(f"{name}.") and _names(message, key)]
        if name in texts:
            where = f"override {texts[name]!r}: "
        elif given:  # of keys that do not fit together, those of the command line are the newer ones
            beside = f" (beside {places[section]})" if section in places else ""
            where = f"override {' '.join(map(repr, given))}{beside}: {name}: "
        elif name in places or section in places:
            where = f"{places.get(name) or places[section]}: {name}: "
        else:
            where = f"{path}: {name}: " if path is not None and name else (f"{name}: " if name else "")
        said = faults.setdefault(where, [])
        if message not in said:
            said.append(message)
    return "\n".join(where + "; or ".join(said) for where, said in faults.items())


def _names(message: str, key: str) -> bool:
    """Whether a message speaks of the key ``section.key``."""
    return re.search(rf"\b{re.escape(key.rpartition('.')[2])}\b", message) is not None


def _fault_message(fault: ErrorDetails) -> str:
    kind, found = fault["type"], fault.get("input")
    if kind == "extra_forbidden":
        section, key = (str(part) for part in fault["loc"][:2])
        return unknown_key(section, key)
    if kind == "literal_error":
        choices = fault["ctx"]["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        near = nearest(str(found), choices)
        hint = f"; nearest valid value: {near}" if near else ""
        return f"expected one of {', '.join(choices)}, found {found!r}{hint}"
    message = fault["msg"].removeprefix("Value error, ")
    if kind == "value_error" and ("found" in message or isinstance(found, dict)):
        return message
    message = message.replace("Input should be", "expected").replace("a valid i", "an i").replace("a valid", "a")
    hint = "; write null for no value" if isinstance(found, str) and found.lower() in ("none", "nil") else ""
    hint = hint or ("; put it in quotes" if kind == "string_type" and isinstance(found, (int, float)) else "")
    return f"{message}, found {found!r}{hint}"


def unknown_section(section: str) -> str:
    """A sentence on a section that the schema does not know, with the nearest name."""
    near = SECTIONS_ELSEWHERE.get(section.lower()) or nearest_section(section)
    hint = f"; nearest: {near}" if near else ""
    return f"unknown section {section!r}{hint} (sections: {', '.join(Recipe.sections())})"


def unknown_key(section: str, key: str) -> str:
    """A sentence on a key that its section does not know, with the nearest name."""
    if (said := ELSEWHERE.get(key.lower())) is not None:
        return f"unknown key {key!r} in section {section!r}: {said}"
    near = nearest_key(section, key)
    hint = f"; nearest valid name: {near.removeprefix(section + '.')}" if near else "; see docs/recipes.md"
    return f"unknown key {key!r} in section {section!r}{hint}"


def nearest_key(section: str | None, key: str) -> str | None:
    """The ``section.key`` most likely meant, preferring the section that was named; None when nothing is near."""
    wanted = _plain(key)
    scored = [(_likeness(wanted, name) + (0.1 if part == section else 0.0), part, name) for part, name in Recipe.keys()]
    score, part, name = max(scored, key=lambda entry: entry[0])
    return f"{part}.{name}" if score >= 0.6 else None


def nearest_section(name: str) -> str | None:
    """The section most likely meant, or None."""
    return nearest(name, Recipe.sections())


def nearest(value: str, choices: Iterable[str]) -> str | None:
    """The choice most like a value, or None."""
    found = difflib.get_close_matches(str(value).lower(), list(choices), n=1, cutoff=0.5)
    return found[0] if found else None


def _plain(key: str) -> str:
    """The key in lower case, with underscores, without the prefix that Model-Optimizer's options have."""
    return key.lower().replace("-", "_").removeprefix("eagle_")


def _likeness(wanted: str, name: str) -> float:
    """1 for the same name or a synonym, 0.9 for its initials, else the share of letters in common."""
    if wanted == name or SYNONYMS.get(wanted) == name:
        return 1.0
    if len(wanted) > 1 and wanted == "".join(word[0] for word in name.split("_") if word):
        return 0.9
    return 0.89 * difflib.SequenceMatcher(None, wanted, name).ratio()
