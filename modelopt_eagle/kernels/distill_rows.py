"""The distillation loss of rows of draft logits, and its gradient written over them.

A row ``x`` of the head's logits has to meet a row ``t`` of the target's. With ``q`` and ``p`` their softmaxes the term
of a row is the cross-entropy ``-Σ p log q`` (or the divergence ``Σ p log(p/q)``, whose gradient is the same), or the
mixture ``λ·KL + (1-λ)·TV`` with the total variation ``TV = ½ Σ |p - q|``. With hard labels ``p`` is one at a token.

The kernel makes a program for up to four rows that meet the same row of the target, as the depths of a rollout do: the
target's row is read once for all of them. The first pass over the vocabulary keeps running maxima, sums and products,
the second forms the gradient (a pass between them sums the total variation, where it is asked for). Rows of up to
some 100,000 tokens stay in the L2 cache between the passes; longer ones are read again from memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from modelopt_eagle.kernels.dispatch import (
    TritonKernel,
    choose_backend,
    power_of_two,
    require,
    require_integers,
    require_shape,
    warps_for,
)
from modelopt_eagle.kernels.work import Work

if TYPE_CHECKING:
    import triton.language as tl

MAX_TILE = 2048  # elements of a tile, eight a thread: with more a thread has too few registers
MAX_ROWS = 4  # rows of a group, and so of a tile
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def distill_rows(
    draft: Tensor,
    teacher: Tensor,
    place: Tensor,
    groups: Tensor,
    top: Tensor,
    weight: Tensor,
    share: Tensor | None = None,
    *,
    subtract_entropy: bool = False,
    gradient: bool = True,
    distance: bool = False,
    most: int = MAX_ROWS,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss terms of m rows of draft logits; everything is computed in float32.

    Args:
        draft: ``[m, Vd]`` float32, bfloat16 or float16 logits of the head, rows contiguous; overwritten with
            ``weight`` times the gradient of the term by them, rounded to their dtype, where ``gradient`` is set.
        teacher: ``[c, Vd]`` floating logits of the target over the same tokens, rows contiguous; or ``[c]`` int32 or
            int64, for hard labels: the draft id that is to be met.
        place: ``[m]`` int32 or int64 row of ``teacher`` that each row has to meet.
        groups: ``[g, 2]`` int32 or int64: first row and number of rows (1 to ``most``) that stand behind each other in
            ``draft`` and meet the same row of the target; each row lies in one group.
        top: ``[c]`` int32 or int64 draft id of the target's choice, -1 where the head cannot draft it.
        weight: ``[m]`` float32 factor on the gradient; the terms are returned without it.
        share: ``[m]`` float32 λ of each row; ``None``: 1, and no total variation.
        subtract_entropy: the term is the divergence rather than the cross-entropy.
        gradient: write the gradient; without it ``draft`` stays as it is.
        distance: return the total variation also where no ``share`` asks for it.
        most: rows of the largest group, at most ``MAX_ROWS``; the caller knows, and a GPU is not asked.
        backend: see ``dispatch.py``.

    Returns:
        ``terms [m]`` float32; ``hits [m]`` int32, 1 where the likeliest token of the head (the first of equals) is the
        target's choice; ``distances [m]`` float32 total variation, 0 where it was not asked for.

    Raises:
        DecodingError: shapes or dtypes that do not fit.
    """
    require(
        draft.dim() == 2 and draft.dtype in FLOATS, lambda: f"draft must be [m, Vd] floats, found {describe(draft)}"
    )
    rows, width = draft.shape
    require(draft.stride(1) == 1 or width == 1, "draft must have contiguous rows: make it so with .contiguous()")
    if teacher.dim() == 1:
        require_integers("teacher", teacher, None)
    else:
        require(teacher.dtype in FLOATS, lambda: f"teacher must be floats or labels, found {describe(teacher)}")
        require_shape("teacher", teacher, None, width)
        require(teacher.stride(1) == 1 or width == 1, "teacher must have contiguous rows: use .contiguous()")
    require(1 <= most <= MAX_ROWS, lambda: f"most must be 1 to {MAX_ROWS} rows of a group, found {most}")
    require_integers("place", place, rows)
    require_integers("groups", groups, None, 2)
    require_integers("top", top, teacher.shape[0])
    require_factor("weight", weight, rows)
    if share is not None:
        require_factor("share", share, rows)
    return torch.ops.modelopt_eagle.distill_rows(
        draft, teacher, place, groups, top, weight, share, subtract_entropy, gradient, distance, most, backend
    )


def distill_rows_work(rows: int, positions: int, width: int, size: int) -> Work:
    """The least that one call with a gradient does: each row of the head read and written, each of the target read.

    Args:
        rows: m.
        positions: rows of the target that are met.
        width: Vd.
        size: bytes of an element of both.
    """
    vectors = 4 * (5 * rows + 2 * positions)  # factors, terms, hits, distances; choices and groups
    return Work((2 * rows + positions) * width * size + vectors, 0)


