"""Number formats of quantised heads: packing a weight as engines read it, and the plain computation with it.

* fp8: ``weight`` float8_e4m3fn ``[out, in]``; ``weight_scale`` and ``input_scale`` one float32 each, ``amax/448``.
* nvfp4: ``weight`` uint8 ``[out, in/2]``, two e2m1 numbers a byte, the even one low; ``weight_scale`` float8_e4m3fn
  ``[out, in/16]`` in units of ``weight_scale_2``; that and ``input_scale`` one float32 each, ``amax/(6·448)``.
* int8: ``weight`` int8 ``[out, in]``; ``weight_scale`` float32 ``[out, 1]``, ``amax/127`` of a row. Inputs are scaled
  by their own ``amax/127``, token by token: one scale for all of them loses a fifth of the acceptance length, because
  the target's hidden states hold a few very large numbers.

:class:`QuantizedLinear` computes with the packed numbers themselves, in float32, so acceptance is measured with what is
exported; :func:`unpacked` and :func:`with_packed` read a quantised folder so. Sources: nvidia-modelopt 0.47
``qtensor``, vLLM 0.32 ``quantization/modelopt.py`` and ``compressed_tensors``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from modelopt_eagle.draft import EagleModule
from modelopt_eagle.errors import CheckpointError
from modelopt_eagle.export.tensors import module_name

FORMATS = ("fp8", "nvfp4", "int8")
FP8_MAX, FP4_MAX, INT8_MAX = 448.0, 6.0, 127.0
BLOCK = 16
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_EDGES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Half-way points; a tie goes to the number whose last bit is zero."""
ALGORITHMS = {"fp8": "FP8", "nvfp4": "NVFP4", "int8": "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN"}
"""Names in ``hf_quant_config.json``."""
SCALES = ("weight_scale", "weight_scale_2", "input_scale")
FORMS = {torch.float8_e4m3fn: "fp8", torch.uint8: "nvfp4", torch.int8: "int8"}
"""Format by the dtype of a packed weight."""


def to_fp8(x: Tensor) -> Tensor:
    """Any float to float8_e4m3fn, values outside held at the edge."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def to_e2m1(x: Tensor) -> Tensor:
    """Codes 0..15 (uint8) of the nearest 4-bit floats; sign in the highest bit."""
    magnitude = x.abs()
    edges = torch.tensor(E2M1_EDGES, device=x.device)
    code = torch.bucketize(magnitude, edges)  # a value on an edge counts to the lower number
    on_edge = (magnitude.unsqueeze(-1) == edges).any(-1) & (code % 2 == 1)
    return (code + on_edge).to(torch.uint8) | (torch.signbit(x).to(torch.uint8) << 3)


def from_e2m1(code: Tensor) -> Tensor:
    """Inverse of :func:`to_e2m1`, float32."""
    value = torch.tensor(E2M1, device=code.device)[(code & 7).long()]
    return torch.where(code & 8 > 0, -value, value)


def block_scales(x: Tensor, scale_2: Tensor) -> Tensor:
    """``[..., in] -> [..., in/16]`` float8 scales of blocks of 16, in units of ``scale_2``; 1 where a block is zero."""
    amax = x.unflatten(-1, (-1, BLOCK)).abs().amax(-1)  # [...,in/16]
    scales = amax / (FP4_MAX * scale_2)
    return to_fp8(torch.where(scales == 0, torch.ones_like(scales), scales))


def fp4_codes(x: Tensor, scales: Tensor, scale_2: Tensor) -> Tensor:
    """``[..., in]`` e2m1 codes of ``x`` under block scales."""
    step = (scales.float() * scale_2).repeat_interleave(BLOCK, -1)  # [...,in]
    return to_e2m1(x / step.clamp_min(torch.finfo(torch.float32).tiny))


def fp4_values(codes: Tensor, scales: Tensor, scale_2: Tensor) -> Tensor:
    """``[..., in]`` float32."""
    return from_e2m1(codes) * (scales.float() * scale_2).repeat_interleave(BLOCK, -1)


def pack(weight: Tensor, input_amax: float, weight_amax: float, form: str) -> dict[str, Tensor]:
    """A weight ``[out, in]`` as the tensors that engines read: ``weight``, ``weight_scale`` (``_2``), ``input_scale``.

    Args:
        input_amax: largest magnitude of the layer's input in calibration; int8 does without.
        weight_amax: the same of the weights that an engine fuses with this one (rows are scaled apart in int8).
    """
    weight = weight.detach().float().cpu()
    if form == "fp8":
        scale = torch.tensor(weight_amax / FP8_MAX)
        return {
            "weight": to_fp8(weight / scale),
            "weight_scale": scale,
            "input_scale": torch.tensor(input_amax / FP8_MAX),
        }
    if form == "int8":
        scale = weight.abs().amax(1, keepdim=True).clamp_min(1e-8) / INT8_MAX  # [out,1]
        rounded = (weight / scale).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8)
        return {"weight": rounded, "weight_scale": scale}
    scale_2 = torch.tensor(weight_amax / (FP4_MAX * FP8_MAX))
    scales = block_scales(weight, scale_2)  # [out,in/16]
    codes = fp4_codes(weight, scales, scale_2)  # [out,in]
    packed = codes[:, 0::2] | (codes[:, 1::2] << 4)  # [out,in/2]
    input_scale = torch.tensor(input_amax / (FP4_MAX * FP8_MAX))
    return {"weight": packed, "weight_scale": scales, "weight_scale_2": scale_2, "input_scale": input_scale}


def unpack(tensors: dict[str, Tensor], form: str) -> Tensor:
    """The weight ``[out, in]`` float32 that the packed tensors stand for."""
    weight = tensors["weight"]
    if form == "nvfp4":
        codes = torch.stack((weight & 15, weight >> 4), dim=-1).flatten(-2)  # [out,in]
        return fp4_values(codes, tensors["weight_scale"], tensors["weight_scale_2"])
    return weight.float() * tensors["weight_scale"]


def quantize_input(x: Tensor, scale: Tensor | None, form: str) -> Tensor:
    """``x [..., in]`` (float32) rounded to the format, as engines do before the product; ``scale``: not for int8."""
    if form == "int8":
        scale = (x.abs().amax(-1, keepdim=True) / INT8_MAX).clamp_min(torch.finfo(torch.float32).tiny)  # [...,1]
        return (x / scale).round() * scale
    if form == "fp8":
        return to_fp8(x / scale).float() * scale
    scales = block_scales(x, scale)
    return fp4_values(fp4_codes(x, scales, scale), scales, scale)


class QuantizedLinear(nn.Module):
    """A linear layer that computes with packed numbers, plainly; for measuring, not for speed."""

    def __init__(self, tensors: dict[str, Tensor], bias: Tensor | None, form: str):
        super().__init__()
        self.form = form
        self.register_buffer("weight", unpack(tensors, form))  # [out,in]
        scale = tensors.get("input_scale")
        self.register_buffer("input_scale", None if scale is None else scale.float())
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in] -> [..., out]`` in the dtype of ``x``."""
        rounded = quantize_input(x.float(), self.input_scale, self.form)
        return F.linear(rounded, self.weight, None if self.bias is None else self.bias.float()).to(x.dtype)


