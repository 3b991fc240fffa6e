"""Attention of a rollout step: a range of step-0 keys for each query, and the few keys of its own column.

Query ``i`` sees the keys ``starts[i] <= j <= rows[i]`` and its own ``k`` column keys, in one softmax. Both bounds
ascend with the query, so a block of queries reads one slice of keys, and a block of keys is read by one run of
queries: the backward pass by keys is the forward pass with the parts exchanged. Query heads that share a key head lie
side by side in a block, so that a key is read once for all of them.

The column keys of all queries in a row are keys of the same kind: query ``i`` sees those of ``[i·k, (i+1)·k)``. So one
piece of code meets both kinds.

The backward pass is three launches without atomics: by queries, by keys, by column keys. It is deterministic. What is
kept for it is the inputs, the output and a log-sum-exp a query and head.

The plain reference and the least work of a call are in ``column_reference.py``, the tiles in ``column_tiles.py``.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from modelopt_eagle.kernels.column_reference import dense_column_attention_backward, dense_column_attention_with_sum
from modelopt_eagle.kernels.column_tiles import MAX_BYTES, blocks, constants, gpu_limits, precision, supported, tiles
from modelopt_eagle.kernels.dispatch import TritonKernel, choose_backend, require, require_shape

if TYPE_CHECKING:
    import triton.language as tl

MAX_BLOCK = 128
"""Most queries or keys of a tile."""

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def column_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    column_keys: Tensor,
    column_values: Tensor,
    rows: Tensor,
    starts: Tensor,
    scale: float,
    sees: Tensor | None = None,
    *,
    askers: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """One softmax over the visible step-0 keys and the query's own column, differentiable by its first five arguments.

    Args:
        q: ``[n, heads, dk]``; bfloat16, float16 or float32, and of the same dtype as the next four (the kernel).
        keys, values: ``[N, groups, dk]``, ``[N, groups, dv]``; ``heads`` is a multiple of ``groups``.
        column_keys, column_values: ``[n, k, groups, dk]``, ``[n, k, groups, dv]``.
        rows, starts: ``[n]`` int32 or int64, last and first key that each query sees; both ascending, within [0, N),
            ``starts <= rows``. Not checked: that would wait for the device.
        scale: factor on ``q·k``.
        sees: ``[heads / groups, k]`` bool, which column keys each query head of a group sees; ``None``: all.
        askers: :func:`askers_of` ``rows`` and ``starts``, where it is at hand already.
        backend: see ``dispatch.py``.

    Returns:
        ``[n, heads, dv]`` in the dtype of ``q``. Scores, softmax and sums are float32.

    Raises:
        DecodingError: shapes or dtypes that do not fit, or heads wider than ``MAX_BYTES``.
    """
    require(
        q.dim() == 3 and keys.dim() == 3 and values.dim() == 3,
        lambda: f"q, keys and values must have three dimensions, found {q.dim()}, {keys.dim()}, {values.dim()}",
    )
    queries, heads, dk = q.shape
    tokens, groups, dv = values.shape
    require_shape("keys", keys, tokens, groups, dk)
    columns = column_keys.shape[1]
    require_shape("column_keys", column_keys, queries, columns, groups, dk)
    require_shape("column_values", column_values, queries, columns, groups, dv)
    require_shape("rows", rows, queries)
    require_shape("starts", starts, queries)
    require(groups > 0 and heads % groups == 0, lambda: f"{heads} query heads do not share {groups} key heads evenly")
    if sees is not None:
        require_shape("sees", sees, heads // groups, columns)
        require(sees.dtype == torch.bool, lambda: f"sees must be bool, found {sees.dtype}")
    fits = choose_backend(backend, q.device) == "reference" or supported(q, keys, values, column_keys, column_values)
    if fits and q.device.type == "cpu" and q.dtype == torch.bfloat16 and "TRITON_INTERPRET" in os.environ:
        interpreted = choose_backend(backend, q.device) == "triton"
        require(not interpreted, "Triton's interpreter multiplies bfloat16 wrongly: use float16 or float32 there")
    require(fits, lambda: (
        f"the heads must be at most {MAX_BYTES} bytes wide and of one dtype among bfloat16, float16 and float32, "
        f"found {dk} and {dv} in {q.dtype}, {keys.dtype}, {values.dtype}, {column_keys.dtype}, {column_values.dtype}"
    ))  # fmt: skip
    rows, starts = rows.contiguous(), starts.contiguous()
    if askers is None:
        askers = askers_of(rows, starts, tokens)
    return torch.ops.modelopt_eagle.column_attention(
        q, keys, values, column_keys, column_values, rows, starts, askers, sees, scale, backend
    )[0]


def askers_of(rows: Tensor, starts: Tensor, tokens: int) -> Tensor:
    """``[2, N]`` int32: of each key the first query that sees it, and one past the last."""
    keys = torch.arange(tokens, device=rows.device, dtype=rows.dtype)  # [N]
    first = torch.searchsorted(rows, keys, out_int32=True)
    last = torch.searchsorted(starts, keys, right=True, out_int32=True)
    return torch.stack((first, last))


@torch.library.custom_op("modelopt_eagle::column_attention", mutates_args=())
def _column_attention_op(
    q: Tensor, keys: Tensor, values: Tensor, column_keys: Tensor, column_values: Tensor,
    rows: Tensor, starts: Tensor, askers: Tensor, sees: Tensor | None, scale: float, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The output, and the log-sum-exp of the scores ``[n, heads]`` float32 in base 2, kept for the backward pass."""
    if choose_backend(backend, q.device) == "reference":
        return dense_column_attention_with_sum(q, keys, values, column_keys, column_values, rows, starts, scale, sees)
    queries, heads, dk = q.shape
    groups, dv = values.shape[1:]
    share, columns = heads // groups, column_keys.shape[1]
    out, lse = q.new_empty(queries, heads, dv), q.new_empty(queries, heads, dtype=torch.float32)
    if queries:
        tile = tiles("forward", dk, dv, q.element_size(), gpu_limits(q.device), MAX_BLOCK)
        tensors = _laid_out(q, keys, values, column_keys, column_values)
        _column_attention_forward[(blocks(queries * share, tile.queries), groups)](
            *tensors, rows, starts, q if sees is None else sees.view(torch.uint8), out, lse, *_strides(tensors),
            queries, heads, columns, scale / math.log(2),
            **constants(share, dk, dv, tile), HAS_SEES=sees is not None, PRECISION=precision(q.dtype),
        )  # fmt: skip
    return out, lse


