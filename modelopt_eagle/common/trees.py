"""Sizes of a draft tree that grows by T branches a node and keeps T survivors a layer (EAGLE-2's expansion).

The first layer has T candidates; each of the D−1 layers below scores T children of each of T survivors. Candidates are
numbered layer by layer, so the sizes are their flat ids too.
"""

from __future__ import annotations


def history_size(topk: int, depth: int) -> int:
    """Candidates that a tree of branching T and depth D scores, ``H = T + T²(D−1)``.

    It is also the flat id of the first candidate of layer D (layers counted from 0).
    """
    return topk + topk * topk * (depth - 1)


def tree_node_bounds(topk: int, depth: int) -> tuple[int, int]:
    """The fewest and the most nodes N, root included: one a layer beside the root, ``D+1``, to the whole, ``1+H``."""
    return depth + 1, 1 + history_size(topk, depth)


def default_tree_nodes(topk: int, depth: int) -> int:
    """T·D drafted nodes and the root, or the largest tree where that is less (T = 1 is the chain)."""
    return min(topk * depth + 1, tree_node_bounds(topk, depth)[1])
