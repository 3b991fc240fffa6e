"""Checks shared by the recipe's sections."""

from __future__ import annotations


def need(condition: object, message: str) -> None:
    """Raise ``ValueError(message)`` unless the condition holds (pydantic turns it into a validation error)."""
    if not condition:
        raise ValueError(message)


def tree_node_bounds(topk: int, depth: int) -> tuple[int, int]:
    """The fewest and the most nodes, root included, of a tree with branching factor T and depth D.

    At least one node a layer beside the root, ``D+1``; at most the whole history, ``1 + T + T²(D-1)``.
    """
    return depth + 1, 1 + topk + topk * topk * (depth - 1)


def default_tree_nodes(topk: int, depth: int) -> int:
    """T·D drafted nodes and the root, or the largest tree where that is less (T = 1 is the chain)."""
    return min(topk * depth + 1, tree_node_bounds(topk, depth)[1])


def check_tree_shape(mode: str, topk: int | None, depth: int | None, num_nodes: int | None) -> None:
    """Refuse a tree that cannot be drafted, and tree options without a tree.

    Args:
        mode: ``"chain"`` or ``"tree"``.
        topk: branching factor T.
        depth: depth D, known in mode tree.
        num_nodes: nodes N with the root, or None for the default.

    Raises:
        ValueError: what was expected and what was found.
    """
    if mode == "chain":
        given = {"topk": topk, "depth": depth, "num_nodes": num_nodes}
        extra = [f"{name}: {value}" for name, value in given.items() if value is not None]
        need(not extra, f"{', '.join(extra)} shapes a tree, but mode is chain: set mode: tree, or remove it")
        return
    if topk is None or topk < 1:
        raise ValueError(f"mode: tree needs topk > 0, found {topk}: set topk, or mode: chain")
    if depth is None:
        raise ValueError("mode: tree needs a depth: set depth, or mode: chain")
    low, high = tree_node_bounds(topk, depth)
    need(
        num_nodes is None or low <= num_nodes <= high,
        f"num_nodes must lie in [{low}, {high}] (D+1 to 1+T+T²(D-1), root included) for topk {topk} and depth {depth}, "
        f"found {num_nodes}",
    )
