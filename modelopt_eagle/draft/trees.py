"""Draft trees as the target reads them: nodes, who sees whom, depths; and the chain as a tree of branching 1."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from modelopt_eagle.draft.plan import DraftPlan
from modelopt_eagle.kernels import DraftTree, branches_tree, build_tree, chain_tree, unpack_mask
from modelopt_eagle.kernels.topk import stable_topk

__all__ = ["RoundTree", "SampledDraft", "TreeHistory", "branches_tree", "build_round_tree", "chain_tree"]


@dataclass(frozen=True)
class TreeHistory:
    """Every candidate that a tree expansion scored, in flat order (``trees.md``); what ``build_tree`` takes.

    ``scores [B, H]`` float32 cumulative log-probabilities, ``tokens [B, H]`` int64 target ids,
    ``parent_list [B, max(1, T(D-1)+1)]`` int64.
    """

    scores: Tensor
    tokens: Tensor
    parent_list: Tensor


@dataclass(frozen=True)
class RoundTree:
    """A drafted tree with its root filled in, and its mask unpacked: ``sees [B, N, N]`` bool."""

    tree: DraftTree
    sees: Tensor


@dataclass(frozen=True)
class SampledDraft:
    """A draft whose tokens were drawn, and what they were drawn from.

    Attributes:
        tree: a chain, or ``branching`` chains below the root; the root's children are in the order of their drawing.
        probabilities: ``[B, n, Vd]`` the distribution of the children of nodes 0 … n-1; the root's are drawn without
            replacement.
        target_ids: ``[Vd]`` int64 target id of each draft token.
        branching: children of the root.
    """

    tree: RoundTree
    probabilities: Tensor
    target_ids: Tensor
    branching: int


def build_round_tree(history: TreeHistory, plan: DraftPlan, roots: Tensor) -> RoundTree:
    """Keep the best N-1 candidates of a history below the roots ``[B]`` (the last emitted tokens).

    Returns:
        the tree with its mask unpacked.
    """
    tree = build_tree(
        history.scores, history.tokens, history.parent_list, plan.num_nodes, plan.branching, root_tokens=roots
    )
    return RoundTree(tree, unpack_mask(tree.mask, plan.num_nodes))


def history_of_marginals(logits: Tensor, target_ids: Tensor, plan: DraftPlan) -> TreeHistory:
    """The history of a head whose K distributions do not read the tokens drafted before.

    Every survivor of a layer has the same T children; the score of a node is the sum of the log-probabilities on its
    path. Branching 1 is the chain of the K likeliest tokens.

    Args:
        logits: ``[B, K, Vd]`` of the K depths.
        target_ids: ``[Vd]`` target id of each draft id.
        plan: T and D, with D at most K.
    """
    topk = plan.branching if plan.is_tree else 1
    logits = logits.float()
    value, index = stable_topk(logits, topk) if topk > 1 else logits.max(-1, keepdim=True)  # [B,K,T]
    value = (value - logits.logsumexp(-1, keepdim=True)).clamp(max=0)  # a child never scores above its parent
    token, batch = target_ids[index], len(logits)  # [B,K,T]
    scores, tokens = [value[:, 0]], [token[:, 0]]  # [B,T], then [B,T*T] a layer
    parents = [torch.full((batch, 1), -1, device=logits.device)]
    flat = torch.arange(topk, device=logits.device).expand(batch, -1)  # [B,T] flat ids of the survivors
    best = scores[0]  # [B,T]
    for layer in range(1, plan.depth):
        parents.append(flat)
        grown = (best[..., None] + value[:, layer, None]).flatten(1)  # [B,T*T]
        scores.append(grown)
        tokens.append(token[:, layer, None].expand(-1, topk, -1).flatten(1))
        best, order = stable_topk(grown, topk)  # [B,T] ties by flat id
        flat = topk + topk * topk * (layer - 1) + order
    return TreeHistory(torch.cat(scores, 1), torch.cat(tokens, 1), torch.cat(parents, 1))
