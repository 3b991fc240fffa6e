"""A quantised folder as a head that computes with its packed numbers, for measuring what engines will serve."""

from __future__ import annotations

import torch
from torch import Tensor

from modelopt_eagle.draft import EagleModule
from modelopt_eagle.errors import CheckpointError
from modelopt_eagle.export.engines.quantisation import SCALES, scaled_layers
from modelopt_eagle.export.names import module_name
from modelopt_eagle.export.quant_formats import QuantizedLinear, unpack

FORMS = {torch.float8_e4m3fn: "fp8", torch.uint8: "nvfp4", torch.int8: "int8"}
"""Format by the dtype of a packed weight."""


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
