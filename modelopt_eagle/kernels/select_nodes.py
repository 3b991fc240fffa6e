"""The final choice of an EAGLE-2 tree: the best ``count`` entries of the flat history, by a rule without ties.

Order: **score descending, then flat id ascending**; a NaN ranks after every number (after -inf), NaNs among
themselves by flat id; -0.0 equals 0.0. Scores are compared as float32. The tie rule is what keeps trees whole: a
parent's score is never below its child's and its id is smaller, so no child is kept without its parent.

The kernel needs no sort: it finds the ``count``-th best score by 32 halvings of the (order-preserving) integer form
of a float32, then keeps what is better and, of what is equal, the smallest ids. O(32 * H) work a row, any H.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from modelopt_eagle.kernels.dispatch import TritonKernel, choose_backend, power_of_two, require, warps_for

if TYPE_CHECKING:
    import triton.language as tl

MAX_BLOCK = 8192  # history entries a program holds in registers; longer histories are read in blocks of this many


def row_block(history: int) -> int:
    """Entries of a history of this length that a program holds at a time."""
    return min(power_of_two(history), MAX_BLOCK)


def select_nodes(scores: Tensor, count: int, *, backend: str = "auto") -> Tensor:
    """Flat ids of the best ``count`` scores of each row, in ascending id order.

    Args:
        scores: [B,H] floating point, compared as float32; any strides.
        count: entries to keep, 1 <= count <= H.
        backend: see ``dispatch.py``.

    Returns:
        [B,count] int32, ascending in each row.

    Raises:
        DecodingError: wrong shape or dtype, or ``count`` outside [1, H].
    """
    require(scores.dim() == 2, lambda: f"scores must have shape [B, H], found {list(scores.shape)}")
    require(scores.dtype.is_floating_point, lambda: f"scores must be floating point, found {scores.dtype}")
    history = scores.shape[1]
    require(1 <= count <= history, lambda: f"count must lie in [1, H={history}], found {count}")
    return torch.ops.modelopt_eagle.select_nodes(scores, count, backend)


@torch.library.custom_op("modelopt_eagle::select_nodes", mutates_args=())
def _select_nodes_op(scores: Tensor, count: int, backend: str) -> Tensor:
    if choose_backend(backend, scores.device) == "reference":
        return select_nodes_reference(scores, count)
    batch, history = scores.shape
    selected = torch.empty(batch, count, dtype=torch.int32, device=scores.device)  # [B,count]
    block = row_block(history)
    if batch:
        _select_nodes_kernel[(batch,)](
            scores, selected, scores.stride(0), scores.stride(1), history, count,
            BLOCK=block, ONE_BLOCK=history <= block, num_warps=warps_for(block),
        )  # fmt: skip
    return selected


@_select_nodes_op.register_fake
def _(scores, count, backend):
    return scores.new_empty(scores.shape[0], count, dtype=torch.int32)


def select_nodes_reference(scores: Tensor, count: int) -> Tensor:
    """The same rule by two stable sorts: by score, then NaN behind the rest. [B,H] -> [B,count] int32."""
    scores = scores.float() + 0.0  # [B,H]  -0.0 becomes 0.0
    missing = scores.isnan()  # [B,H]
    order = scores.masked_fill(missing, float("-inf")).sort(dim=1, descending=True, stable=True).indices  # [B,H]
    behind = missing.gather(1, order).to(torch.int8).sort(dim=1, stable=True).indices  # [B,H]
    best = order.gather(1, behind)[:, :count]  # [B,count]
    return best.sort(dim=1).values.to(torch.int32)


@TritonKernel
def order_keys(scores):
    """Integers that order as the scores do: float32 -> int32; NaN gets the smallest one."""
    scores = tl.where(scores == 0.0, 0.0, scores)
    bits = scores.to(tl.int32, bitcast=True)
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(scores != scores, -2147483648, keys)


@TritonKernel
def count_from(scores_ptr, stride, history, threshold, BLOCK: tl.constexpr):
    """How many keys of a row are at least ``threshold``, reading the row in blocks."""
    found = 0
    for start in range(0, history, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        inside = ids < history
        keys = order_keys(tl.load(scores_ptr + ids * stride, mask=inside, other=0.0).to(tl.float32))
        found += tl.sum((inside & (keys >= threshold)).to(tl.int32))
    return found


@TritonKernel
def select_row(scores_ptr, stride, selected_ptr, history, count, BLOCK: tl.constexpr, ONE_BLOCK: tl.constexpr):
    """Write the ascending ids of a row's best ``count`` entries to ``selected_ptr``."""
    lane = tl.arange(0, BLOCK)
    held_inside = lane < history
    held = order_keys(tl.load(scores_ptr + lane * stride, mask=held_inside, other=0.0).to(tl.float32))
    # The largest threshold that `count` keys reach is the count-th best key. Built bit by bit from the top.
    threshold = tl.full((), -2147483648, tl.int64)
    for step in range(0, 32):
        trial = threshold + (tl.full((), 1, tl.int64) << (31 - step))
        trial_key = trial.to(tl.int32)
        if ONE_BLOCK:
            found = tl.sum((held_inside & (held >= trial_key)).to(tl.int32))
        else:
            found = count_from(scores_ptr, stride, history, trial_key, BLOCK)
        threshold = tl.where(found >= count, trial, threshold)
    limit = threshold.to(tl.int32)
    if ONE_BLOCK:
        above = tl.sum((held_inside & (held > limit)).to(tl.int32))
    else:  # no key is larger than 2**31 - 1, so limit + 1 may only wrap where nothing is above
        above = tl.where(limit == 2147483647, 0, count_from(scores_ptr, stride, history, limit + 1, BLOCK))
    room = count - above  # how many of the entries that equal the limit are kept: those with the smallest ids

    kept_before = 0
    tied_before = 0
    for start in range(0, history, BLOCK):
        ids = start + lane
        inside = ids < history
        keys = order_keys(tl.load(scores_ptr + ids * stride, mask=inside, other=0.0).to(tl.float32))
        tied = (inside & (keys == limit)).to(tl.int32)
        tie_rank = tied_before + tl.cumsum(tied, 0) - tied
        keep = (inside & (keys > limit)) | ((tied != 0) & (tie_rank < room))
        kept = keep.to(tl.int32)
        position = kept_before + tl.cumsum(kept, 0) - 1
        tl.store(selected_ptr + position, ids, mask=keep)
        kept_before += tl.sum(kept)
        tied_before += tl.sum(tied)


@TritonKernel
def _select_nodes_kernel(
    scores_ptr, selected_ptr, stride_row, stride_entry, history, count, BLOCK: tl.constexpr, ONE_BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    select_row(
        scores_ptr + row * stride_row, stride_entry, selected_ptr + row * count, history, count, BLOCK, ONE_BLOCK
    )