def engine_config(form: str, excluded: list[str], producer: dict[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """``(hf_quant_config.json, quantization_config of config.json)``."""
    legacy: dict[str, Any] = {
        "producer": producer,
        "quantization": {"quant_algo": ALGORITHMS[form], "kv_cache_quant_algo": None, "exclude_modules": excluded},
    }
    if form == "int8":  # vLLM's modelopt loader has no int8; its compressed-tensors loader has, on CPUs too
        eight = {"num_bits": 8, "type": "int", "symmetric": True}
        group = {
            "targets": ["Linear"],
            "weights": {**eight, "strategy": "channel", "dynamic": False},
            "input_activations": {**eight, "strategy": "token", "dynamic": True},
        }
        return legacy, {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": excluded,
            "kv_cache_scheme": None,
        }
    numbers: dict[str, Any] = {"dynamic": False, "num_bits": 8 if form == "fp8" else 4, "type": "float"}
    if form == "nvfp4":
        numbers["group_size"] = BLOCK
        legacy["quantization"]["group_size"] = BLOCK
    return legacy, {
        "quant_method": "modelopt",
        "quant_algo": ALGORITHMS[form],
        "config_groups": {"group_0": {"input_activations": numbers, "weights": numbers, "targets": ["Linear"]}},
        "ignore": excluded,
        "producer": producer,
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


def unpacked(tensors: dict[str, Tensor], where: str) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """A folder's tensors with every packed weight as plain numbers, and the packed parts by layer (module's names).

    Raises:
        CheckpointError: a packed weight of a format that is not known here, or without its scales.
    """
    packed = scaled_layers(tensors)
    plain = {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[2] not in SCALES}
    dtype = next((t.dtype for n, t in plain.items() if module_name(n) == "lm_head.weight"), torch.float32)
    for name in plain:
        layer, _, part = module_name(name).rpartition(".")
        if part == "weight" and layer in packed:
            try:
                plain[name] = unpack(packed[layer], FORMS[packed[layer]["weight"].dtype]).to(dtype)
            except (KeyError, RuntimeError) as error:
                raise CheckpointError(
                    f"{where}: {name} is packed in a way that is not known here "
                    f"({packed[layer]['weight'].dtype} with {', '.join(sorted(set(packed[layer]) - {'weight'}))})"
                ) from error
    return plain, packed


def with_packed(module: EagleModule, packed: dict[str, dict[str, Tensor]]) -> EagleModule:
    """The module with a :class:`QuantizedLinear` for every packed layer (changed in place)."""
    for name, parts in packed.items():
        parent, _, child = name.rpartition(".")
        holder = module.get_submodule(parent) if parent else module
        form = FORMS[parts["weight"].dtype]
        setattr(holder, child, QuantizedLinear(parts, getattr(holder, child).bias, form))
    return module.eval()
