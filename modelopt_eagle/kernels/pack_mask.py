"""Boolean masks to int32 words and back: bit c%32 of word c//32 stands for column c. Any number of columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from modelopt_eagle.kernels.dispatch import TritonKernel, choose_backend, require

if TYPE_CHECKING:
    import triton.language as tl

PACK_BLOCK, UNPACK_BLOCK = 128, 1024  # words, or booleans, of one program


def pack_mask(mask: Tensor, *, backend: str = "auto") -> Tensor:
    """Pack the last dimension of a boolean mask.

    Args:
        mask: [..., R, C] bool, any strides.
        backend: see ``dispatch.py``.

    Returns:
        [..., R, ceil(C/32)] int32; bits beyond C are zero.

    Raises:
        DecodingError: not a boolean tensor of at least two dimensions.
    """
    require(
        mask.dtype == torch.bool and mask.dim() >= 2,
        lambda: f"mask must be bool of shape [..., R, C], found {mask.dtype} {list(mask.shape)}",
    )
    rows, columns = mask.shape[-2:]
    words = torch.ops.modelopt_eagle.pack_mask(mask.reshape(-1, rows, columns), backend)
    return words.view(*mask.shape[:-1], words.shape[-1])


def unpack_mask(words: Tensor, num_nodes: int | None = None, *, backend: str = "auto") -> Tensor:
    """Undo ``pack_mask``.

    Args:
        words: [..., R, W] int32, any strides.
        num_nodes: C, the number of columns, at most 32*W; None means R, the square mask of a tree.
        backend: see ``dispatch.py``.

    Returns:
        [..., R, C] bool.

    Raises:
        DecodingError: not int32, or more columns than the words hold.
    """
    require(
        words.dtype == torch.int32 and words.dim() >= 2,
        lambda: f"words must be int32 of shape [..., R, W], found {words.dtype} {list(words.shape)}",
    )
    rows, width = words.shape[-2:]
    columns = rows if num_nodes is None else num_nodes
    require(
        0 <= columns <= 32 * width,
        lambda: (
            f"{width} words hold the columns [0, {32 * width}], found num_nodes={columns}: pass the packed tree's N"
        ),
    )
    mask = torch.ops.modelopt_eagle.unpack_mask(words.reshape(-1, rows, width), columns, backend)
    return mask.view(*words.shape[:-1], columns)


@torch.library.custom_op("modelopt_eagle::pack_mask", mutates_args=())
def _pack_mask_op(mask: Tensor, backend: str) -> Tensor:
    if choose_backend(backend, mask.device) == "reference":
        return pack_mask_reference(mask)
    batch, rows, columns = mask.shape
    words = torch.empty(batch, rows, -(-columns // 32), dtype=torch.int32, device=mask.device)
    if words.numel():
        grid = (-(-words.numel() // PACK_BLOCK),)
        _pack_mask_kernel[grid](
            mask.view(torch.uint8), words, *mask.stride(), words.numel(), rows, columns, words.shape[2],
            BLOCK=PACK_BLOCK, num_warps=4,
        )  # fmt: skip
    return words


@_pack_mask_op.register_fake
def _(mask, backend):
    return mask.new_empty(mask.shape[0], mask.shape[1], (mask.shape[2] + 31) // 32, dtype=torch.int32)


@torch.library.custom_op("modelopt_eagle::unpack_mask", mutates_args=())
def _unpack_mask_op(words: Tensor, columns: int, backend: str) -> Tensor:
    if choose_backend(backend, words.device) == "reference":
        return unpack_mask_reference(words, columns)
    batch, rows, _ = words.shape
    mask = torch.empty(batch, rows, columns, dtype=torch.bool, device=words.device)
    if mask.numel():
        grid = (-(-mask.numel() // UNPACK_BLOCK),)
        _unpack_mask_kernel[grid](
            words, mask.view(torch.uint8), *words.stride(), mask.numel(), rows, columns, BLOCK=UNPACK_BLOCK, num_warps=4
        )
    return mask


@_unpack_mask_op.register_fake
def _(words, columns, backend):
    return words.new_empty(words.shape[0], words.shape[1], columns, dtype=torch.bool)


def pack_mask_reference(mask: Tensor) -> Tensor:
    """[B,R,C] bool -> [B,R,ceil(C/32)] int32."""
    batch, rows, columns = mask.shape
    width = -(-columns // 32)
    padded = torch.nn.functional.pad(mask, (0, 32 * width - columns))  # [B,R,32·W]
    shifts = torch.arange(32, device=mask.device)  # [32]
    words = (padded.view(batch, rows, width, 32).long() << shifts).sum(-1)  # [B,R,W] in [0, 2**32)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def unpack_mask_reference(words: Tensor, columns: int) -> Tensor:
    """[B,R,W] int32 -> [B,R,C] bool."""
    shifts = torch.arange(32, device=words.device, dtype=torch.int32)  # [32]
    bits = (words[..., None] >> shifts) & 1  # [B,R,W,32]
    return bits.flatten(2)[:, :, :columns].bool().contiguous()


@TritonKernel
def _pack_mask_kernel(
    mask_ptr, words_ptr, stride_batch, stride_row, stride_column, total, rows, columns, width, BLOCK: tl.constexpr
):
    word = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bit = tl.arange(0, 32)
    line = word // width
    column = (word % width)[:, None] * 32 + bit[None, :]
    place = ((line // rows) * stride_batch + (line % rows) * stride_row)[:, None] + column * stride_column
    on = tl.load(mask_ptr + place, mask=(word < total)[:, None] & (column < columns), other=0)
    tl.store(words_ptr + word, tl.sum((on != 0).to(tl.int32) << bit[None, :], 1), mask=word < total)


@TritonKernel
def _unpack_mask_kernel(
    words_ptr, mask_ptr, stride_batch, stride_row, stride_word, total, rows, columns, BLOCK: tl.constexpr
):
    cell = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    line = cell // columns
    column = cell % columns
    place = (line // rows) * stride_batch + (line % rows) * stride_row + (column // 32) * stride_word
    word = tl.load(words_ptr + place, mask=cell < total, other=0)
    on = (word >> (column % 32).to(tl.int32)) & 1
    tl.store(mask_ptr + cell, on.to(tl.uint8), mask=cell < total)
