"""What each engine reads of a quantised draft folder, as data, and a check of a folder against it.

An engine decides by name which of its layers are quantised: those that the exclusions do not hide. If it takes a layer
for quantised that the folder holds plain, or the other way round, it fails or reads packed bytes as weights. It joins
q, k and v (and gate and up) into one layer, so these must be quantised alike, with one input scale and, where a format
has a scale for the whole weight, with that one too.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from modelopt_eagle.draft import DraftConfig
from modelopt_eagle.export.names import module_name, module_shapes

SCALES = ("weight_scale", "weight_scale_2", "input_scale")
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


def part_of_name(name: str, excluded: str) -> bool:
    """vLLM, ModelOpt formats: the exclusion is part of the layer's name, or a pattern that matches it."""
    return excluded in name or fnmatchcase(name, excluded)


def whole_name(name: str, excluded: str) -> bool:
    """vLLM, compressed-tensors: the whole name, or ``re:`` and an expression that matches from its start."""
    return bool(re.match(excluded[3:], name)) if excluded.startswith("re:") else name == excluded


def pattern(name: str, excluded: str) -> bool:
    """TensorRT-LLM: a shell pattern that matches the whole name."""
    return fnmatchcase(name, excluded)


@dataclass(frozen=True)
class QuantProfile:
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
    algorithms: dict[tuple[str, str], str]
    matches: dict[str, Callable[[str, str], bool]]
    first_layer: str
    plain: dict[str, tuple[str, ...]]
    refuses: dict[str, dict[str, str]]


SPLITS_KV_B = "it splits kv_b_proj after loading and takes floating numbers only"
NOBODY_READ = "its code was not read for quantised heads of this type, so it is not known to serve them"
QUANT_PROFILES = {
    "vllm": QuantProfile(
        source="vllm 0.32.0: model_executor/models/utils.py get_draft_quant_config, model_loader/weight_utils.py "
        "get_quant_config, layers/quantization/{modelopt,compressed_tensors}",
        file="config.json",
        algorithms={("modelopt", "FP8"): "FP8", ("modelopt", "NVFP4"): "NVFP4", ("compressed-tensors", ""): "INT8"},
        matches={"modelopt": part_of_name, "compressed-tensors": whole_name},
        first_layer="model.layers.30",  # it counts on from the target's last layer; 30 stands for any
        plain={"kimik2": ("lm_head",)},
        refuses={},
    ),
    "sglang": QuantProfile(
        source="sglang 0.5.23: srt/models/{llama_eagle3,kimi_k25_eagle3}.py",
        file="config.json",
        algorithms={("modelopt", "FP8"): "FP8", ("modelopt", "NVFP4"): "NVFP4", ("compressed-tensors", ""): "INT8"},
        matches={"modelopt": part_of_name, "compressed-tensors": whole_name},
        first_layer="model.layers.0",
        plain={"llama": ("fc",)},
        refuses={
            "kimik2": {
                "NVFP4": "it takes a latent-attention head for bfloat16 when it is told of nvfp4",
                "FP8": SPLITS_KV_B,
                "INT8": SPLITS_KV_B,
            }
        },
    ),
    "tensorrt_llm": QuantProfile(
        source="NVIDIA/TensorRT-LLM: _torch/models/modeling_speculative.py at 00679c6, _torch/model_config.py at "
        "008e0af",
        file="hf_quant_config.json",
        algorithms={("modelopt", "FP8"): "FP8", ("modelopt", "NVFP4"): "NVFP4"},
        matches={"modelopt": pattern},
        first_layer="model.midlayer",
        plain={},
        refuses={"kimik2": {"FP8": NOBODY_READ, "NVFP4": NOBODY_READ}},
    ),
}


def is_quantised(names) -> bool:
    """Whether a folder's tensor names are those of a quantised head."""
    return any(name.rpartition(".")[2] in SCALES for name in names)


def scaled_layers(tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Layer name (module's own) to its ``weight`` and scales, for every layer that has a scale."""
    layers: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        layer, _, part = module_name(name).rpartition(".")
        if part in SCALES:
            layers.setdefault(layer, {})[part] = tensor
    for name, tensor in tensors.items():
        layer, _, part = module_name(name).rpartition(".")
        if part == "weight" and layer in layers:
            layers[layer]["weight"] = tensor
    return layers


def plain_shapes(tensors: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a folder's tensors as they would be without quantisation."""
    shapes = {}
    for name, tensor in tensors.items():
        if name.rpartition(".")[2] not in SCALES:
            shape = tuple(tensor.shape)
            shapes[name] = (shape[0], shape[1] * 2) if tensor.dtype == torch.uint8 and len(shape) == 2 else shape
    return shapes


def told(
    data: dict[str, Any], legacy: dict[str, Any] | None, profile: QuantProfile
) -> tuple[str, str, list[str]] | None:
    """``(quant_method, algorithm, exclusions)`` where the engine looks for them; ``None`` if it finds nothing."""
    config = data.get("quantization_config")
    if profile.file == "hf_quant_config.json" and legacy is not None:
        inner = legacy.get("quantization") or {}
        return "modelopt", str(inner.get("quant_algo", "")).upper(), list(inner.get("exclude_modules") or [])
    if not isinstance(config, dict):
        return None
    method = str(config.get("quant_method", ""))
    algorithm = "" if method == "compressed-tensors" else str(config.get("quant_algo", "")).upper()
    return method, algorithm, list(config.get("ignore") or [])


def engine_layer(name: str, profile: QuantProfile) -> str:
    """A linear layer (module's own name) as the engine says it, joined layers under their joint name."""
    found = re.match(r"layers\.(\d+)\.(.*)", name)
    if not found:
        return name if name == "lm_head" else f"model.{name}"
    index, rest = int(found.group(1)), found.group(2)
    first = profile.first_layer
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
    engine: str,
) -> list[str]:
    """Everything by which an engine would read a quantised folder wrongly; empty for a plain folder that says so.

    Args:
        data: ``config.json``; ``legacy``: ``hf_quant_config.json``, if there is one.
        tensors: of the folder, under the names there.
        config: of the head.
        engine: a key of :data:`QUANT_PROFILES`.
    """
    profile, layers = QUANT_PROFILES[engine], scaled_layers(tensors)
    said = told(data, legacy, profile)
    if said is None:
        return ["finds no quantisation config and reads the packed weights as they are"] if layers else []
    method, algorithm, excluded = said
    if not layers:
        return [f"is told that the head is quantised ({method} {algorithm}".rstrip() + "), and finds no scales"]
    form = profile.algorithms.get((method, algorithm))
    if form is None:
        return [f"knows no {method} {algorithm}".rstrip() + " for a draft"]
    reasons = []
    refusal = profile.refuses.get(config.decoder_type, {}).get(form)
    if refusal:
        reasons.append(f"does not serve {form.lower()} here: {refusal}")
    plain, meets = profile.plain.get(config.decoder_type, ()), profile.matches[method]
    reasons += [f"keeps {name} as a plain layer" for name in plain if name in layers]
    for joint, parts in joined(linear_names(config)).items():
        if any(part in plain for part in parts):
            continue
        hidden = {part: [e for e in excluded if meets(engine_layer(part, profile), e)] for part in parts}
        whole = [e for e in excluded if meets(engine_layer(joint, profile), e)]
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
