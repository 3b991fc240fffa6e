"""The greedy walk: follow the target's own predictions down the tree as far as the tree has them.

From the current node go to the first child, in sibling order (ascending node number), whose token equals the target's
prediction after the current node. What is emitted is the target's greedy continuation, token for token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from modelopt_eagle.kernels.build_tree import DraftTree
from modelopt_eagle.kernels.dispatch import (
    TritonKernel,
    choose_backend,
    power_of_two,
    require,
    require_integers,
    require_shape,
    warps_for,
)

if TYPE_CHECKING:
    import triton.language as tl

MAX_BLOCK = 1024  # nodes looked at together; larger trees are read in blocks of this many


@dataclass(frozen=True)
class Accepted:
    """What a walk accepted; int32.

    num_accepted [B]: drafted tokens accepted, without the root and the bonus token. nodes [B,D+1]: the accepted path,
    root first, padded with -1. tokens [B,D+1]: the ``num_accepted + 1`` tokens to emit, padded with -1.
    """

    num_accepted: Tensor
    nodes: Tensor
    tokens: Tensor


def verify_greedy(
    tree: DraftTree, target_predict: Tensor, tree_valid: Tensor | None = None, *, backend: str = "auto"
) -> Accepted:
    """Accept the longest path of each tree that the target itself would have taken.

    Args:
        tree: DraftTree of B rows and N nodes.
        target_predict: [B,N] int32 or int64; the target's token after each node.
        tree_valid: [B] bool; where false nothing is accepted and the root's prediction is emitted.
        backend: see ``dispatch.py``.

    Returns:
        Accepted; ``tokens`` are ``target_predict`` along the path.

    Raises:
        DecodingError: shapes or dtypes that do not fit.
    """
    check_tree(tree, tree_valid)
    require_integers("target_predict", target_predict, *tree.tokens.shape)
    return Accepted(
        *torch.ops.modelopt_eagle.verify_greedy(
            tree.tokens, tree.parents, target_predict, tree_valid, tree.depth_limit(), backend
        )
    )


def check_tree(tree: DraftTree, tree_valid: Tensor | None) -> None:
    """Raise DecodingError unless the tree's tensors and ``tree_valid`` fit together (shapes and dtypes only)."""
    require(tree.tokens.dim() == 2, lambda: f"tree.tokens must have shape [B, N], found {list(tree.tokens.shape)}")
    batch, nodes = tree.tokens.shape
    require_integers("tree.tokens", tree.tokens, batch, nodes)
    require_integers("tree.parents", tree.parents, batch, nodes)
    if tree_valid is not None:
        require(tree_valid.dtype == torch.bool, lambda: f"tree_valid must be bool, found {tree_valid.dtype}")
        require_shape("tree_valid", tree_valid, batch)


