"""What the first layer of a head reads: the normed embedding and the normed state, side by side.

Torch's operations norm both, concatenate them and cast the result, and under autocast each of these is written and
read again in float32. The kernel reads both rows once and writes the wide row once, in the dtype of the products. Kept
for the backward pass are the inputs and one number a row and half.

A program has whole rows of one half. The backward pass gives each program a run of rows, over which it sums the
gradient of the norm's weight in registers; the sums of the programs are added up by torch, so nothing is atomic and the
same inputs give the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from modelopt_eagle.kernels.dispatch import TritonKernel, choose_backend, power_of_two, require, require_shape
from modelopt_eagle.kernels.work import Work

if TYPE_CHECKING:
    import triton.language as tl

FLOATS = (torch.bfloat16, torch.float16, torch.float32)

MAX_WIDTH = 8192
"""Widest state: what a program holds of a row and its gradients has to fit into its registers."""

RUNS = 256
"""Programs a half of the backward pass, each with a run of rows and its own sum of the weight's gradient."""


def norm_concat(
    embedding: Tensor,
    state: Tensor,
    embedding_weight: Tensor | None,
    state_weight: Tensor,
    eps: float,
    dtype: torch.dtype | None = None,
    *,
    backend: str = "auto",
) -> Tensor:
    """``[norm(embedding), norm(state)]`` with root-mean-square norms, differentiable by all four tensors.

    Args:
        embedding, state: ``[..., H]`` bfloat16, float16 or float32, each in its own dtype.
        embedding_weight, state_weight: ``[H]`` factors of the norms; ``None``: the embedding goes in without a norm.
        eps: added to the mean square.
        dtype: of the result; default that of ``state``.
        backend: see ``dispatch.py``.

    Returns:
        ``[..., 2H]``. Sums and norms are float32 whatever the inputs; each value is rounded once.

    Raises:
        DecodingError: shapes or dtypes that do not fit, or a state wider than ``MAX_WIDTH`` (the kernel).
    """
    require(state.dim() >= 1 and state.shape[-1] > 0, "state must be [..., H] with H above 0")
    width = state.shape[-1]
    require_shape("embedding", embedding, *state.shape)
    require_shape("state_weight", state_weight, width)
    if embedding_weight is not None:
        require_shape("embedding_weight", embedding_weight, width)
    dtype = state.dtype if dtype is None else dtype
    given = [embedding, state, state_weight, *([] if embedding_weight is None else [embedding_weight])]
    fits = choose_backend(backend, state.device) == "reference" or supported(dtype, *given)
    require(fits, lambda: (
        f"norm_concat takes bfloat16, float16 and float32 up to {MAX_WIDTH} wide, found {width} in "
        f"{', '.join(str(tensor.dtype) for tensor in given)} to {dtype}"
    ))  # fmt: skip
    flat = (embedding.reshape(-1, width), state.reshape(-1, width))
    wide = torch.ops.modelopt_eagle.norm_concat(*flat, embedding_weight, state_weight, eps, dtype, backend)[0]
    return wide.unflatten(0, state.shape[:-1]) if state.dim() != 2 else wide


def supported(dtype: torch.dtype, *tensors: Tensor) -> bool:
    """Whether the kernel takes tensors of these dtypes and widths, and gives ``dtype``."""
    return {dtype, *(tensor.dtype for tensor in tensors)} <= set(FLOATS) and tensors[0].shape[-1] <= MAX_WIDTH


def norm_concat_work(rows: int, width: int, embedding_size: int, state_size: int, size: int) -> dict[str, Work]:
    """The least that one call does, forward and backward, for an embedding that is not trained.

    Args:
        rows: n.
        width: H.
        embedding_size, state_size, size: bytes of an element of the embedding, the state and the result.

    Returns:
        ``forward``: both inputs read, the result written. ``backward``: both inputs and the gradient of the result
        read, the gradient of the state written. The norms' weights and what is kept a row are counted, too.
    """
    read, wide = rows * width * (embedding_size + state_size), 2 * rows * width * size
    kept, weights = 8 * rows, 8 * width
    return {
        "forward": Work(read + wide + kept + weights, 0),
        "backward": Work(read + wide + kept + rows * width * state_size + 2 * weights, 0),
    }


