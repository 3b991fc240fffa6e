"""Rows in tree layout (one a node) to the accepted path: at most D+1 rows a request, in path order.

What follows the last accepted row repeats it, so that shapes stay fixed; the reader ignores it by ``num_accepted``.
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
    warps_for,
)

if TYPE_CHECKING:
    import triton.language as tl

MAX_BLOCK = 1024  # elements of a row that one program copies


def repack_accepted(rows: Tensor, nodes: Tensor, num_accepted: Tensor, *, backend: str = "auto") -> Tensor:
    """Gather the accepted nodes' rows: hidden states, logits, tokens or positions.

    Args:
        rows: [B,N,...] of any dtype and strides, one row a tree node.
        nodes: [B,D+1] int32 or int64, the accepted path, root first (``Accepted.nodes``); padding is not read.
        num_accepted: [B] int32 or int64 in [0, D]; ``num_accepted + 1`` rows are the path.
        backend: see ``dispatch.py``.

    Returns:
        [B,D+1,...] contiguous, dtype of ``rows``; places behind the path repeat its last row.

    Raises:
        DecodingError: shapes or dtypes that do not fit.
    """
    require(rows.dim() >= 2, lambda: f"rows must have shape [B, N, ...], found {list(rows.shape)}")
    require_integers("nodes", nodes, rows.shape[0], None)
    require_integers("num_accepted", num_accepted, rows.shape[0])
    flat = rows[:, :, None] if rows.dim() == 2 else rows.flatten(2)  # [B,N,F]
    packed = torch.ops.modelopt_eagle.repack_accepted(flat, nodes, num_accepted, backend)
    return packed.view(*nodes.shape, *rows.shape[2:])


@torch.library.custom_op("modelopt_eagle::repack_accepted", mutates_args=())
def _repack_accepted_op(rows: Tensor, nodes: Tensor, num_accepted: Tensor, backend: str) -> Tensor:
    if choose_backend(backend, rows.device) == "reference":
        return repack_accepted_reference(rows, nodes, num_accepted)
    batch, num_nodes, features = rows.shape
    steps = nodes.shape[1]
    packed = torch.empty(batch, steps, features, dtype=rows.dtype, device=rows.device)  # [B,D+1,F]
    if packed.numel():
        block = min(power_of_two(features), MAX_BLOCK)
        source, target = as_integers(rows), as_integers(packed)
        _repack_accepted_kernel[(batch * steps, -(-features // block))](
            source, nodes, num_accepted, target, *source.stride(), *nodes.stride(), num_accepted.stride(0),
            steps, num_nodes, features, BLOCK=block, num_warps=warps_for(block),
        )  # fmt: skip
    return packed


@_repack_accepted_op.register_fake
def _(rows, nodes, num_accepted, backend):
    return rows.new_empty(nodes.shape[0], nodes.shape[1], rows.shape[2])


def as_integers(tensor: Tensor) -> Tensor:
    """A view with the integer dtype of the same size, so that one kernel moves every dtype, the 8-bit ones too."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    width = tensor.element_size()
    require(
        width in sizes and not tensor.is_complex(),
        lambda: f"elements of 1, 2, 4 or 8 bytes needed, found {tensor.dtype}",
    )
    return tensor.view(sizes[width])


def repack_accepted_reference(rows: Tensor, nodes: Tensor, num_accepted: Tensor) -> Tensor:
    """The same gather by indexing: rows [B,N,F] -> [B,D+1,F]."""
    step = torch.arange(nodes.shape[1], device=nodes.device)  # [D+1]
    taken = torch.minimum(step, num_accepted[:, None]).clamp(min=0).long()  # [B,D+1]
    place = nodes.long().gather(1, taken).clamp(0, rows.shape[1] - 1)  # [B,D+1]
    return rows[torch.arange(rows.shape[0], device=rows.device)[:, None], place].contiguous()


@TritonKernel
def _repack_accepted_kernel(
    rows_ptr, nodes_ptr, count_ptr, packed_ptr,
    stride_rows, stride_node, stride_feature, stride_paths, stride_path, stride_count,
    steps, num_nodes, features, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    row = place // steps
    step = (place % steps).to(tl.int32)
    last = tl.load(count_ptr + row * stride_count).to(tl.int32)
    taken = tl.maximum(tl.minimum(step, last), 0)
    node = tl.load(nodes_ptr + row * stride_paths + taken * stride_path).to(tl.int64)
    node = tl.minimum(tl.maximum(node, 0), num_nodes - 1)
    feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = rows_ptr + row * stride_rows + node * stride_node + feature.to(tl.int64) * stride_feature
    value = tl.load(source, mask=feature < features, other=0)
    tl.store(packed_ptr + place * features + feature, value, mask=feature < features)
