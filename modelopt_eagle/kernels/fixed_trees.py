"""Trees whose shape does not depend on scores: a chain, chains below one root, a regular tree; and trees from links."""

from __future__ import annotations

import torch
from torch import Tensor

from modelopt_eagle.kernels.build_tree import DraftTree
from modelopt_eagle.kernels.dispatch import require_integers
from modelopt_eagle.kernels.pack_mask import pack_mask


def chain_tree(tokens: Tensor) -> DraftTree:
    """A chain ``[B, N]`` (the root first) as a :class:`~modelopt_eagle.kernels.DraftTree`."""
    batch, count = tokens.shape
    node = torch.arange(count, dtype=torch.int32, device=tokens.device)  # [N]
    words = torch.arange(-(-count // 32), device=tokens.device) * 32  # [W] first node of each mask word
    bits = (node[:, None].long() + 1 - words).clamp(0, 32)  # [N,W] nodes of the word that are seen
    packed = ((1 << bits) - 1).to(torch.uint32).view(torch.int32)  # [N,W]
    after = torch.where(node + 1 < count, node + 1, -1)  # [N]

    def rows(column: Tensor) -> Tensor:
        return column.expand(batch, *column.shape)

    return DraftTree(
        tokens=tokens.to(torch.int32),
        flat_ids=rows(node[:-1]),
        parents=rows(node - 1),
        depths=rows(node),
        mask=rows(packed),
        first_child=rows(after),
        next_sibling=rows(torch.full_like(node, -1)),
        max_depth=count - 1,
    )


def branches_tree(tokens: Tensor, branching: int) -> DraftTree:
    """T chains below a root, ``tokens [B, 1 + T·D]`` layer by layer: the parent of node n is n - T, or the root."""
    batch, count = tokens.shape
    node = torch.arange(count, dtype=torch.int32, device=tokens.device)  # [N]
    depth = (node + branching - 1) // branching  # [N]
    same = (node[:, None] - node) % branching == 0  # [N,N] of one chain
    sees = same & (node <= node[:, None]) & (node > 0)
    sees[:, 0] = True
    parents = torch.where(node > branching, node - branching, 0)
    parents[0] = -1
    first = torch.where(node + branching < count, node + branching, -1)
    first[0] = 1
    following = torch.where((node >= 1) & (node < branching), node + 1, -1)

    def rows(column: Tensor) -> Tensor:
        return column.to(torch.int32).expand(batch, *column.shape)

    return DraftTree(
        tokens=tokens.to(torch.int32),
        flat_ids=rows(node[:-1]),
        parents=rows(parents),
        depths=rows(depth),
        mask=pack_mask(sees[None]).expand(batch, -1, -1),
        first_child=rows(first),
        next_sibling=rows(following),
        max_depth=int((count - 1) // branching),
    )


def regular_tree(num_nodes: int, topk: int, device: torch.device | str = "cpu") -> DraftTree:
    """One T-ary tree of N nodes, the parent of n being ``(n-1) // T``; tokens 0 to T-1 below every node."""
    parent = [-1, *((node - 1) // topk for node in range(1, num_nodes))]
    depth, sees = [0] * num_nodes, torch.zeros(1, num_nodes, num_nodes, dtype=torch.bool)
    first, following = [-1] * num_nodes, [-1] * num_nodes
    for node in range(num_nodes):
        above = parent[node]
        if above >= 0:
            depth[node] = depth[above] + 1
            sees[0, node] = sees[0, above]
            if first[above] < 0:
                first[above] = node
            elif parent[node - 1] == above:
                following[node - 1] = node
        sees[0, node, node] = True

    def row(values: list[int]) -> Tensor:
        return torch.tensor([values], dtype=torch.int32, device=device)

    return DraftTree(
        tokens=row([-1, *((node - 1) % topk for node in range(1, num_nodes))]),
        flat_ids=row(list(range(num_nodes - 1))),
        parents=row(parent),
        depths=row(depth),
        mask=pack_mask(sees.to(device)),
        first_child=row(first),
        next_sibling=row(following),
        max_depth=max(depth),
    )


def tree_from_links(
    tokens: Tensor, first_child: Tensor, next_sibling: Tensor, max_depth: int | None = None
) -> DraftTree:
    """A tree of an engine that keeps child and sibling links only, for the walks and for its mask.

    Nodes come after their parents. A node that no link leads to has parent -1, sees itself alone and is never walked
    to. Nothing is read back, so the call can stand in a graph if ``max_depth`` is given.

    Args:
        tokens: ``[B, N]`` int32 or int64.
        first_child, next_sibling: ``[B, N]`` int32 or int64, -1: none.
        max_depth: D; ``None``: read from the tree when it is needed.

    Raises:
        DecodingError: shapes or dtypes that do not fit.
    """
    require_integers("tokens", tokens, None, None)
    batch, count = tokens.shape
    for name, links in (("first_child", first_child), ("next_sibling", next_sibling)):
        require_integers(name, links, batch, count)
    node = torch.arange(count, device=tokens.device).expand(batch, -1)  # [B,N]

    def who_points(links: Tensor) -> Tensor:
        """``[B, N]`` the node whose link leads here, -1: none."""
        place = torch.where(links >= 0, links, count).long()  # [B,N]; the last column takes what leads nowhere
        found = torch.full((batch, count + 1), -1, device=tokens.device, dtype=torch.int64)
        return found.scatter_(1, place, node)[:, :count]

    before = who_points(next_sibling)  # [B,N] the sibling before
    head = torch.where(before >= 0, before, node)  # [B,N] jumps towards the first of the siblings
    for _ in range(max(1, count - 1).bit_length()):
        head = head.gather(1, head)
    parents = who_points(first_child).gather(1, head)  # [B,N]
    sees = torch.eye(count, dtype=torch.bool, device=tokens.device).expand(batch, -1, -1)  # [B,N,N]
    above = torch.where(parents >= 0, parents, node)
    for _ in range(max(1, count - 1).bit_length()):  # ancestors at distance up to 1, 2, 4 …
        sees = sees | sees.gather(1, above[..., None].expand(-1, -1, count))
        above = above.gather(1, above)
    depths = sees.sum(-1) - 1  # [B,N]

    def column(values: Tensor) -> Tensor:
        return values.to(torch.int32)

    return DraftTree(
        tokens=column(tokens),
        flat_ids=column(node[:, :-1]),
        parents=column(parents),
        depths=column(depths),
        mask=pack_mask(sees),
        first_child=column(first_child),
        next_sibling=column(next_sibling),
        max_depth=max_depth,
    )