@_column_attention_op.register_fake
def _(q, keys, values, column_keys, column_values, rows, starts, askers, sees, scale, backend):
    return q.new_empty(*q.shape[:2], values.shape[2]), q.new_empty(q.shape[:2], dtype=torch.float32)


@torch.library.custom_op("modelopt_eagle::column_attention_backward", mutates_args=())
def _column_attention_backward_op(
    upstream: Tensor, q: Tensor, keys: Tensor, values: Tensor, column_keys: Tensor, column_values: Tensor,
    out: Tensor, lse: Tensor, rows: Tensor, starts: Tensor, askers: Tensor, sees: Tensor | None, scale: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients by q, keys, values, column keys and column values."""
    inputs = (q, keys, values, column_keys, column_values)
    if choose_backend(backend, q.device) == "reference":
        return cast(Gradients, dense_column_attention_backward(upstream, *inputs, rows, starts, scale, sees))
    queries, heads, dk = q.shape
    groups, dv = values.shape[1:]
    share, columns, limits = heads // groups, column_keys.shape[1], gpu_limits(q.device)
    grads = tuple(torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in inputs)
    if queries == 0:
        grads[1].zero_(), grads[2].zero_()
        return cast(Gradients, grads)
    grad_q, *key_grads = grads
    tensors, upstream = _laid_out(*inputs), upstream.contiguous()
    delta = torch.empty_like(lse)  # [n,h] sum of out * upstream
    seen = q if sees is None else sees.view(torch.uint8)
    scales = (scale / math.log(2), scale)
    tile = tiles("queries", dk, dv, q.element_size(), limits, MAX_BLOCK)
    options = dict(PRECISION=precision(q.dtype), HAS_SEES=sees is not None)
    _column_attention_queries[(blocks(queries * share, tile.queries), groups)](
        *tensors, rows, starts, seen, upstream, out, lse, delta, grad_q, *_strides(tensors),
        queries, heads, columns, *scales, **constants(share, dk, dv, tile), **options,
    )  # fmt: skip
    tile = tiles("keys", dk, dv, q.element_size(), limits, MAX_BLOCK)
    asking, *both = tensors
    for own, (grad_k, grad_v) in enumerate((key_grads[:2], key_grads[2:])):  # those of step 0, those of the column
        pair = (asking, *both[2 * own : 2 * own + 2])
        options["HAS_SEES"] = bool(own) and sees is not None
        if len(pair[1]):
            _column_attention_keys[(blocks(len(pair[1]), tile.keys), groups)](
                *pair, askers, seen, upstream, lse, delta, grad_k, grad_v, *_strides(pair),
                len(pair[1]), heads, groups, columns, *scales,
                **constants(share, dk, dv, tile), **options, OWN=bool(own),
            )  # fmt: skip
    return cast(Gradients, grads)


@_column_attention_backward_op.register_fake
def _(upstream, q, keys, values, column_keys, column_values, *rest):
    inputs = (q, keys, values, column_keys, column_values)
    return tuple(torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in inputs)


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.scale, ctx.backend = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx, upstream, _):
    *inputs, rows, starts, askers, sees, out, lse = ctx.saved_tensors
    grads = torch.ops.modelopt_eagle.column_attention_backward(
        upstream, *inputs, out, lse, rows, starts, askers, sees, ctx.scale, ctx.backend
    )
    return *grads, None, None, None, None, None, None


_column_attention_op.register_autograd(_backward, setup_context=_save)


def _laid_out(q, keys, values, column_keys, column_values) -> tuple[Tensor, ...]:
    """The inputs as the kernels read them, copied only where they must: heads in one piece, column keys in a row."""
    flat = (q, keys, values, column_keys.flatten(0, 1), column_values.flatten(0, 1))
    return tuple(tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in flat)


def _strides(tensors: tuple[Tensor, ...]) -> tuple[int, ...]:
    """Of each tensor, the elements from one row to the next and from one head to the next."""
    return tuple(stride for tensor in tensors for stride in tensor.stride()[:2])


@TritonKernel
def _span(low, inner_low, inner_high, high, BLOCK: tl.constexpr):
    """Cut [low, high) into blocks: whole ones in [inner_low, inner_high), which need no mask, and a rest on each side.

    Returns where the whole blocks begin, how many there are, how many others lie to their left and on both sides.
    """
    whole = tl.maximum(inner_high - inner_low, 0) // BLOCK
    first = tl.where(whole > 0, inner_low, low)
    end = first + whole * BLOCK
    left = (first - low + BLOCK - 1) // BLOCK
    return first, whole, left, left + (high - end + BLOCK - 1) // BLOCK


@TritonKernel
def _load(start_ptr, rows, WIDTH: tl.constexpr, WIDE: tl.constexpr):
    """Heads that begin ``rows`` elements behind ``start_ptr``, zeros beyond their width."""
    wide = tl.arange(0, WIDE)
    if WIDTH == WIDE:
        tile = tl.load(start_ptr + rows[:, None] + wide[None, :])
    else:
        tile = tl.load(start_ptr + rows[:, None] + wide[None, :], mask=(wide < WIDTH)[None, :], other=0.0)
    return tile


@TritonKernel
def _store(start_ptr, rows, tile, ok, WIDTH: tl.constexpr, WIDE: tl.constexpr):
    """Write heads to where they begin behind ``start_ptr``, in rows that are ``ok``."""
    wide = tl.arange(0, WIDE)
    tl.store(
        start_ptr + rows[:, None] + wide[None, :], tile.to(start_ptr.dtype.element_ty),
        mask=ok[:, None] & (wide < WIDTH)[None, :],
    )  # fmt: skip


@TritonKernel
def _seen(key, row, start, sees_ptr, share, columns, HAS_SEES: tl.constexpr):
    """``[q,k]``: whether each query sees each key; of column keys also whether its head does."""
    seen = (key[None, :] >= start[:, None]) & (key[None, :] <= row[:, None])
    if HAS_SEES:
        seen = seen & (tl.load(sees_ptr + share[:, None] * columns + (key % columns)[None, :]) != 0)
    return seen


@TritonKernel
def _forward_block(
    acc, peak, total, q, k_ptr, v_ptr, stride_k, stride_v, first, stop, row, start, sees_ptr, share, columns, scale,
    DK: tl.constexpr, DV: tl.constexpr, WIDE_K: tl.constexpr, WIDE_V: tl.constexpr, BLOCK_K: tl.constexpr,
    MASKED: tl.constexpr, HAS_SEES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Meet the keys from ``first`` to ``stop``: the running output, maximum and sum."""
    key = first + tl.arange(0, BLOCK_K)
    at = key.to(tl.int64)
    if MASKED:
        at = tl.minimum(key, stop - 1).to(tl.int64)
    score = tl.dot(q, tl.trans(_load(k_ptr, at * stride_k, DK, WIDE_K)), input_precision=PRECISION) * scale  # [q,k]
    if MASKED:
        seen = _seen(key, tl.minimum(row, stop - 1), start, sees_ptr, share, columns, HAS_SEES)
        score = tl.where(seen, score, float("-inf"))
    higher = tl.maximum(peak, tl.max(score, 1))
    weight = tl.exp2(score - higher[:, None])
    fade = tl.exp2(peak - higher)
    v = _load(v_ptr, at * stride_v, DV, WIDE_V)
    acc = tl.dot(weight.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
    return acc, higher, total * fade + tl.sum(weight, 1)


@TritonKernel
def _column_attention_forward(
    q_ptr, k_ptr, v_ptr, ck_ptr, cv_ptr, rows_ptr, starts_ptr, sees_ptr, out_ptr, lse_ptr,
    stride_qn, stride_qh, stride_kn, stride_kg, stride_vn, stride_vg, stride_ckn, stride_ckg, stride_cvn, stride_cvg,
    queries, heads, columns, scale,
    SHARE: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, WIDE_K: tl.constexpr, WIDE_V: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, HAS_SEES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A program for a block of queries, with the heads that share a key head side by side; long ranges come first.

    Queries n·SHARE in a row; column keys n·columns in a row, of which query i sees those of [i·columns, (i+1)·columns).
    """
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    group = tl.program_id(1)
    flat = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    query = tl.minimum(flat // SHARE, queries - 1)
    share = flat % SHARE
    row, start = tl.load(rows_ptr + query).to(tl.int32), tl.load(starts_ptr + query).to(tl.int32)
    q = _load(q_ptr, query.to(tl.int64) * stride_qn + (group * SHARE + share) * stride_qh, DK, WIDE_K)
    acc = tl.zeros((BLOCK_Q, WIDE_V), tl.float32)
    peak = tl.full((BLOCK_Q,), -1e30, tl.float32)  # finite: a row without a key so far fades to zero, not to NaN
    total = tl.zeros((BLOCK_Q,), tl.float32)
    lowest = (block * BLOCK_Q) // SHARE
    highest = tl.minimum((block * BLOCK_Q + BLOCK_Q - 1) // SHARE, queries - 1)
    low, high = tl.load(starts_ptr + lowest).to(tl.int32), tl.load(rows_ptr + highest).to(tl.int32) + 1
    inner_low, inner_high = tl.load(starts_ptr + highest).to(tl.int32), tl.load(rows_ptr + lowest).to(tl.int32) + 1
    first, whole, left, sides = _span(low, inner_low, inner_high, high, BLOCK_K)
    end = first + whole * BLOCK_K
    k_ptr += group * stride_kg
    v_ptr += group * stride_vg
    for inner in range(0, whole):
        acc, peak, total = _forward_block(
            acc, peak, total, q, k_ptr, v_ptr, stride_kn, stride_vn, first + inner * BLOCK_K, end, row, start,
            sees_ptr, share, columns, scale, DK, DV, WIDE_K, WIDE_V, BLOCK_K, False, False, PRECISION,
        )  # fmt: skip
    for side in tl.range(0, sides, num_stages=1):
        key = tl.where(side < left, low + side * BLOCK_K, end + (side - left) * BLOCK_K)
        acc, peak, total = _forward_block(
            acc, peak, total, q, k_ptr, v_ptr, stride_kn, stride_vn, key, tl.where(side < left, first, high),
            row, start, sees_ptr, share, columns, scale,
            DK, DV, WIDE_K, WIDE_V, BLOCK_K, True, False, PRECISION,
        )  # fmt: skip
    stop = (highest + 1) * columns
    for own in tl.range(lowest * columns, stop, BLOCK_K, num_stages=1):
        acc, peak, total = _forward_block(
            acc, peak, total, q, ck_ptr + group * stride_ckg, cv_ptr + group * stride_cvg, stride_ckn, stride_cvn,
            own, stop, query * columns + columns - 1, query * columns, sees_ptr, share, columns, scale,
            DK, DV, WIDE_K, WIDE_V, BLOCK_K, True, HAS_SEES, PRECISION,
        )  # fmt: skip
    ok = flat < queries * SHARE
    place = query.to(tl.int64) * heads + group * SHARE + share
    _store(out_ptr, place * DV, acc / total[:, None], ok, DV, WIDE_V)
    tl.store(lse_ptr + place, peak + tl.log2(total), mask=ok)


@TritonKernel
def _queries_block(
    grad_q, q, upstream, lse, delta, k_ptr, v_ptr, stride_k, stride_v, first, stop, row, start,
    sees_ptr, share, columns, scale,
    DK: tl.constexpr, DV: tl.constexpr, WIDE_K: tl.constexpr, WIDE_V: tl.constexpr, BLOCK_K: tl.constexpr,
    MASKED: tl.constexpr, HAS_SEES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what the keys from ``first`` to ``stop`` give to the gradient of the queries."""
    key = first + tl.arange(0, BLOCK_K)
    at = key.to(tl.int64)
    if MASKED:
        at = tl.minimum(key, stop - 1).to(tl.int64)
    k = _load(k_ptr, at * stride_k, DK, WIDE_K)
    weight = tl.exp2(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale - lse[:, None])  # [q,k]
    if MASKED:
        seen = _seen(key, tl.minimum(row, stop - 1), start, sees_ptr, share, columns, HAS_SEES)
        weight = tl.where(seen, weight, 0.0)
    v = _load(v_ptr, at * stride_v, DV, WIDE_V)
    change = weight * (tl.dot(upstream, tl.trans(v), input_precision=PRECISION) - delta[:, None])  # [q,k]
    return tl.dot(change.to(k.dtype), k, grad_q, input_precision=PRECISION)


@TritonKernel
def _column_attention_queries(
    q_ptr, k_ptr, v_ptr, ck_ptr, cv_ptr, rows_ptr, starts_ptr, sees_ptr, up_ptr, out_ptr, lse_ptr, delta_ptr, grad_ptr,
    stride_qn, stride_qh, stride_kn, stride_kg, stride_vn, stride_vg, stride_ckn, stride_ckg, stride_cvn, stride_cvg,
    queries, heads, columns, scale, plain_scale,
    SHARE: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, WIDE_K: tl.constexpr, WIDE_V: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, HAS_SEES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient of the queries, in the blocks of the forward pass; writes ``delta``, which the next launches read."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    group = tl.program_id(1)
    flat = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    ok = flat < queries * SHARE
    query = tl.minimum(flat // SHARE, queries - 1)
    share = flat % SHARE
    place = query.to(tl.int64) * heads + group * SHARE + share
    row, start = tl.load(rows_ptr + query).to(tl.int32), tl.load(starts_ptr + query).to(tl.int32)
    upstream = _load(up_ptr, place * DV, DV, WIDE_V)
    delta = tl.sum(_load(out_ptr, place * DV, DV, WIDE_V).to(tl.float32) * upstream.to(tl.float32), 1)  # [q]
    tl.store(delta_ptr + place, delta, mask=ok)
    lse = tl.load(lse_ptr + place)
    q = _load(q_ptr, query.to(tl.int64) * stride_qn + (group * SHARE + share) * stride_qh, DK, WIDE_K)
    grad_q = tl.zeros((BLOCK_Q, WIDE_K), tl.float32)
    lowest = (block * BLOCK_Q) // SHARE
    highest = tl.minimum((block * BLOCK_Q + BLOCK_Q - 1) // SHARE, queries - 1)
    low, high = tl.load(starts_ptr + lowest).to(tl.int32), tl.load(rows_ptr + highest).to(tl.int32) + 1
    inner_low, inner_high = tl.load(starts_ptr + highest).to(tl.int32), tl.load(rows_ptr + lowest).to(tl.int32) + 1
    first, whole, left, sides = _span(low, inner_low, inner_high, high, BLOCK_K)
    end = first + whole * BLOCK_K
    k_ptr += group * stride_kg
    v_ptr += group * stride_vg
    for inner in range(0, whole):
        grad_q = _queries_block(
            grad_q, q, upstream, lse, delta, k_ptr, v_ptr, stride_kn, stride_vn, first + inner * BLOCK_K, end,
            row, start, sees_ptr, share, columns, scale,
            DK, DV, WIDE_K, WIDE_V, BLOCK_K, False, False, PRECISION,
        )  # fmt: skip
    for side in tl.range(0, sides, num_stages=1):
        key = tl.where(side < left, low + side * BLOCK_K, end + (side - left) * BLOCK_K)
        grad_q = _queries_block(
            grad_q, q, upstream, lse, delta, k_ptr, v_ptr, stride_kn, stride_vn, key,
            tl.where(side < left, first, high), row, start, sees_ptr, share, columns, scale,
            DK, DV, WIDE_K, WIDE_V, BLOCK_K, True, False, PRECISION,
        )  # fmt: skip
    stop = (highest + 1) * columns
    for own in tl.range(lowest * columns, stop, BLOCK_K, num_stages=1):
        grad_q = _queries_block(
            grad_q, q, upstream, lse, delta, ck_ptr + group * stride_ckg, cv_ptr + group * stride_cvg,
            stride_ckn, stride_cvn, own, stop, query * columns + columns - 1, query * columns,
            sees_ptr, share, columns, scale, DK, DV, WIDE_K, WIDE_V, BLOCK_K, True, HAS_SEES, PRECISION,
        )  # fmt: skip
    _store(grad_ptr, place * DK, grad_q * plain_scale, ok, DK, WIDE_K)


@TritonKernel
def _keys_block(
    grad_k, grad_v, k, v, q_ptr, up_ptr, lse_ptr, delta_ptr, stride_qn, stride_qh, heads, group, first, stop,
    key, begin, end, sees_ptr, columns, scale,
    SHARE: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, WIDE_K: tl.constexpr, WIDE_V: tl.constexpr,
    BLOCK_Q: tl.constexpr, MASKED: tl.constexpr, HAS_SEES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what the queries from ``first`` to ``stop`` give to the gradients of keys and values."""
    flat = first + tl.arange(0, BLOCK_Q)
    at = flat
    if MASKED:
        at = tl.minimum(flat, stop - 1)
    query = at // SHARE
    share = at % SHARE
    place = query.to(tl.int64) * heads + group * SHARE + share
    q = _load(q_ptr, query.to(tl.int64) * stride_qn + (group * SHARE + share) * stride_qh, DK, WIDE_K)
    upstream = _load(up_ptr, place * DV, DV, WIDE_V)
    lse, delta = tl.load(lse_ptr + place), tl.load(delta_ptr + place)
    weight = tl.exp2(tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale - lse[None, :])  # [k,q]
    if MASKED:
        seen = (query[None, :] >= begin[:, None]) & (query[None, :] < end[:, None]) & (flat < stop)[None, :]
        if HAS_SEES:
            seen = seen & (tl.load(sees_ptr + share[None, :] * columns + (key % columns)[:, None]) != 0)
        weight = tl.where(seen, weight, 0.0)
    grad_v = tl.dot(weight.to(upstream.dtype), upstream, grad_v, input_precision=PRECISION)
    change = weight * (tl.dot(v, tl.trans(upstream), input_precision=PRECISION) - delta[None, :])  # [k,q]
    return tl.dot(change.to(q.dtype), q, grad_k, input_precision=PRECISION), grad_v


@TritonKernel
def _column_attention_keys(
    q_ptr, k_ptr, v_ptr, askers_ptr, sees_ptr, up_ptr, lse_ptr, delta_ptr, grad_k_ptr, grad_v_ptr,
    stride_qn, stride_qh, stride_kn, stride_kg, stride_vn, stride_vg,
    tokens, heads, groups, columns, scale, plain_scale,
    SHARE: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, WIDE_K: tl.constexpr, WIDE_V: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, OWN: tl.constexpr, HAS_SEES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of keys and values, by all queries of all heads that see it; long runs come first.

    ``OWN``: the keys are column keys, of which key j is seen by query j // columns alone.
    """
    block, group = tl.program_id(0), tl.program_id(1)
    key = block * BLOCK_K + tl.arange(0, BLOCK_K)
    real = key < tokens
    key = tl.minimum(key, tokens - 1)
    place = key.to(tl.int64)
    k = _load(k_ptr + group * stride_kg, place * stride_kn, DK, WIDE_K)
    v = _load(v_ptr + group * stride_vg, place * stride_vn, DV, WIDE_V)
    lowest = block * BLOCK_K
    highest = tl.minimum(lowest + BLOCK_K - 1, tokens - 1)
    grad_k = tl.zeros((BLOCK_K, WIDE_K), tl.float32)
    grad_v = tl.zeros((BLOCK_K, WIDE_V), tl.float32)
    if OWN:
        begin, end = key // columns, key // columns + 1
        low, high = (lowest // columns) * SHARE, (highest // columns + 1) * SHARE
        sides = (high - low + BLOCK_Q - 1) // BLOCK_Q
        first, last, left = high, high, sides
    else:
        begin, end = tl.load(askers_ptr + key), tl.load(askers_ptr + tokens + key)
        low, inner_low = tl.load(askers_ptr + lowest) * SHARE, tl.load(askers_ptr + highest) * SHARE
        inner_high = tl.load(askers_ptr + tokens + lowest) * SHARE
        high = tl.load(askers_ptr + tokens + highest) * SHARE
        first, whole, left, sides = _span(low, inner_low, inner_high, high, BLOCK_Q)
        last = first + whole * BLOCK_Q
        for inner in range(0, whole):
            grad_k, grad_v = _keys_block(
                grad_k, grad_v, k, v, q_ptr, up_ptr, lse_ptr, delta_ptr, stride_qn, stride_qh, heads, group,
                first + inner * BLOCK_Q, last, key, begin, end, sees_ptr, columns, scale,
                SHARE, DK, DV, WIDE_K, WIDE_V, BLOCK_Q, False, False, PRECISION,
            )  # fmt: skip
    for side in tl.range(0, sides, num_stages=1):
        flat = tl.where(side < left, low + side * BLOCK_Q, last + (side - left) * BLOCK_Q)
        grad_k, grad_v = _keys_block(
            grad_k, grad_v, k, v, q_ptr, up_ptr, lse_ptr, delta_ptr, stride_qn, stride_qh, heads, group,
            flat, tl.where(side < left, first, high), key, begin, end, sees_ptr, columns, scale,
            SHARE, DK, DV, WIDE_K, WIDE_V, BLOCK_Q, True, HAS_SEES, PRECISION,
        )  # fmt: skip
    at = place * groups + group
    _store(grad_k_ptr, at * DK, grad_k * plain_scale, real, DK, WIDE_K)
    _store(grad_v_ptr, at * DV, grad_v, real, DV, WIDE_V)