@torch.library.custom_op("modelopt_eagle::verify_greedy", mutates_args=())
def _verify_greedy_op(
    tokens: Tensor,
    parents: Tensor,
    target_predict: Tensor,
    tree_valid: Tensor | None,
    depth: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    if choose_backend(backend, tokens.device) == "reference":
        return verify_greedy_reference(tokens, parents, target_predict, tree_valid, depth)
    accepted = empty_accepted(tokens, depth)
    batch, nodes = tokens.shape
    valid = tokens if tree_valid is None else tree_valid.view(torch.uint8)
    block = min(power_of_two(nodes), MAX_BLOCK)
    if batch:
        _verify_greedy_kernel[(batch,)](
            tokens, parents, target_predict, valid, *accepted,
            *tokens.stride(), *parents.stride(), *target_predict.stride(), valid.stride(0), nodes, depth,
            HAS_VALID=tree_valid is not None, BLOCK=block, num_warps=warps_for(block),
        )  # fmt: skip
    return accepted


@_verify_greedy_op.register_fake
def _(tokens, parents, target_predict, tree_valid, depth, backend):
    return empty_accepted(tokens, depth)


def empty_accepted(tokens: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialised tensors of Accepted's fields, in their order."""
    batch, device = tokens.shape[0], tokens.device
    return (
        torch.empty(batch, dtype=torch.int32, device=device),
        torch.empty(batch, depth + 1, dtype=torch.int32, device=device),
        torch.empty(batch, depth + 1, dtype=torch.int32, device=device),
    )


def find_child_reference(tokens, parents, node, token):
    """First child of ``node`` [B] with ``token`` [B], in sibling order: (its number [B], whether there is one [B])."""
    match = (parents == node[:, None]) & (tokens == token[:, None])  # [B,N]
    return match.to(torch.int8).argmax(dim=1), match.any(dim=1)


def nobody(walking: Tensor) -> bool:
    """Whether no row walks on, so that a reference on the CPU may stop; a GPU is not waited for: always False."""
    return walking.device.type == "cpu" and not bool(walking.any())


def accepted_fields(path: list[Tensor], out: list[Tensor], depth: int) -> tuple[Tensor, ...]:
    """Accepted's fields from the nodes and tokens of each step [B], -1 after a row's end; ended steps are added."""
    padding = (0, depth + 1 - len(path))
    nodes = torch.nn.functional.pad(torch.stack(path, dim=1), padding, value=-1).to(torch.int32)  # [B,D+1]
    emitted = torch.nn.functional.pad(torch.stack(out, dim=1), padding, value=-1).to(torch.int32)  # [B,D+1]
    return (nodes >= 0).sum(1).to(torch.int32) - 1, nodes, emitted


def verify_greedy_reference(tokens, parents, target_predict, tree_valid, depth):
    """The same walk with plain tensor operations, one step of all rows at a time."""
    batch = tokens.shape[0]
    node = torch.zeros(batch, dtype=torch.long, device=tokens.device)  # [B]
    walking = torch.ones(batch, dtype=torch.bool, device=tokens.device) if tree_valid is None else tree_valid
    predict = target_predict.long()  # [B,N]
    emitted = predict[:, 0]  # [B]
    path, out = [node], [emitted]
    for _ in range(depth):
        child, exists = find_child_reference(tokens, parents, node, emitted)
        walking = walking & exists
        if nobody(walking):
            break
        node = torch.where(walking, child, node)
        emitted = predict.gather(1, node[:, None])[:, 0]  # [B]
        path.append(torch.where(walking, node, -1))
        out.append(torch.where(walking, emitted, -1))
    return accepted_fields(path, out, depth)


@TritonKernel
def find_child(tokens_ptr, parents_ptr, stride_token, stride_parent, num_nodes, node, token, BLOCK: tl.constexpr):
    """Number of the first child of ``node`` with ``token``; ``num_nodes`` if there is none."""
    best = num_nodes
    for start in range(0, num_nodes, BLOCK):
        other = start + tl.arange(0, BLOCK)
        parent = tl.load(parents_ptr + other * stride_parent, mask=other < num_nodes, other=-2).to(tl.int32)
        drafted = tl.load(tokens_ptr + other * stride_token, mask=other < num_nodes, other=-2).to(tl.int32)
        match = (other < num_nodes) & (parent == node) & (drafted == token)
        best = tl.minimum(best, tl.min(tl.where(match, other, num_nodes)))
    return best


@TritonKernel
def _verify_greedy_kernel(
    tokens_ptr, parents_ptr, predict_ptr, valid_ptr, count_ptr, nodes_ptr, emitted_ptr,
    stride_tokens, stride_token, stride_parents, stride_parent, stride_predicts, stride_predict, stride_valid,
    num_nodes, depth, HAS_VALID: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row; each step compares all nodes at once, so a step costs the same for any branching."""
    row = tl.program_id(0).to(tl.int64)
    tokens_ptr += row * stride_tokens
    parents_ptr += row * stride_parents
    predict_ptr += row * stride_predicts
    nodes_ptr += row * (depth + 1)
    emitted_ptr += row * (depth + 1)
    walking = tl.full((), 1, tl.int32)
    if HAS_VALID:
        walking = (tl.load(valid_ptr + row * stride_valid) != 0).to(tl.int32)
    node = tl.full((), 0, tl.int32)
    count = tl.full((), 0, tl.int32)
    emitted = tl.load(predict_ptr).to(tl.int32)
    tl.store(nodes_ptr, node)
    tl.store(emitted_ptr, emitted)
    for step in range(1, depth + 1):
        child = find_child(tokens_ptr, parents_ptr, stride_token, stride_parent, num_nodes, node, emitted, BLOCK)
        walking = tl.where(child < num_nodes, walking, 0)
        node = tl.where(walking != 0, child, node)
        count += walking
        emitted = tl.load(predict_ptr + node * stride_predict).to(tl.int32)
        tl.store(nodes_ptr + step, tl.where(walking != 0, node, -1))
        tl.store(emitted_ptr + step, tl.where(walking != 0, emitted, -1))
    tl.store(count_ptr + row, count)
