"""Lossless sampling through a tree: draw from the target, descend if the tree holds what was drawn.

At each visited node x is drawn from the target's own distribution after that node; if x is a child the walk goes
there, else x is the last token emitted. Every emitted token is a draw from the target, so the output distribution is
the target's, exactly. For a tree that was drafted without randomness no lossless rule accepts more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from modelopt_eagle.kernels.build_tree import DraftTree
from modelopt_eagle.kernels.dispatch import TritonKernel, choose_backend, power_of_two, warps_for
from modelopt_eagle.kernels.inverse_cdf import (
    check_probabilities,
    check_uniforms,
    check_values,
    draw_reference,
    draw_token,
    vocabulary_block,
)
from modelopt_eagle.kernels.verify_greedy import (
    MAX_BLOCK,
    Accepted,
    accepted_fields,
    check_tree,
    empty_accepted,
    find_child,
    find_child_reference,
    nobody,
)

if TYPE_CHECKING:
    import triton.language as tl


def sample_and_match(
    tree: DraftTree,
    target_probs: Tensor,
    uniforms: Tensor,
    tree_valid: Tensor | None = None,
    *,
    debug: bool = False,
    backend: str = "auto",
) -> Accepted:
    """Sample each row's continuation from the target and accept what the tree already holds.

    Args:
        tree: DraftTree of B rows and N nodes; siblings are distinct tokens.
        target_probs: [B,N,V] floating point; the target's distribution after each node, already shaped by
            temperature, top-k, top-p and min-p. Rows need not be normalised. Any strides.
        uniforms: [B,D+1] floating point in [0, 1), independent. Column k is spent by the node at depth k on the
            path: the draw is the first token whose cumulated mass exceeds ``uniforms[b,k]`` times the row's mass.
            A float32 uniform resolves 2**-24: pass float64 where rarer tokens matter.
        tree_valid: [B] bool; where false the root's draw is emitted and nothing is accepted.
        debug: check the trees (duplicate siblings are an error), the distributions and the uniforms.
        backend: see ``dispatch.py``.

    Returns:
        Accepted; ``tokens`` are the drawn tokens, ``num_accepted + 1`` of them. A row without any mass draws -1.

    Raises:
        DecodingError: shapes or dtypes that do not fit, or what ``debug`` finds.
    """
    check_tree(tree, tree_valid)
    batch, nodes = tree.tokens.shape
    depth = tree.depth_limit()
    check_probabilities(target_probs, batch, nodes)
    check_uniforms("uniforms", uniforms, batch, depth + 1)
    if debug:
        tree.check()
        check_values(target_probs, uniforms=uniforms)
    return Accepted(
        *torch.ops.modelopt_eagle.sample_and_match(
            tree.tokens, tree.parents, target_probs, uniforms, tree_valid, depth, backend
        )
    )


@torch.library.custom_op("modelopt_eagle::sample_and_match", mutates_args=())
def _sample_and_match_op(
    tokens: Tensor,
    parents: Tensor,
    target_probs: Tensor,
    uniforms: Tensor,
    tree_valid: Tensor | None,
    depth: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    if choose_backend(backend, tokens.device) == "reference":
        return sample_and_match_reference(tokens, parents, target_probs, uniforms, tree_valid, depth)
    accepted = empty_accepted(tokens, depth)
    batch, nodes, vocabulary = target_probs.shape
    valid = tokens if tree_valid is None else tree_valid.view(torch.uint8)
    block = vocabulary_block(vocabulary)
    if batch:
        _sample_and_match_kernel[(batch,)](
            tokens, parents, target_probs, uniforms, valid, *accepted,
            *tokens.stride(), *parents.stride(), *target_probs.stride(), *uniforms.stride(), valid.stride(0),
            nodes, depth, vocabulary,
            HAS_VALID=tree_valid is not None, NODES=min(power_of_two(nodes), MAX_BLOCK), BLOCK=block,
            num_warps=warps_for(block),
        )  # fmt: skip
    return accepted


@_sample_and_match_op.register_fake
def _(tokens, parents, target_probs, uniforms, tree_valid, depth, backend):
    return empty_accepted(tokens, depth)


def sample_and_match_reference(tokens, parents, target_probs, uniforms, tree_valid, depth):
    """The same walk with plain tensor operations, one step of all rows at a time."""
    batch = tokens.shape[0]
    rows = torch.arange(batch, device=tokens.device)  # [B]
    node = torch.zeros(batch, dtype=torch.long, device=tokens.device)  # [B]
    walking = torch.ones(batch, dtype=torch.bool, device=tokens.device) if tree_valid is None else tree_valid
    drawn = draw_reference(target_probs[:, 0], uniforms[:, 0])  # [B]
    path, out = [node], [drawn]
    for step in range(1, depth + 1):
        child, exists = find_child_reference(tokens, parents, node, drawn)
        walking = walking & exists
        if nobody(walking):
            break
        node = torch.where(walking, child, node)
        drawn = draw_reference(target_probs[rows, node], uniforms[:, step])  # [B]
        path.append(torch.where(walking, node, -1))
        out.append(torch.where(walking, drawn, -1))
    return accepted_fields(path, out, depth)


@TritonKernel
def _sample_and_match_kernel(
    tokens_ptr, parents_ptr, probs_ptr, uniforms_ptr, valid_ptr, count_ptr, nodes_ptr, emitted_ptr,
    stride_tokens, stride_token, stride_parents, stride_parent, stride_rows, stride_node, stride_entry,
    stride_uniforms, stride_uniform, stride_valid, num_nodes, depth, vocabulary,
    HAS_VALID: tl.constexpr, NODES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row; a step reads one row of the vocabulary twice (its mass, then the draw)."""
    row = tl.program_id(0).to(tl.int64)
    tokens_ptr += row * stride_tokens
    parents_ptr += row * stride_parents
    probs_ptr += row * stride_rows
    uniforms_ptr += row * stride_uniforms
    nodes_ptr += row * (depth + 1)
    emitted_ptr += row * (depth + 1)
    alive = tl.full((), 1, tl.int32)
    if HAS_VALID:
        alive = (tl.load(valid_ptr + row * stride_valid) != 0).to(tl.int32)
    node = tl.full((), 0, tl.int32)
    count = tl.full((), 0, tl.int32)
    drawn = draw_token(
        probs_ptr, stride_entry, vocabulary, tl.load(uniforms_ptr), tokens_ptr, stride_token, 0, 0, BLOCK
    ).to(tl.int32)
    tl.store(nodes_ptr, node)
    tl.store(emitted_ptr, drawn)
    for step in range(1, depth + 1):
        child = find_child(tokens_ptr, parents_ptr, stride_token, stride_parent, num_nodes, node, drawn, NODES)
        alive = tl.where(child < num_nodes, alive, 0)
        if alive != 0:
            node = child
            count += 1
            drawn = draw_token(
                probs_ptr + node.to(tl.int64) * stride_node, stride_entry, vocabulary,
                tl.load(uniforms_ptr + step * stride_uniform), tokens_ptr, stride_token, 0, 0, BLOCK,
            ).to(tl.int32)  # fmt: skip
        tl.store(nodes_ptr + step, tl.where(alive != 0, node, -1))
        tl.store(emitted_ptr + step, tl.where(alive != 0, drawn, -1))
    tl.store(count_ptr + row, count)