def distillation_work(rows: int, positions: int, width: int, hidden: int, target_hidden: int, size: int) -> Work:
    """The least that the loss does with its gradients, by states and by one output matrix.

    Args:
        rows: n predictions.
        positions: teacher positions that they meet.
        width: Vd.
        hidden, target_hidden: widths of a state of the head and of the target.
        size: bytes of an element; the matrix's gradient is float32.

    Returns:
        three products of the head (logits, and both gradients) and one of the target; nothing as wide as the
        vocabulary is counted as moved, since a kernel that holds it all could do without.
    """
    moved = size * (2 * rows * hidden + positions * target_hidden + width * (hidden + target_hidden))
    return Work(moved + 4 * width * hidden, 2 * width * (3 * rows * hidden + positions * target_hidden))


def require_factor(name: str, tensor: Tensor, rows: int) -> None:
    """Raise unless ``tensor`` is float32 ``[rows]``."""
    require(tensor.dtype == torch.float32, lambda: f"{name} must be float32, found {tensor.dtype}")
    require_shape(name, tensor, rows)


def describe(tensor: Tensor) -> str:
    """Dtype and shape for a message."""
    return f"{tensor.dtype} {list(tensor.shape)}"


@torch.library.custom_op("modelopt_eagle::distill_rows", mutates_args=("draft",))
def _distill_rows_op(
    draft: Tensor,
    teacher: Tensor,
    place: Tensor,
    groups: Tensor,
    top: Tensor,
    weight: Tensor,
    share: Tensor | None,
    subtract_entropy: bool,
    gradient: bool,
    distance: bool,
    most: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    if choose_backend(backend, draft.device) == "reference":
        return distill_rows_reference(draft, teacher, place, top, weight, share, subtract_entropy, gradient, distance)
    result = empty_result(draft)
    width = draft.shape[1]
    rows = power_of_two(most)
    block = min(power_of_two(width), MAX_TILE // rows)
    if len(groups):
        _distill_rows_kernel[(len(groups),)](
            draft, teacher, place.contiguous(), groups.contiguous(), top.contiguous(), weight.contiguous(),
            weight if share is None else share.contiguous(), *result, draft.stride(0), teacher.stride(0), width,
            HARD=teacher.dim() == 1, MIXED=share is not None, ENTROPY=subtract_entropy, GRADIENT=gradient,
            DISTANCE=distance, ROWS=rows, BLOCK=block, num_warps=warps_for(rows * block), num_stages=2,
        )  # fmt: skip
    return result


@_distill_rows_op.register_fake
def _(draft, teacher, place, groups, top, weight, share, subtract_entropy, gradient, distance, most, backend):
    return empty_result(draft)


def empty_result(draft: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialised terms, hits and distances."""
    rows = draft.shape[0]
    return (
        torch.empty(rows, dtype=torch.float32, device=draft.device),
        torch.empty(rows, dtype=torch.int32, device=draft.device),
        torch.empty(rows, dtype=torch.float32, device=draft.device),
    )


def distill_rows_reference(draft, teacher, place, top, weight, share, subtract_entropy, gradient, distance):
    """The same with plain tensor operations, every distribution at once."""
    x = draft.float()  # [m,Vd]
    log_q = x.log_softmax(-1)
    q = log_q.exp()
    if teacher.dim() == 1:
        p = torch.nn.functional.one_hot(teacher.long(), x.shape[1]).float()[place]  # [m,Vd]
    else:
        p = teacher.float().softmax(-1)[place]
    term = -(p * log_q).sum(-1)  # [m]
    if subtract_entropy:
        term = term + torch.special.xlogy(p, p).sum(-1)
    hits = (x.argmax(-1) == top[place]).int()
    distances = torch.zeros_like(term)
    if distance or share is not None:
        distances = 0.5 * (p - q).abs().sum(-1)
    by_logits = q - p  # [m,Vd]
    if share is not None:
        term = share * term + (1 - share) * distances
        sign = 0.5 * (q - p).sign()
        by_distance = q * (sign - (q * sign).sum(-1, keepdim=True))
        by_logits = share[:, None] * by_logits + (1 - share[:, None]) * by_distance
    if gradient:
        draft.copy_(weight[:, None] * by_logits)
    return term, hits, distances


@TritonKernel
def _teacher_tile(teacher_ptr, column, real, label, peak, total, HARD: tl.constexpr):
    """``p`` of some columns: [BLOCK], 0 outside."""
    if HARD:
        return tl.where(column == label, 1.0, 0.0)
    logits = tl.load(teacher_ptr + column, mask=real, other=0.0).to(tl.float32)
    return tl.where(real, tl.exp(logits - peak) / total, 0.0)


@TritonKernel
def _distill_rows_kernel(
    draft_ptr, teacher_ptr, place_ptr, groups_ptr, top_ptr, weight_ptr, share_ptr, term_ptr, hit_ptr, distance_ptr,
    stride_draft, stride_teacher, width,
    HARD: tl.constexpr, MIXED: tl.constexpr, ENTROPY: tl.constexpr, GRADIENT: tl.constexpr, DISTANCE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a group of at most ROWS rows."""
    LOWEST: tl.constexpr = -3.0e38
    group = tl.program_id(0)
    begin = tl.load(groups_ptr + 2 * group).to(tl.int32)
    rows = begin + tl.arange(0, ROWS)  # [R]
    inside = rows < begin + tl.load(groups_ptr + 2 * group + 1).to(tl.int32)
    draft_rows = draft_ptr + rows.to(tl.int64)[:, None] * stride_draft  # [R,1]
    place = tl.load(place_ptr + begin).to(tl.int64)
    label = tl.full((), 0, tl.int32)
    if HARD:
        label = tl.load(teacher_ptr + place).to(tl.int32)
    else:
        teacher_ptr += place * stride_teacher
    peak = tl.full((ROWS,), LOWEST, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    cross = tl.zeros((ROWS,), tl.float32)  # Σ p x, times the teacher's sum so far
    best = tl.zeros((ROWS,), tl.int32)
    teacher_peak = tl.full((), LOWEST, tl.float32)
    teacher_total = tl.full((), 0.0, tl.float32)
    own = tl.full((), 0.0, tl.float32)  # Σ p t, times the teacher's sum so far
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)  # [BLOCK]
        real = column < width
        x = tl.load(draft_rows + column[None, :], mask=inside[:, None] & real[None, :], other=0.0).to(tl.float32)
        low = tl.where(real[None, :], x, float("-inf"))
        high = tl.max(low, 1)  # [R]
        first = tl.min(tl.where(low == high[:, None], column[None, :], width), 1)
        best = tl.where(high > peak, first, best)
        higher = tl.maximum(peak, high)
        total = total * tl.exp(peak - higher) + tl.sum(tl.exp(low - higher[:, None]), 1)
        peak = higher
        if HARD:
            cross += tl.sum(tl.where(column[None, :] == label, x, 0.0), 1)
        else:
            t = tl.load(teacher_ptr + column, mask=real, other=0.0).to(tl.float32)
            higher_t = tl.maximum(teacher_peak, tl.max(tl.where(real, t, float("-inf")), 0))
            shrink = tl.exp(teacher_peak - higher_t)
            mass = tl.where(real, tl.exp(t - higher_t), 0.0)  # [BLOCK]
            teacher_total = teacher_total * shrink + tl.sum(mass, 0)
            cross = cross * shrink + tl.sum(mass[None, :] * x, 1)
            if ENTROPY:
                own = own * shrink + tl.sum(tl.where(mass > 0, mass * t, 0.0), 0)
            teacher_peak = higher_t
    norm = peak + tl.log(total)  # [R] log-sum-exp
    term = norm - cross
    if not HARD:
        term = norm - cross / teacher_total
        if ENTROPY:
            term += own / teacher_total - (teacher_peak + tl.log(teacher_total))
    distance = tl.zeros((ROWS,), tl.float32)
    tilt = tl.zeros((ROWS,), tl.float32)  # Σ q·sign(q - p)
    if MIXED or DISTANCE:
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            real = column < width
            x = tl.load(draft_rows + column[None, :], mask=inside[:, None] & real[None, :], other=0.0)
            q = tl.where(real[None, :], tl.exp(x.to(tl.float32) - norm[:, None]), 0.0)
            p = _teacher_tile(teacher_ptr, column, real, label, teacher_peak, teacher_total, HARD)
            gap = q - p[None, :]
            distance += 0.5 * tl.sum(tl.abs(gap), 1)
            tilt += tl.sum(tl.where(gap > 0, q, tl.where(gap < 0, -q, 0.0)), 1)
    share = tl.full((ROWS,), 1.0, tl.float32)
    if MIXED:
        share = tl.load(share_ptr + rows, mask=inside, other=1.0)
        term = share * term + (1 - share) * distance
    if GRADIENT:
        weight = tl.load(weight_ptr + rows, mask=inside, other=0.0)
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            real = column < width
            kept = inside[:, None] & real[None, :]
            x = tl.load(draft_rows + column[None, :], mask=kept, other=0.0).to(tl.float32)
            q = tl.exp(x - norm[:, None])
            p = _teacher_tile(teacher_ptr, column, real, label, teacher_peak, teacher_total, HARD)
            result = q - p[None, :]
            if MIXED:
                sign = tl.where(result > 0, 1.0, tl.where(result < 0, -1.0, 0.0))
                result = share[:, None] * result + (1 - share[:, None]) * 0.5 * q * (sign - tilt[:, None])
            tl.store(draft_rows + column[None, :], weight[:, None] * result, mask=kept)
    tl.store(term_ptr + rows, term, mask=inside)
    top = tl.load(top_ptr + place).to(tl.int32)
    tl.store(hit_ptr + rows, (best == top).to(tl.int32), mask=inside)
    tl.store(distance_ptr + rows, distance, mask=inside)
