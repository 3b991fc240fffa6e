"""Trees from child and sibling links, and the ring of a sliding window."""

import re
from pathlib import Path

import pytest
import torch

from modelopt_eagle.errors import DecodingError
from modelopt_eagle.kernels import (
    build_tree,
    chain_tree,
    history_depth,
    history_size,
    regular_tree,
    relocate_kv,
    tree_from_links,
    verify_greedy,
)

FIELDS = ("tokens", "parents", "depths", "mask", "first_child", "next_sibling")


def random_trees(topk, depth, nodes, batch=4):
    """Trees of random expansions with cumulative scores."""
    history = history_size(topk, depth)
    assert history_depth(history, topk) == depth
    parents = torch.full((batch, topk * (depth - 1) + 1), -1)
    scores = torch.rand(batch, history).log()
    for layer in range(1, depth):
        start = topk + topk * topk * (layer - 1)
        parents[:, 1 + topk * (layer - 1) : 1 + topk * layer] = torch.arange(topk) + (0 if layer == 1 else start - topk)
        bucket = torch.arange(start, start + topk * topk) // topk
        scores[:, start : start + topk * topk] += scores.gather(1, parents[:, bucket])
    tokens = torch.arange(history).expand(batch, -1) % 50
    return build_tree(scores, tokens, parents, nodes, topk, root_tokens=torch.zeros(batch, dtype=torch.int64))


@pytest.mark.parametrize(("topk", "depth", "nodes"), [(1, 6, 7), (2, 3, 6), (3, 4, 30), (4, 5, 60), (9, 2, 70)])
def test_links_alone_make_the_same_tree(topk, depth, nodes):
    tree = random_trees(topk, depth, nodes)
    made = tree_from_links(tree.tokens, tree.first_child.long(), tree.next_sibling.long())
    for name in FIELDS:
        assert torch.equal(getattr(made, name), getattr(tree, name)), name
    predict = torch.randint(50, (4, nodes))
    assert torch.equal(verify_greedy(made, predict).tokens[:, : depth + 1], verify_greedy(tree, predict).tokens)


def test_chains_regular_trees_and_nodes_without_a_link():
    for tree in (chain_tree(torch.arange(9)[None]), regular_tree(40, 3)):
        made = tree_from_links(tree.tokens, tree.first_child, tree.next_sibling, max_depth=8)
        assert all(torch.equal(getattr(made, name), getattr(tree, name)) for name in FIELDS)
    loose = tree_from_links(torch.tensor([[7, 8, 9]]), torch.tensor([[1, -1, -1]]), torch.tensor([[-1, -1, -1]]))
    assert loose.parents.tolist() == [[-1, 0, -1]] and loose.mask[0, :, 0].tolist() == [1, 3, 4]
    with pytest.raises(DecodingError, match="next_sibling"):
        tree_from_links(torch.tensor([[7, 8]]), torch.tensor([[1, -1]]), torch.tensor([[-1]]))


def test_the_ring_holds_the_window_and_the_tree():
    """A window of 7 keys and 6 nodes: a ring of 12 keeps what the next token sees, one of 11 is refused."""
    path, count, length = torch.tensor([[0, 2, 4]]), torch.tensor([2]), torch.tensor([20])
    line = torch.arange(64.0).view(1, 1, 64, 1)
    ring = torch.zeros(1, 1, 12, 1)
    for position in range(26):  # 20 of the prefix and 6 nodes
        ring[0, 0, position % 12] = line[0, 0, position]
    relocate_kv(ring, path, count, length, window=12, attention_window=7, num_nodes=6)
    relocate_kv(line, path, count, length)
    for position in range(23 - 6, 23):  # what a token at position 23 sees, but for itself
        assert ring[0, 0, position % 12] == line[0, 0, position]
    with pytest.raises(DecodingError, match=r"attention_window \+ num_nodes - 1 = 12, found 11"):
        relocate_kv(ring, path, count, length, window=11, attention_window=7, num_nodes=6)


def test_the_pages_worked_example():
    """The block of ``docs/kernels.md`` as it stands there."""
    page = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text(encoding="utf-8")
    names: dict = {}
    exec(re.search(r"## The history.*?```python\n(.*?)```", page, re.S)[1], names)
    assert names["accepted"].tokens.tolist() == [[12, 23, 50, -1]]
