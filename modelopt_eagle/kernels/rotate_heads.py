"""Rotary embedding of query and key heads: each head read once, written once.

Torch's operations make four products, a difference, a sum and a concatenation, each of which goes through the memory.
The gradient is the rotation back, by the same kernel with the sine negated; nothing but cosines and sines is kept.

The last part of a head turns and the rest goes through as it is, as latent attention wants it. Pairs are halves of
that part or neighbours in it; they come out as halves.
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
    require_shape,
    warps_for,
)
from modelopt_eagle.kernels.work import Work

if TYPE_CHECKING:
    import triton.language as tl

FLOATS = (torch.bfloat16, torch.float16, torch.float32)

MAX_TILE = 1024
"""Pairs of a tile: with twice as many a thread writes no wider and holds more."""

MAX_HEAD = 1024
"""Widest head."""


def rotate_heads(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    dtype: torch.dtype | None = None,
    *,
    backend: str = "auto",
) -> Tensor:
    """Rotate pairs of the last ``2r`` dimensions of every head, differentiable by ``x``.

    Args:
        x: ``[..., heads, d]`` bfloat16, float16 or float32.
        cos, sin: ``[..., r]`` float32 with the same leading dimensions, ``2r <= d``.
        interleaved: pairs are neighbours ``(0,1), (2,3), ...`` rather than halves ``(i, i + r)``; either comes out as
            halves.
        dtype: of the result; default that of ``x``.
        backend: see ``dispatch.py``.

    Returns:
        ``[..., heads, d]``, computed in float32 and rounded once.

    Raises:
        DecodingError: shapes or dtypes that do not fit, or heads wider than ``MAX_HEAD`` (the kernel).
    """
    require(x.dim() >= 2, lambda: f"x must be [..., heads, d], found {list(x.shape)}")
    *lead, heads, width = x.shape
    require_shape("cos", cos, *lead, None)
    require_shape("sin", sin, *cos.shape)
    require(2 * cos.shape[-1] <= width, lambda: f"{cos.shape[-1]} pairs do not fit into a head of {width}")
    dtype = x.dtype if dtype is None else dtype
    fits = choose_backend(backend, x.device) == "reference" or supported(x, cos, sin, dtype)
    require(fits, lambda: (
        f"rotate_heads takes bfloat16, float16 and float32 heads up to {MAX_HEAD} wide and float32 cosines, "
        f"found {width} in {x.dtype} to {dtype}, {cos.dtype}"
    ))  # fmt: skip
    flat = (x.reshape(-1, heads, width), cos.reshape(-1, cos.shape[-1]), sin.reshape(-1, cos.shape[-1]))
    turned = torch.ops.modelopt_eagle.rotate_heads(*flat, interleaved, False, dtype, backend)
    return turned if len(lead) == 1 else turned.reshape(x.shape)


def supported(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernel takes these, and gives ``dtype``; leading dimensions that broadcast are not taken."""
    return (
        {x.dtype, dtype} <= set(FLOATS)
        and cos.dtype == sin.dtype == torch.float32
        and 0 < x.shape[-1] <= MAX_HEAD
        and cos.shape == sin.shape
        and cos.shape[:-1] == x.shape[:-2]
    )


def rotate_heads_work(rows: int, heads: int, width: int, pairs: int, size: int) -> Work:
    """The least that one call does in either direction: heads read and written, cosines and sines read.

    Args:
        rows: n.
        heads, width: of a row.
        pairs: r.
        size: bytes of an element.
    """
    return Work(2 * rows * heads * width * size + 8 * rows * pairs, 0)


