"""``verify_greedy``: the worked example, an oracle over random trees, and what a better tree must not lose."""

import pytest
import torch

from modelopt_eagle.errors import DecodingError
from modelopt_eagle.kernels import DraftTree, build_tree, verify_greedy
from modelopt_eagle.kernels.parity import Cases
from tests.kernels import oracle
from tests.kernels.test_build_tree import worked_example

PREDICT = torch.tensor([[12, 70, 23, 71, 50, 72]])


def test_worked_example():
    tree = build_tree(*worked_example(), 6, 2)
    accepted = verify_greedy(tree, PREDICT)
    assert accepted.num_accepted.tolist() == [2]
    assert accepted.nodes.tolist() == [[0, 2, 4, -1]]
    assert accepted.tokens.tolist() == [[12, 23, 50, -1]]
    assert {field.dtype for field in vars(accepted).values()} == {torch.int32}


def test_an_invalid_tree_emits_the_roots_prediction():
    tree = build_tree(*worked_example(), 6, 2)
    accepted = verify_greedy(tree, PREDICT, torch.tensor([False]))
    assert accepted.num_accepted.tolist() == [0]
    assert accepted.nodes.tolist() == [[0, -1, -1, -1]]
    assert accepted.tokens.tolist() == [[12, -1, -1, -1]]


def test_random_trees_against_the_walk_over_links():
    longest, rows = 0, 0
    for seed in range(400):
        cases = Cases(seed, "cpu")
        tree = cases.tree(vocabulary=cases.choose.choice([4, 7]))
        batch, nodes = tree.tokens.shape
        predict = cases.place(cases.integers(0, 8, batch, nodes))
        accepted = verify_greedy(tree, predict, backend="reference")
        for row in range(batch):
            fields = {name: getattr(tree, name)[row].tolist() for name in ("tokens", "first_child", "next_sibling")}
            count, path, out = oracle.walk(fields, predict[row].tolist(), tree.max_depth)
            assert int(accepted.num_accepted[row]) == count
            assert accepted.nodes[row].tolist() == path
            assert accepted.tokens[row].tolist() == out
            longest = max(longest, count)
            rows += 1
    assert longest >= 3 and rows > 1000


def test_more_candidates_never_accept_less():
    """Trees that grow by one node at a time over the same history."""
    scores, tokens, parent_list = Cases(5, "cpu").history(64, 3, 4)
    tokens = tokens % 5
    table = torch.randint(0, 5, (64, 5))  # the target's next token after each token
    before = torch.zeros(64)
    for nodes in range(5, 31):
        tree = build_tree(scores, tokens, parent_list, nodes, 3, root_tokens=torch.zeros(64, dtype=torch.int32))
        predict = table.gather(1, tree.tokens.long())
        accepted = verify_greedy(tree, predict).num_accepted
        assert (accepted >= before).all()
        before = accepted
    assert before.float().mean() > 0.5


def test_depth_is_read_from_the_tree_when_it_is_not_given():
    tree = build_tree(*worked_example(), 6, 2)
    bare = DraftTree(**{**vars(tree), "max_depth": None})
    assert torch.equal(verify_greedy(bare, PREDICT).nodes, verify_greedy(tree, PREDICT).nodes)


def test_bad_input_is_refused():
    tree = build_tree(*worked_example(), 6, 2)
    with pytest.raises(DecodingError, match=r"target_predict must have shape \[1, 6\], found \[1, 5\]"):
        verify_greedy(tree, PREDICT[:, :5])
    with pytest.raises(DecodingError, match="target_predict must be int32 or int64"):
        verify_greedy(tree, PREDICT.float())
    with pytest.raises(DecodingError, match="tree_valid must be bool"):
        verify_greedy(tree, PREDICT, torch.tensor([1]))
