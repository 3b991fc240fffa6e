"""The sampling rule of serving engines, for parity: one coin a visited node against its children's cumulated mass.

At a node with children c1, c2, ... in sibling order, child ci is accepted if the coin is below p(c1) + ... + p(ci)
(strictly) and was not below the sum before it. If no child is accepted, the last token is drawn from the rest: the
target's distribution without the children, with a uniform of its own. At a node without children the last token is
drawn from the whole distribution. With distinct siblings, fresh coins and a fresh last uniform this is lossless; a
duplicate sibling counts its mass twice and biases the output, so ``debug`` refuses it.

Source: SGLang's ``tree_speculative_sampling_target_only`` at thresholds of 1.
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
    nobody,
)

if TYPE_CHECKING:
    import triton.language as tl


def reject_target_only(
    tree: DraftTree,
    target_probs: Tensor,
    coins: Tensor,
    last_uniforms: Tensor,
    tree_valid: Tensor | None = None,
    *,
    debug: bool = False,
    backend: str = "auto",
) -> Accepted:
    """Accept a path by one coin a visited node, then draw the last token from what the children left.

    Args:
        tree: DraftTree of B rows and N nodes; siblings are distinct tokens.
        target_probs: [B,N,V] floating point, rows that sum to one. Any strides.
        coins: [B,D] floating point in [0, 1); column k is spent by the node at depth k on the path.
        last_uniforms: [B] floating point in [0, 1), independent of the coins: the draw of the last token.
        tree_valid: [B] bool; where false the root's children count as absent and nothing is accepted.
        debug: check the trees (duplicate siblings are an error), the distributions and the uniforms.
        backend: see ``dispatch.py``.

    Returns:
        Accepted; ``tokens`` are the accepted tokens and, at ``num_accepted``, the last one.

    Raises:
        DecodingError: shapes or dtypes that do not fit, or what ``debug`` finds.
    """
    check_tree(tree, tree_valid)
    batch, nodes = tree.tokens.shape
    depth = tree.depth_limit()
    check_probabilities(target_probs, batch, nodes)
    check_uniforms("coins", coins, batch, depth)
    check_uniforms("last_uniforms", last_uniforms, batch)
    if debug:
        tree.check()
        check_values(target_probs, coins=coins, last_uniforms=last_uniforms)
    return Accepted(
        *torch.ops.modelopt_eagle.reject_target_only(
            tree.tokens, tree.parents, target_probs, coins, last_uniforms, tree_valid, depth, backend
        )
    )


@torch.library.custom_op("modelopt_eagle::reject_target_only", mutates_args=())
def _reject_target_only_op(
    tokens: Tensor,
    parents: Tensor,
    target_probs: Tensor,
    coins: Tensor,
    last_uniforms: Tensor,
    tree_valid: Tensor | None,
    depth: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    if choose_backend(backend, tokens.device) == "reference":
        return reject_target_only_reference(tokens, parents, target_probs, coins, last_uniforms, tree_valid, depth)
    accepted = empty_accepted(tokens, depth)
    batch, nodes, vocabulary = target_probs.shape
    valid = tokens if tree_valid is None else tree_valid.view(torch.uint8)
    block = vocabulary_block(vocabulary)
    if batch:
        _reject_target_only_kernel[(batch,)](
            tokens, parents, target_probs, coins, last_uniforms, valid, *accepted,
            *tokens.stride(), *parents.stride(), *target_probs.stride(), *coins.stride(),
            last_uniforms.stride(0), valid.stride(0), nodes, depth, vocabulary,
            HAS_VALID=tree_valid is not None, NODES=min(power_of_two(nodes), MAX_BLOCK), BLOCK=block,
            num_warps=warps_for(block),
        )  # fmt: skip
    return accepted


@_reject_target_only_op.register_fake
def _(tokens, parents, target_probs, coins, last_uniforms, tree_valid, depth, backend):
    return empty_accepted(tokens, depth)


def reject_target_only_reference(tokens, parents, target_probs, coins, last_uniforms, tree_valid, depth):
    """The same walk with plain tensor operations, one step of all rows at a time."""
    batch = tokens.shape[0]
    rows = torch.arange(batch, device=tokens.device)  # [B]
    node = torch.zeros(batch, dtype=torch.long, device=tokens.device)  # [B]
    valid = torch.ones(batch, dtype=torch.bool, device=tokens.device) if tree_valid is None else tree_valid
    known = (tokens >= 0) & (tokens < target_probs.shape[2])  # [B,N] a token beyond the vocabulary has no mass
    inside = torch.where(known, tokens, 0).long()  # [B,N]
    walking = valid
    path, out = [node], []
    for step in range(depth):
        mass = target_probs[rows, node].gather(1, inside).double()  # [B,N]
        mass = mass * ((parents == node[:, None]) & known)  # [B,N] of the node's children
        hit = (mass > 0) & (coins[:, step, None].double() < mass.cumsum(1))  # [B,N]
        walking = walking & hit.any(1)
        if nobody(walking):
            break
        child = hit.to(torch.int8).argmax(1)  # [B]
        node = torch.where(walking, child, node)
        path.append(torch.where(walking, node, -1))
        out.append(torch.where(walking, tokens.gather(1, child[:, None])[:, 0], -1))
    out.append(torch.full_like(node, -1))
    count, nodes, emitted = accepted_fields(path, out, depth)  # emitted still lacks the last token

    whole = target_probs[rows, node].double()  # [B,V] after the last accepted node
    children = (parents == node[:, None]) & valid[:, None] & known  # [B,N]
    spare = whole.shape[1]  # column V takes the tokens of the other nodes
    left_out = torch.zeros(batch, spare + 1, dtype=torch.bool, device=tokens.device)
    left_out.scatter_(1, torch.where(children, tokens.long(), spare), True)
    last = draw_reference(whole.masked_fill(left_out[:, :spare], 0.0), last_uniforms)  # [B]
    last = torch.where(last < 0, draw_reference(whole, last_uniforms), last)  # rounding left the rest empty
    return count, nodes, emitted.scatter(1, count[:, None].long(), last[:, None].to(torch.int32))


@TritonKernel
def _reject_target_only_kernel(
    tokens_ptr, parents_ptr, probs_ptr, coins_ptr, lasts_ptr, valid_ptr, count_ptr, nodes_ptr, emitted_ptr,
    stride_tokens, stride_token, stride_parents, stride_parent, stride_rows, stride_node, stride_entry,
    stride_coins, stride_coin, stride_last, stride_valid, num_nodes, depth, vocabulary,
    HAS_VALID: tl.constexpr, NODES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row; a step reads only its children's probabilities, the vocabulary is read for the last token."""
    row = tl.program_id(0).to(tl.int64)
    tokens_ptr += row * stride_tokens
    parents_ptr += row * stride_parents
    probs_ptr += row * stride_rows
    coins_ptr += row * stride_coins
    nodes_ptr += row * (depth + 1)
    emitted_ptr += row * (depth + 1)
    valid = tl.full((), 1, tl.int32)
    if HAS_VALID:
        valid = (tl.load(valid_ptr + row * stride_valid) != 0).to(tl.int32)
    alive = valid
    node = tl.full((), 0, tl.int32)
    count = tl.full((), 0, tl.int32)
    tl.store(nodes_ptr, node)
    for step in range(0, depth):
        coin = tl.load(coins_ptr + step * stride_coin).to(tl.float64)
        before = tl.full((), 0.0, tl.float64)
        child = num_nodes
        for start in range(0, num_nodes, NODES):
            other = start + tl.arange(0, NODES)
            inside = other < num_nodes
            here = inside & (tl.load(parents_ptr + other * stride_parent, mask=inside, other=-2).to(tl.int32) == node)
            token = tl.load(tokens_ptr + other * stride_token, mask=here, other=0).to(tl.int64)
            place = probs_ptr + node.to(tl.int64) * stride_node + token * stride_entry
            known = here & (token >= 0) & (token < vocabulary)
            mass = tl.load(place, mask=known, other=0.0).to(tl.float64)
            hit = (mass > 0) & (coin < before + tl.cumsum(mass, 0))
            child = tl.minimum(child, tl.min(tl.where(hit, other, num_nodes)))
            before += tl.sum(mass)
        alive = tl.where(child < num_nodes, alive, 0)
        node = tl.where(alive != 0, child, node)
        count += alive
        token = tl.load(tokens_ptr + node * stride_token).to(tl.int32)
        tl.store(nodes_ptr + step + 1, tl.where(alive != 0, node, -1))
        tl.store(emitted_ptr + step, tl.where(alive != 0, token, -1))

    first = num_nodes  # children of the last accepted node: first..last-1, standing together
    last = 0
    for start in range(0, num_nodes, NODES):
        other = start + tl.arange(0, NODES)
        inside = other < num_nodes
        here = inside & (tl.load(parents_ptr + other * stride_parent, mask=inside, other=-2).to(tl.int32) == node)
        here = here & (valid != 0)
        first = tl.minimum(first, tl.min(tl.where(here, other, num_nodes)))
        last = tl.maximum(last, tl.max(tl.where(here, other + 1, 0)))
    probs_ptr += node.to(tl.int64) * stride_node
    uniform = tl.load(lasts_ptr + row * stride_last)
    drawn = draw_token(probs_ptr, stride_entry, vocabulary, uniform, tokens_ptr, stride_token, first, last, BLOCK)
    if drawn < 0:  # rounding left the rest empty: the coin was within it of one
        drawn = draw_token(probs_ptr, stride_entry, vocabulary, uniform, tokens_ptr, stride_token, 0, 0, BLOCK)
    tl.debug_barrier()  # the padding -1 at this place comes first
    tl.store(emitted_ptr + depth, -1, mask=count < depth)
    tl.store(emitted_ptr + count, drawn.to(tl.int32))
    tl.store(count_ptr + row, count)
