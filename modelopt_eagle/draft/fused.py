"""When a head trains by the kernels of its layers' inputs, and in which dtype products are made.

Only where a gradient is kept: drafting runs on torch's operations, in graphs or few rows at a time. A compiled step
runs on them, too: the compiler makes the same fusions itself, and could not see into a kernel.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from modelopt_eagle.kernels.dispatch import choose_backend


def trains_by_kernel(x: Tensor) -> bool:
    """Whether what is computed from ``x`` is a part of training that kernels do on its device."""
    trains = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    return trains and choose_backend("auto", x.device) == "triton"


def product_dtype(*tensors: Tensor) -> torch.dtype:
    """The dtype of products under autocast, else the widest of the tensors'."""
    device = tensors[0].device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
