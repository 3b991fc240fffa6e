"""Top-k whose ties are ordered: value descending, then index ascending (``torch.topk`` promises nothing on ties)."""

from __future__ import annotations

import torch
from torch import Tensor


def stable_topk(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of the last axis.

    Value and index are packed into one int64 that has no ties, so no full sort is needed. NaN ranks below every
    number; -0.0 equals 0.0.

    Args:
        values: ``[..., n]`` float32.
        k: ``1 <= k <= n``.

    Returns:
        values and indices ``[..., k]``.
    """
    bits = (values + 0.0).nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf")).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()  # ascending with the value
    index = torch.arange(values.shape[-1], device=values.device)  # [n]
    best = ((ordered << 32) - index).topk(k, dim=-1).values  # [...,k]
    chosen = -best & 0xFFFFFFFF  # the index, as the upper half is a multiple of 2^32
    return values.gather(-1, chosen), chosen
