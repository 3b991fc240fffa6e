"""A quantised draft folder held against an engine's :class:`~modelopt_eagle.export.engines.profile.QuantRules`.

An engine decides by name which of its layers are quantised: those that the exclusions do not hide. If it takes a layer
for quantised that the folder holds plain, or the other way round, it fails or reads packed bytes as weights. It joins
q, k and v (and gate and up) into one layer, so these must be quantised alike, with one input scale and, where a format
has a scale for the whole weight, with that one too.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from modelopt_eagle.draft import DraftConfig
from modelopt_eagle.export.engines.profile import QuantRules
from modelopt_eagle.export.quant_formats import SCALES, scaled_layers
from modelopt_eagle.export.tensors import module_shapes

FUSED = (
    ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    ("gate_up_proj", ("gate_proj", "up_proj")),
    ("fused_qkv_a_proj", ("q_a_proj", "kv_a_proj_with_mqa")),
)
"""An engine's layer and the weights that it joins into it; plain ``q_proj`` beside latent attention stays alone."""
WEIGHTS = {"FP8": torch.float8_e4m3fn, "NVFP4": torch.uint8, "INT8": torch.int8}
NEEDED = {"FP8": ("weight_scale", "input_scale"), "NVFP4": SCALES, "INT8": ("weight_scale",)}
SHARED = {"FP8": ("weight_scale", "input_scale"), "NVFP4": ("weight_scale_2", "input_scale"), "INT8": ()}
"""Scales that the parts of a joined layer must have in common; int8 has one for each row."""


def told(data: dict[str, Any], legacy: dict[str, Any] | None, rules: QuantRules) -> tuple[str, str, list[str]] | None:
    """``(quant_method, algorithm, exclusions)`` where the engine looks for them; ``None`` if it finds nothing."""
    config = data.get("quantization_config")
    if rules.file == "hf_quant_config.json" and legacy is not None:
        inner = legacy.get("quantization") or {}
        return "modelopt", str(inner.get("quant_algo", "")).upper(), list(inner.get("exclude_modules") or [])
    if not isinstance(config, dict):
        return None
    method = str(config.get("quant_method", ""))
    algorithm = "" if method == "compressed-tensors" else str(config.get("quant_algo", "")).upper()
    return method, algorithm, list(config.get("ignore") or [])


def engine_layer(name: str, rules: QuantRules) -> str:
    """A linear layer (module's own name) as the engine says it, joined layers under their joint name."""
    found = re.match(r"layers\.(\d+)\.(.*)", name)
    if not found:
        return name if name == "lm_head" else f"model.{name}"
    index, rest = int(found.group(1)), found.group(2)
    first = rules.first_layer
    if index:
        count = re.search(r"\d+$", first)
        first = f"{first[: count.start()]}{int(count.group()) + index}" if count else f"{first}.{index}"
    return f"{first}.{rest}"


def joined(layers: list[str]) -> dict[str, list[str]]:
    """The linear layers of a head by the engine's layer that holds them; most hold one."""
    groups: dict[str, list[str]] = {}
    for name in layers:
        prefix, _, last = name.rpartition(".")
        for joint, parts in FUSED:
            if last in parts and all(f"{prefix}.{part}" in layers for part in parts):
                last = joint
        groups.setdefault(f"{prefix}.{last}" if prefix else last, []).append(name)
    return groups


def quant_reasons(
    data: dict[str, Any],
    legacy: dict[str, Any] | None,
    tensors: dict[str, Tensor],
    config: DraftConfig,
    rules: QuantRules,
) -> list[str]:
    """Everything by which an engine would read a quantised folder wrongly; empty for a plain folder that says so.

    Args:
        data: ``config.json``; ``legacy``: ``hf_quant_config.json``, if there is one.
        tensors: of the folder, under the names there.
        config: of the head.
        rules: of the engine.
    """
    layers = scaled_layers(tensors)
    said = told(data, legacy, rules)
    if said is None:
        return ["finds no quantisation config and reads the packed weights as they are"] if layers else []
    method, algorithm, excluded = said
    if not layers:
        return [f"is told that the head is quantised ({method} {algorithm}".rstrip() + "), and finds no scales"]
    form = rules.algorithms.get((method, algorithm))
    if form is None:
        return [f"knows no {method} {algorithm}".rstrip() + " for a draft"]
    reasons = []
    refusal = rules.refuses.get(config.decoder_type, {}).get(form)
    if refusal:
        reasons.append(f"does not serve {form.lower()} here: {refusal}")
    plain, meets = rules.plain.get(config.decoder_type, ()), rules.matches[method]
    reasons += [f"keeps {name} as a plain layer" for name in plain if name in layers]
    for joint, parts in joined(linear_names(config)).items():
        if any(part in plain for part in parts):
            continue
        hidden = {part: [e for e in excluded if meets(engine_layer(part, rules), e)] for part in parts}
        whole = [e for e in excluded if meets(engine_layer(joint, rules), e)]
        reasons += layer_reasons(joint, parts, hidden, whole, layers, form)
    return reasons


def layer_reasons(
    joint: str,
    parts: list[str],
    hidden: dict[str, list[str]],
    whole: list[str],
    layers: dict[str, dict[str, Tensor]],
    form: str,
) -> list[str]:
    """What is wrong with one of the engine's layers.

    Args:
        joint, parts: its name, and the weights that it holds.
        hidden: weight to the exclusions that meet it; ``whole``: those that meet the joint name.
        layers: see :func:`scaled_layers`.
    """
    quantised = [part for part in parts if part in layers]
    if quantised and len(quantised) < len(parts):
        return [f"joins {', '.join(parts)} into {joint}, of which only {', '.join(quantised)} are quantised"]
    met = [part for part in parts if hidden[part]] if not whole else list(parts)
    if met and len(met) < len(parts):
        return [f"joins {', '.join(parts)} into {joint}, of which the exclusions {excluded_of(hidden)} hide only some"]
    if met and quantised:
        return [f"takes {joint} for plain because of the exclusion {', '.join(whole or excluded_of(hidden))}"]
    if not met and not quantised:
        return [f"takes {joint} for quantised, no exclusion names it and its weight is plain"]
    reasons = []
    for part in quantised:
        held = layers[part]
        missing = [name for name in NEEDED[form] if name not in held]
        if missing:
            reasons.append(f"does not find {part}.{', '.join(missing)}")
        if "weight" not in held or held["weight"].dtype != WEIGHTS[form]:
            found = held["weight"].dtype if "weight" in held else "nothing"
            reasons.append(f"reads {part}.weight as {WEIGHTS[form]}, the folder has {found}")
    for name in SHARED[form]:
        values = [layers[part][name].float().reshape(-1) for part in quantised if name in layers[part]]
        if any(not torch.equal(value, values[0]) for value in values):
            reasons.append(f"takes one {name} for {joint}, its parts have different ones")
    return reasons


def excluded_of(hidden: dict[str, list[str]]) -> list[str]:
    """The exclusions that meet any part, each once."""
    return sorted({excluded for found in hidden.values() for excluded in found})


def linear_names(config: DraftConfig) -> list[str]:
    """The linear layers of a head, by the module's names."""
    names = [name.removesuffix(".weight") for name, shape in module_shapes(config).items() if len(shape) == 2]
    return [name for name in names if name != "embed_tokens"]
