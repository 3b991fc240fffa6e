"""Dtypes by name, and how far hidden states that are held in one may be from what they should be."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from modelopt_eagle.errors import CheckpointError, EagleError


@dataclass(frozen=True)
class StateDtype:
    """A dtype in which hidden states are held, with the differences that it excuses.

    Distances are norm of the difference over the norm. A state of another token, layer or model is much further away
    than any of them.

    Attributes:
        torch: of the tensor.
        stored: whether a feature store writes it.
        computed: most that two passes of a target in this dtype may differ, at every position (another batch shape).
        same: most that two passes may differ for a store to hold one of their states for both, likewise.
        recomputed: most that a stored state may be from what transformers gives now, median over a row; it covers an
            engine that ran in bfloat16.
        top1: least share of positions at which the stored state gives the stored argmax.
        logsumexp: most that the median log-sum-exp of logits from stored states may differ, relative; a norm left out
            shows here first.
    """

    torch: torch.dtype
    stored: bool
    computed: float
    same: float
    recomputed: float
    top1: float
    logsumexp: float


STATE_DTYPES = {
    "float32": StateDtype(
        torch.float32, stored=True, computed=1e-3, same=1e-3, recomputed=0.05, top1=0.95, logsumexp=0.01
    ),
    "bfloat16": StateDtype(
        torch.bfloat16, stored=True, computed=5e-2, same=3e-2, recomputed=0.05, top1=0.93, logsumexp=0.03
    ),
    "float16": StateDtype(
        torch.float16, stored=False, computed=5e-2, same=3e-2, recomputed=0.05, top1=0.93, logsumexp=0.03
    ),
    "float8_e4m3": StateDtype(
        torch.float8_e4m3fn, stored=True, computed=5e-2, same=5e-2, recomputed=0.1, top1=0.7, logsumexp=0.1
    ),
    "int8": StateDtype(
        torch.int8, stored=True, computed=5e-2, same=5e-2, recomputed=0.3, top1=0.5, logsumexp=0.25
    ),
}  # fmt: skip
"""By the name that contracts and options use."""

MODEL_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Dtypes in which targets and heads are loaded, sent and exported, by name."""


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16 -> "bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def parse_dtype(name: str | torch.dtype | None, error: type[EagleError] = CheckpointError) -> torch.dtype | None:
    """A model's dtype by its name (``None`` and dtypes stay as they are).

    Args:
        name: ``bfloat16`` or ``torch.bfloat16``.
        error: what is raised.

    Raises:
        EagleError: of the given class: no such floating dtype.
    """
    if name is None or isinstance(name, torch.dtype):
        return name
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise error(f"dtype {name!r} is unknown; use {', '.join(MODEL_DTYPES)}")
    return dtype


def logit_tolerance(dtype: torch.dtype) -> float:
    """Most that two computations of a model's logits in this dtype may differ, over the largest logit."""
    return 1e-4 if dtype == torch.float32 else 3e-2