@torch.library.custom_op("modelopt_eagle::rotate_heads", mutates_args=())
def _rotate_heads_op(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool, dtype: torch.dtype, backend: str
) -> Tensor:
    """``[n, heads, d]`` of the same; ``back``: the inverse, which is the gradient."""
    if choose_backend(backend, x.device) == "reference":
        return rotate_heads_reference(x, cos, sin, interleaved, back, dtype)
    rows, heads, width = x.shape
    out = x.new_empty(rows, heads, width, dtype=dtype)
    count, pairs = rows * heads, cos.shape[1]
    if count:
        x = x if x.stride(2) == 1 or width == 1 else x.contiguous()
        wide, rest = power_of_two(pairs), power_of_two(width - 2 * pairs) if width > 2 * pairs else 0
        block = max(1, MAX_TILE // max(wide, rest))
        _rotate_heads_kernel[(-(-count // block),)](
            x, cos.contiguous(), sin.contiguous(), out, x.stride(0), x.stride(1), count, heads, width, pairs,
            IN_APART=interleaved and not back, OUT_APART=interleaved and back, BACK=back,
            ROWS=block, PAIRS=wide, REST=rest, num_warps=warps_for(block * max(wide, rest)), num_stages=1,
        )  # fmt: skip
    return out


@_rotate_heads_op.register_fake
def _(x, cos, sin, interleaved, back, dtype, backend):
    return x.new_empty(x.shape, dtype=dtype)


def _save(ctx, inputs, output) -> None:
    x, cos, sin, ctx.interleaved, ctx.back, _, ctx.backend = inputs
    ctx.dtype = x.dtype
    ctx.save_for_backward(cos, sin)


def _backward(ctx, upstream):
    cos, sin = ctx.saved_tensors
    grad = torch.ops.modelopt_eagle.rotate_heads(
        upstream, cos, sin, ctx.interleaved, not ctx.back, ctx.dtype, ctx.backend
    )
    return grad, None, None, None, None, None, None


_rotate_heads_op.register_autograd(_backward, setup_context=_save)


def rotate_heads_reference(x, cos, sin, interleaved, back, dtype) -> Tensor:
    """Plain reference with torch's operations, in float32 (or float64)."""
    exact, pairs = torch.promote_types(x.dtype, torch.float32), cos.shape[1]
    rest, turning = x.to(exact).split((x.shape[-1] - 2 * pairs, 2 * pairs), -1)  # [n,heads,d-2r], [n,heads,2r]
    apart = interleaved and not back
    first, second = (turning[..., 0::2], turning[..., 1::2]) if apart else turning.chunk(2, -1)  # [n,heads,r] each
    cos, sin = cos[:, None].to(exact), sin[:, None].to(exact)  # [n,1,r]
    if back:
        sin = -sin
    parts = first * cos - second * sin, second * cos + first * sin  # [n,heads,r] each
    turned = torch.stack(parts, -1).flatten(-2) if interleaved and back else torch.cat(parts, -1)  # [n,heads,2r]
    return torch.cat((rest, turned), -1).to(dtype)


@TritonKernel
def _rotate_heads_kernel(
    x_ptr, cos_ptr, sin_ptr, out_ptr, stride_row, stride_head, count, heads, width, pairs,
    IN_APART: tl.constexpr, OUT_APART: tl.constexpr, BACK: tl.constexpr,
    ROWS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """A program ROWS heads, those of a row behind each other; ``*_APART``: the pairs are neighbours there."""
    head = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [R]
    inside = (head < count)[:, None]
    row = (head // heads).to(tl.int64)
    from_ptr = x_ptr + (row * stride_row + (head % heads) * stride_head)[:, None]  # [R,1]
    to_ptr = out_ptr + (head.to(tl.int64) * width)[:, None]
    rest = width - 2 * pairs
    if REST > 0:
        plain = tl.arange(0, REST)[None, :]
        kept = inside & (plain < rest)
        tl.store(to_ptr + plain, tl.load(from_ptr + plain, mask=kept).to(out_ptr.dtype.element_ty), mask=kept)
    pair = tl.arange(0, PAIRS)[None, :]
    kept = inside & (pair < pairs)
    angle = (row * pairs)[:, None] + pair
    cos = tl.load(cos_ptr + angle, mask=kept, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=kept, other=0.0)
    if BACK:
        sin = -sin
    first = rest + pair
    second = first + pairs
    if IN_APART:
        first = rest + 2 * pair
        second = first + 1
    a = tl.load(from_ptr + first, mask=kept, other=0.0).to(tl.float32)
    b = tl.load(from_ptr + second, mask=kept, other=0.0).to(tl.float32)
    first = rest + pair
    second = first + pairs
    if OUT_APART:
        first = rest + 2 * pair
        second = first + 1
    tl.store(to_ptr + first, (a * cos - b * sin).to(out_ptr.dtype.element_ty), mask=kept)
    tl.store(to_ptr + second, (b * cos + a * sin).to(out_ptr.dtype.element_ty), mask=kept)