@torch.library.custom_op("modelopt_eagle::norm_concat", mutates_args=())
def _norm_concat_op(
    embedding: Tensor, state: Tensor, embedding_weight: Tensor | None, state_weight: Tensor, eps: float,
    dtype: torch.dtype, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The result ``[n, 2H]``, and ``[2, n]`` float32 reciprocals of the root mean squares, kept for the gradient."""
    if choose_backend(backend, state.device) == "reference":
        return norm_concat_reference(embedding, state, embedding_weight, state_weight, eps, dtype)
    rows, width = state.shape
    wide, inverse = empty_result(state, dtype)
    if rows:
        embedding, state = _rows(embedding), _rows(state)
        _norm_concat_forward[(rows, 2)](
            embedding, state, state_weight if embedding_weight is None else embedding_weight.contiguous(),
            state_weight.contiguous(), wide, inverse, embedding.stride(0), state.stride(0), rows, width, eps,
            NORMED=embedding_weight is not None, **constants(width, 8),
        )  # fmt: skip
    return wide, inverse


@_norm_concat_op.register_fake
def _(embedding, state, embedding_weight, state_weight, eps, dtype, backend):
    return empty_result(state, dtype)


def empty_result(state: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """An uninitialised result, and what is kept beside it."""
    rows, width = state.shape
    return state.new_empty(rows, 2 * width, dtype=dtype), state.new_empty(2, rows, dtype=torch.float32)


@torch.library.custom_op("modelopt_eagle::norm_concat_backward", mutates_args=())
def _norm_concat_backward_op(
    upstream: Tensor, embedding: Tensor, state: Tensor, embedding_weight: Tensor | None, state_weight: Tensor,
    inverse: Tensor, embedding_too: bool, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients by embedding (empty without ``embedding_too``), state, and both weights (``[H]`` float32)."""
    if choose_backend(backend, state.device) == "reference":
        return norm_concat_backward_reference(
            upstream, embedding, state, embedding_weight, state_weight, inverse, embedding_too
        )
    rows, width = state.shape
    grad_embedding, grad_state, *_ = empty_gradients(embedding, state, embedding_too)
    runs = max(1, min(rows, RUNS))
    sums = state.new_zeros(runs, 2, width, dtype=torch.float32)
    if rows:
        embedding, state, upstream = _rows(embedding), _rows(state), _rows(upstream)
        _norm_concat_backward[(runs, 2)](
            upstream, embedding, state, state_weight if embedding_weight is None else embedding_weight.contiguous(),
            state_weight.contiguous(), inverse, grad_embedding, grad_state, sums, upstream.stride(0),
            embedding.stride(0), state.stride(0), rows, width, -(-rows // runs),
            NORMED=embedding_weight is not None, EMBEDDING=embedding_too, **constants(width, 16),
        )  # fmt: skip
    by_embedding, by_state = sums.sum(0).unbind(0)  # [H] each
    return grad_embedding, grad_state, by_embedding.clone(), by_state.clone()


@_norm_concat_backward_op.register_fake
def _(upstream, embedding, state, embedding_weight, state_weight, inverse, embedding_too, backend):
    return empty_gradients(embedding, state, embedding_too)


def empty_gradients(embedding: Tensor, state: Tensor, embedding_too: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Uninitialised gradients by embedding, state and both weights."""
    rows, width = state.shape
    one, other = (state.new_empty(width, dtype=torch.float32) for _ in range(2))
    return embedding.new_empty(rows if embedding_too else 0, width), state.new_empty(rows, width), one, other


def _save(ctx, inputs, output) -> None:
    embedding, state, embedding_weight, state_weight, _, _, ctx.backend = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(embedding, state, embedding_weight, state_weight, output[1])


def _backward(ctx, upstream, _):
    embedding, state, embedding_weight, state_weight, inverse = ctx.saved_tensors
    wanted = ctx.needs_input_grad
    grad_embedding, grad_state, by_embedding, by_state = torch.ops.modelopt_eagle.norm_concat_backward(
        upstream, embedding, state, embedding_weight, state_weight, inverse, wanted[0], ctx.backend
    )
    return (
        grad_embedding if wanted[0] else None,
        grad_state if wanted[1] else None,
        by_embedding.to(embedding_weight.dtype) if wanted[2] else None,
        by_state.to(state_weight.dtype) if wanted[3] else None,
        None, None, None,
    )  # fmt: skip


_norm_concat_op.register_autograd(_backward, setup_context=_save)


def _rows(tensor: Tensor) -> Tensor:
    """The tensor with each row in one piece."""
    return tensor if tensor.stride(1) == 1 or tensor.shape[1] == 1 else tensor.contiguous()


def constants(width: int, share: int) -> dict[str, int]:
    """Keyword arguments that both kernels take: a tile for a row, and warps for a ``share`` of it a thread."""
    block = power_of_two(width)
    return {"BLOCK": block, "num_warps": min(16, max(1, block // (32 * share))), "num_stages": 2}


def norm_concat_reference(
    embedding: Tensor, state: Tensor, embedding_weight: Tensor | None, state_weight: Tensor, eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Plain reference, in float32 (or float64): the result ``[n, 2H]`` and the reciprocals ``[2, n]`` float32."""
    exact = torch.promote_types(torch.promote_types(embedding.dtype, state.dtype), torch.float32)
    halves, kept = [], []
    for half, weight in ((embedding.to(exact), embedding_weight), (state.to(exact), state_weight)):
        inverse = (half.square().mean(-1) + eps).rsqrt()  # [n]
        kept.append(inverse.float())
        halves.append(half if weight is None else half * inverse[:, None] * weight.to(exact))  # [n,H]
    return torch.cat(halves, -1).to(dtype), torch.stack(kept)


def norm_concat_backward_reference(
    upstream: Tensor, embedding: Tensor, state: Tensor, embedding_weight: Tensor | None, state_weight: Tensor,
    inverse: Tensor, embedding_too: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of :func:`norm_concat_reference` by embedding, state and both weights, from ``upstream [n, 2H]``."""
    exact = torch.promote_types(state.dtype, torch.float32)
    ups = upstream.to(exact).chunk(2, -1)  # [n,H] each
    found, by_weight = [], []
    for number, (x, weight) in enumerate(((embedding, embedding_weight), (state, state_weight))):
        up, scale = ups[number], inverse[number].to(exact)[:, None]  # [n,H], [n,1]
        if weight is None:
            found.append(up.to(x.dtype, copy=True))  # an op gives no part of what it was given
            by_weight.append(up.new_zeros(up.shape[1], dtype=torch.float32))
            continue
        unit, pulled = x.to(exact) * scale, up * weight.to(exact)  # [n,H] each
        by_weight.append((up * unit).sum(0).float())
        found.append((scale * (pulled - unit * (pulled * unit).mean(-1, keepdim=True))).to(x.dtype))
    by_embedding = found[0] if embedding_too else found[0].new_empty(0, found[0].shape[1])
    return by_embedding, found[1], by_weight[0], by_weight[1]


@TritonKernel
def _norm_concat_forward(
    embedding_ptr, state_ptr, embedding_weight_ptr, state_weight_ptr, wide_ptr, inverse_ptr,
    stride_embedding, stride_state, rows, width, eps, NORMED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program a row and half: 0 the embedding, 1 the state."""
    row, half = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    real = column < width
    if half == 0:
        x = tl.load(embedding_ptr + row * stride_embedding + column, mask=real, other=0.0).to(tl.float32)
        inverse = 1.0 / tl.sqrt_rn(tl.sum(x * x, 0) / width + eps)
        if NORMED:
            x = x * inverse * tl.load(embedding_weight_ptr + column, mask=real, other=0.0).to(tl.float32)
    else:
        x = tl.load(state_ptr + row * stride_state + column, mask=real, other=0.0).to(tl.float32)
        inverse = 1.0 / tl.sqrt_rn(tl.sum(x * x, 0) / width + eps)
        x = x * inverse * tl.load(state_weight_ptr + column, mask=real, other=0.0).to(tl.float32)
    to = wide_ptr + (2 * row + half) * width + column
    tl.store(to, x.to(wide_ptr.dtype.element_ty), mask=real)
    tl.store(inverse_ptr + half * rows + row, inverse)


@TritonKernel
def _norm_concat_rows(
    upstream_ptr, x_ptr, weight_ptr, inverse_ptr, grad_ptr, sum_ptr, stride_upstream, stride_x, begin, end, width,
    NORMED: tl.constexpr, WANTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The rows from ``begin`` to ``end`` of one half: their gradient, and their sum of the weight's."""
    column = tl.arange(0, BLOCK)
    real = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    for row in range(begin, end):
        at = tl.full((), 0, tl.int64) + row
        up = tl.load(upstream_ptr + at * stride_upstream + column, mask=real, other=0.0).to(tl.float32)
        if NORMED:
            inverse = tl.load(inverse_ptr + at)
            unit = tl.load(x_ptr + at * stride_x + column, mask=real, other=0.0).to(tl.float32) * inverse
            total += up * unit
            if WANTED:
                up = up * tl.load(weight_ptr + column, mask=real, other=0.0).to(tl.float32)
                up = inverse * (up - unit * (tl.sum(up * unit, 0) / width))
        if WANTED:
            tl.store(grad_ptr + at * width + column, up.to(grad_ptr.dtype.element_ty), mask=real)
    tl.store(sum_ptr + column, total, mask=real)


@TritonKernel
def _norm_concat_backward(
    upstream_ptr, embedding_ptr, state_ptr, embedding_weight_ptr, state_weight_ptr, inverse_ptr,
    grad_embedding_ptr, grad_state_ptr, sums_ptr, stride_upstream, stride_embedding, stride_state, rows, width, run,
    NORMED: tl.constexpr, EMBEDDING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program a run of rows and half."""
    number, half = tl.program_id(0), tl.program_id(1)
    begin = number * run
    end = tl.minimum(begin + run, rows)
    sum_ptr = sums_ptr + (2 * number + half) * width
    if half == 0:
        if NORMED or EMBEDDING:
            _norm_concat_rows(
                upstream_ptr, embedding_ptr, embedding_weight_ptr, inverse_ptr, grad_embedding_ptr, sum_ptr,
                stride_upstream, stride_embedding, begin, end, width, NORMED, EMBEDDING, BLOCK,
            )  # fmt: skip
    else:
        _norm_concat_rows(
            upstream_ptr + width, state_ptr, state_weight_ptr, inverse_ptr + rows, grad_state_ptr, sum_ptr,
            stride_upstream, stride_state, begin, end, width, True, True, BLOCK,
        )  # fmt: skip
