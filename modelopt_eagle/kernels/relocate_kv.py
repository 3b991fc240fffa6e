"""Keys and values of an accepted tree path, moved to consecutive places behind the prefix, in place.

Before: node n of the tree lies at position ``lengths[b] + n``. After: the k-th node of the accepted path lies at
``lengths[b] + k``. Path nodes strictly increase, so a source is never before its destination and an ascending copy
needs no second buffer; rows that already lie in place are neither read nor written.

One call moves one tensor (or a pair of keys and values): layers differ in heads, widths and windows, so each layer
is its own call. The layouts, by which axis holds the positions:

=====================================  ==========================================  =====================
cache                                  shape                                       arguments
=====================================  ==========================================  =====================
transformers, one layer                [B, heads, L, d]                            (defaults)
MLA latents, one row a token           [B, L, d]                                   (defaults)
paged                                  [blocks, block_size, heads, d]              block_table
paged MLA latents                      [blocks, block_size, d]                     block_table
paged, heads first                     [blocks, heads, block_size, d]              block_table, token_dim=2
ring buffer of a sliding window        position p at place p % window              window
=====================================  ==========================================  =====================
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from modelopt_eagle.kernels.dispatch import (
    TritonKernel,
    choose_backend,
    power_of_two,
    require,
    require_integers,
)
from modelopt_eagle.kernels.repack_accepted import as_integers

if TYPE_CHECKING:
    import triton.language as tl

PATH_BLOCK, FEATURE_BLOCK = 8, 512  # path nodes and elements of a token's row that one program holds at a time


def relocate_kv(
    cache: Tensor | Sequence[Tensor],
    nodes: Tensor,
    num_accepted: Tensor,
    lengths: Tensor,
    *,
    block_table: Tensor | None = None,
    token_dim: int | None = None,
    window: int | None = None,
    attention_window: int | None = None,
    num_nodes: int | None = None,
    debug: bool = False,
    backend: str = "auto",
) -> None:
    """Move each row's accepted path together, in place; see the table of layouts above.

    Args:
        cache: a tensor, or several that move alike (keys and values), of any dtype and strides.
        nodes: [B,D+1] int32 or int64, the accepted path, root first (``Accepted.nodes``); padding is not read.
        num_accepted: [B] int32 or int64; -1 leaves a row alone.
        lengths: [B] int32 or int64; position of the root's row, that is the tokens cached before it.
        block_table: [B, blocks a row] int32 or int64, physical block of each logical block; None: contiguous.
        token_dim: the axis of positions; None means -2, or 1 with a block table.
        window: ring size R of a layer that keeps position p at place p % R. The tree's N nodes are written before one
            of them is taken, and the oldest key that the root still sees must survive that: R is at least the layer's
            attention window + N - 1. A ring of the attention window alone loses keys to rejected nodes, which no move
            brings back.
        attention_window, num_nodes: the layer's window (keys that a token sees, itself included) and N; with both
            given, a ring that is too small is refused.
        debug: check order and bounds of the path on CUDA as well (waits for the device; on the CPU always checked).
        backend: see ``dispatch.py``.

    Raises:
        DecodingError: shapes that do not fit, a path that does not increase, or one that leaves the cache. Without
            ``debug`` a CUDA row out of bounds is not moved, so that memory of others stays intact.
    """
    batch = nodes.shape[0]
    require_integers("nodes", nodes, batch, None)
    require_integers("num_accepted", num_accepted, batch)
    require_integers("lengths", lengths, batch)
    require(window is None or window >= 1, lambda: f"window must be at least 1, found {window}")
    if window is not None and attention_window is not None and num_nodes is not None:
        need = attention_window + num_nodes - 1
        require(
            window >= need,
            lambda: (
                f"window (the ring's size) must be at least attention_window + num_nodes - 1 = {need}, found {window}: "
                "the tree's nodes overwrite keys that are still seen"
            ),
        )
    if block_table is not None:
        require_integers("block_table", block_table, batch, None)
    axis = token_dim if token_dim is not None else -2 if block_table is None else 1
    for tensor in [cache] if isinstance(cache, Tensor) else cache:
        check_cache(tensor, axis, batch if block_table is None else None)
        torch.ops.modelopt_eagle.relocate_kv(
            tensor, nodes, num_accepted, lengths, block_table, axis % tensor.dim(), window or 0, debug, backend
        )


def check_cache(tensor: Tensor, axis: int, batch: int | None) -> None:
    """Raise DecodingError unless a cache has a place for positions and, if it is not paged, a row a request."""
    require(tensor.dim() in (3, 4), lambda: f"cache must have three or four dimensions, found {list(tensor.shape)}")
    require(
        -tensor.dim() <= axis < tensor.dim() and axis % tensor.dim() != 0,
        lambda: f"token_dim must name an axis behind the first of {list(tensor.shape)}, found {axis}",
    )
    require(
        batch is None or tensor.shape[0] == batch,
        lambda: f"cache must have {batch} rows like nodes, found {list(tensor.shape)}",
    )


@torch.library.custom_op("modelopt_eagle::relocate_kv", mutates_args={"cache"})
def _relocate_kv_op(
    cache: Tensor,
    nodes: Tensor,
    num_accepted: Tensor,
    lengths: Tensor,
    block_table: Tensor | None,
    token_dim: int,
    window: int,
    debug: bool,
    backend: str,
) -> None:
    view = token_view(cache, token_dim)  # [B or blocks, places, heads, d]
    if debug or cache.device.type == "cpu":
        check_path(view, nodes, num_accepted, lengths, block_table, window)
    if choose_backend(backend, cache.device) == "reference":
        relocate_kv_reference(view, nodes, num_accepted, lengths, block_table, window)
    elif view.numel() and nodes.numel():
        heads, width = view.shape[2:]
        block = min(power_of_two(heads * width), FEATURE_BLOCK)
        path_block = min(power_of_two(nodes.shape[1]), PATH_BLOCK)
        table = nodes if block_table is None else block_table
        _relocate_kv_kernel[(nodes.shape[0], -(-heads * width // block))](
            as_integers(view), nodes, num_accepted, lengths, table,
            *view.stride(), *nodes.stride(), num_accepted.stride(0), lengths.stride(0), *table.stride(),
            nodes.shape[1], view.shape[1], view.shape[0], table.shape[1], window, heads * width,
            WIDTH=width, PAGED=block_table is not None, RING=window > 0, PATH=path_block, BLOCK=block,
            num_warps=4, num_stages=1,
        )  # fmt: skip


@_relocate_kv_op.register_fake
def _(cache, nodes, num_accepted, lengths, block_table, token_dim, window, debug, backend):
    return None


def token_view(cache: Tensor, token_dim: int) -> Tensor:
    """View a cache as [B or blocks, places, heads, d] without copying; heads is 1 for latents."""
    cache = cache.movedim(token_dim, 1)
    return cache[:, :, None] if cache.dim() == 3 else cache


def check_path(view, nodes, num_accepted, lengths, block_table, window) -> None:
    """Raise DecodingError unless every accepted path increases from node 0 and stays inside the cache."""
    step = torch.arange(nodes.shape[1], device=nodes.device)  # [D+1]
    used = step <= num_accepted[:, None]  # [B,D+1]
    require(
        bool((num_accepted < nodes.shape[1]).all()),
        lambda: f"num_accepted must be below the {nodes.shape[1]} columns of nodes, found {num_accepted.tolist()}",
    )
    rising = (nodes[:, 1:] > nodes[:, :-1]) | ~used[:, 1:]  # [B,D]
    starts = (nodes[:, 0] == 0) | ~used[:, 0]  # [B]
    require(
        bool(rising.all()) and bool(starts.all()),
        lambda: f"nodes must be accepted paths: 0 first, then strictly increasing, found {nodes.tolist()}",
    )
    last = torch.where(used, nodes, 0).amax(1)  # [B]
    require(bool((lengths >= 0).all()), lambda: f"lengths must not be negative, found {lengths.tolist()}")
    end = torch.where(used.any(1), lengths + last + 1, 0)  # [B]
    room = view.shape[1] if block_table is None else view.shape[1] * block_table.shape[1]
    if window:
        require(window <= room, lambda: f"window {window} exceeds the {room} places of a row")
        require(
            bool((last < window).all()),
            lambda: f"window must exceed the path's nodes, found {window} for {last.tolist()}",
        )
        end = end.clamp(max=window)
    require(
        bool((end <= room).all()),
        lambda: f"cache too short: the accepted paths end at {end.tolist()}, a row holds {room} positions",
    )
    if block_table is not None:
        check_blocks(view, nodes, used, lengths, block_table, window)


def check_blocks(view, nodes, used, lengths, block_table, window) -> None:
    """Raise DecodingError if a move reads or writes a logical block that stands for no block (such as -1)."""
    step = torch.arange(nodes.shape[1], device=nodes.device)  # [D+1]
    moved = (used & (nodes != step)).repeat(1, 2)  # [B,2(D+1)]
    first = lengths.long()[:, None]  # [B,1]
    places = torch.where(moved, torch.cat([first + nodes, first + step.expand(nodes.shape)], dim=1), 0)
    entries = block_table.long().gather(1, (places % window if window else places) // view.shape[1])
    wrong = moved & ((entries < 0) | (entries >= view.shape[0]))
    require(
        not bool(wrong.any()),
        lambda: (
            f"block_table must name blocks from 0 to {view.shape[0] - 1} where rows are moved, "
            f"found {entries[wrong].unique().tolist()}"
        ),
    )


def relocate_kv_reference(view, nodes, num_accepted, lengths, block_table, window) -> None:
    """The same move by indexing, with a copy of the moved rows on the side."""
    step = torch.arange(nodes.shape[1], device=nodes.device)  # [D+1]
    row, moved = ((step <= num_accepted[:, None]) & (nodes != step)).nonzero(as_tuple=True)  # [M] each
    if row.numel() == 0:
        return
    source = lengths.long()[row] + nodes.long()[row, moved]  # [M] positions
    target = lengths.long()[row] + moved  # [M]
    if window:
        source, target = source % window, target % window
    if block_table is None:
        view[row, target] = view[row, source]  # [M,heads,d]
        return
    size, table = view.shape[1], block_table.long()
    values = view[table[row, source // size], source % size]  # [M,heads,d]
    view[table[row, target // size], target % size] = values


@TritonKernel
def place_of(
    position, table_ptr, stride_entry, stride_first, stride_place, row, places, firsts, entries, window, live,
    PAGED: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """Offset of each position's row in the cache and whether it lies inside."""
    if RING:
        position = position % window
    if PAGED:
        entry = position // places
        inside = live & (position >= 0) & (entry < entries)
        first = tl.load(table_ptr + entry * stride_entry, mask=inside, other=-1).to(tl.int64)
        inside = inside & (first >= 0) & (first < firsts)
        offset = first * stride_first + (position % places) * stride_place
    else:
        inside = live & (position >= 0) & (position < places)
        offset = row * stride_first + position * stride_place
    return offset, inside


