"""Padded mask rows to tight rows inside the same buffer, without a new allocation.

A buffer is made for the largest tree, [B, Nmax, Wmax] words; a step uses ``rows[b]`` rows of ``width`` words each.
Row r of request b moves to row ``rows[0] + ... + rows[b-1] + r`` of the flat buffer. No word moves forward and the
order is kept, so one ascending pass in place is safe; the kernel is one program that reads a block of words, waits
for all of its threads, and writes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from modelopt_eagle.kernels.dispatch import TritonKernel, choose_backend, require, require_integers, warps_for

if TYPE_CHECKING:
    import triton.language as tl

MAX_BLOCK = 4096  # words moved between two barriers


def repack_mask(buffer: Tensor, rows: Tensor | int, width: int | None = None, *, backend: str = "auto") -> Tensor:
    """Move the used rows of a padded mask buffer together, in place.

    Args:
        buffer: [B,Nmax,Wmax] int32, contiguous; overwritten.
        rows: used rows a request: [B] int32 or int64 in [0, Nmax], or one int for all.
        width: used words a row, at most Wmax; None keeps Wmax.
        backend: see ``dispatch.py``.

    Returns:
        A view of ``buffer``: [B,rows,width] if ``rows`` is an int, else [B*Nmax,width] of which the first
        ``rows.sum()`` rows are the tight ones. What lies behind them in the buffer is left over.

    Raises:
        DecodingError: wrong dtype or layout, or rows or width out of bounds (values of a CUDA ``rows`` tensor are
            not read; the kernel clamps them to [0, Nmax]).
    """
    require(
        buffer.dtype == torch.int32 and buffer.dim() == 3 and buffer.is_contiguous(),
        lambda: (
            f"buffer must be contiguous int32 of shape [B, Nmax, Wmax], found {buffer.dtype} {list(buffer.shape)} "
            f"with strides {buffer.stride()}"
        ),
    )
    batch, most, words = buffer.shape
    width = words if width is None else width
    require(0 <= width <= words, lambda: f"width must lie in [0, {words}], found {width}")
    if isinstance(rows, int):
        require(0 <= rows <= most, lambda: f"rows must lie in [0, {most}], found {rows}")
        torch.ops.modelopt_eagle.repack_mask(buffer, None, rows, width, backend)
        return buffer.view(-1)[: batch * rows * width].view(batch, rows, width)
    require_integers("rows", rows, batch)
    torch.ops.modelopt_eagle.repack_mask(buffer, rows, most, width, backend)
    return buffer.view(-1)[: batch * most * width].view(batch * most, width)


@torch.library.custom_op("modelopt_eagle::repack_mask", mutates_args={"buffer"})
def _repack_mask_op(buffer: Tensor, rows: Tensor | None, limit: int, width: int, backend: str) -> None:
    """``rows`` None: ``limit`` rows of every request; else ``rows`` [B], none above ``limit``."""
    batch, most, words = buffer.shape
    if rows is not None and rows.device.type == "cpu":
        require(
            bool(((rows >= 0) & (rows <= most)).all()), lambda: f"rows must lie in [0, {most}], found {rows.tolist()}"
        )
    if choose_backend(backend, buffer.device) == "reference":
        repack_mask_reference(buffer, rows, limit, width)
    elif buffer.numel() and width:
        counts = buffer if rows is None else rows
        _repack_mask_kernel[(1,)](
            buffer, counts, counts.stride(0), batch, most, words, limit, width,
            PER_ROW=rows is not None, BLOCK=MAX_BLOCK, num_warps=warps_for(MAX_BLOCK),
        )  # fmt: skip


@_repack_mask_op.register_fake
def _(buffer, rows, limit, width, backend):
    return None


def repack_mask_reference(buffer: Tensor, rows: Tensor | None, limit: int, width: int) -> None:
    """The same move with a copy of the tight words on the side."""
    line = torch.arange(buffer.shape[1], device=buffer.device).expand(buffer.shape[:2])  # [B,Nmax]
    used = line < (limit if rows is None else rows[:, None])  # [B,Nmax]
    tight = buffer[used][:, :width].reshape(-1)  # [used rows * width] a copy
    buffer.view(-1)[: tight.numel()] = tight


@TritonKernel
def _repack_mask_kernel(
    buffer_ptr, rows_ptr, stride_rows, batch, most, words, limit, width, PER_ROW: tl.constexpr, BLOCK: tl.constexpr
):
    written = tl.full((), 0, tl.int64)
    for request in range(0, batch):
        total = limit * width
        if PER_ROW:
            rows = tl.load(rows_ptr + request * stride_rows).to(tl.int32)
            total = tl.minimum(tl.maximum(rows, 0), limit) * width
        source_ptr = buffer_ptr + tl.full((), 1, tl.int64) * request * most * words
        for start in range(0, total, BLOCK):
            cell = start + tl.arange(0, BLOCK)
            inside = cell < total
            value = tl.load(source_ptr + (cell // width) * words + cell % width, mask=inside, other=0)
            tl.debug_barrier()  # the block is read whole before any of it is overwritten
            tl.store(buffer_ptr + written + cell, value, mask=inside)
            tl.debug_barrier()
        written += total
