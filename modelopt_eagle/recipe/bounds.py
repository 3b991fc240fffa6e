"""Checks shared by the recipe's sections."""

from __future__ import annotations

from modelopt_eagle.common.trees import tree_node_bounds


def need(condition: object, message: str) -> None:
    """Raise ``ValueError(message)`` unless the condition holds (pydantic turns it into a validation error)."""
    if not condition:
        raise ValueError(message)


def check_tree_shape(mode: str, topk: int | None, depth: int | None, num_nodes: int | None) -> None:
    """Refuse a tree that cannot be drafted, and tree options without a tree.

    Args:
        mode: ``"chain"``, ``"tree"`` or ``"none"``.
        topk: branching factor T.
        depth: depth D, known in mode tree.
        num_nodes: nodes N with the root, or None for the default.

    Raises:
        ValueError: what was expected and what was found.
    """
    if mode != "tree":
        given = {"topk": topk, "depth": depth, "num_nodes": num_nodes}
        extra = [f"{name}: {value}" for name, value in given.items() if value is not None]
        need(not extra, f"{', '.join(extra)} shapes a tree, but mode is {mode}: set mode: tree, or remove it")
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