@TritonKernel
def _relocate_kv_kernel(
    cache_ptr, nodes_ptr, count_ptr, lengths_ptr, table_ptr,
    stride_first, stride_place, stride_head, stride_element, stride_paths, stride_path, stride_count, stride_length,
    stride_tables, stride_entry, steps, places, firsts, entries, window, features,
    WIDTH: tl.constexpr, PAGED: tl.constexpr, RING: tl.constexpr, PATH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row and slice of a token's elements: read a block of path rows whole, then write it."""
    row = tl.program_id(0).to(tl.int64)
    table_ptr += row * stride_tables
    feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    element = (feature // WIDTH).to(tl.int64) * stride_head + (feature % WIDTH).to(tl.int64) * stride_element
    last = tl.load(count_ptr + row * stride_count).to(tl.int32)
    base = tl.load(lengths_ptr + row * stride_length).to(tl.int64)
    for start in range(0, tl.minimum(last + 1, steps), PATH):
        step = start + tl.arange(0, PATH)
        used = (step <= last) & (step < steps)
        node = tl.load(nodes_ptr + row * stride_paths + step * stride_path, mask=used, other=0).to(tl.int64)
        moved = used & (node > step)
        source, readable = place_of(
            base + node, table_ptr, stride_entry, stride_first, stride_place, row, places, firsts, entries, window,
            moved, PAGED, RING,
        )  # fmt: skip
        target, writable = place_of(
            base + step, table_ptr, stride_entry, stride_first, stride_place, row, places, firsts, entries, window,
            moved, PAGED, RING,
        )  # fmt: skip
        mask = (readable & writable)[:, None] & (feature < features)[None, :]
        value = tl.load(cache_ptr + source[:, None] + element[None, :], mask=mask, other=0)
        tl.debug_barrier()  # a row can be a source here and a target a few steps on: read all before writing
        tl.store(cache_ptr + target[:, None] + element[None, :], value, mask=mask)
        tl.debug_barrier()
