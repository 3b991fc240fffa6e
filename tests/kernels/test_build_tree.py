"""``build_tree`` and ``select_nodes``: the worked example, an oracle over thousands of trees, and refused input."""

import pytest
import torch

from modelopt_eagle.errors import DecodingError
from modelopt_eagle.kernels import build_tree, select_nodes, unpack_mask
from modelopt_eagle.kernels.parity import Cases
from tests.kernels import oracle

FIELDS = ("tokens", "flat_ids", "parents", "depths", "first_child", "next_sibling")


def worked_example():
    """Scores, tokens and parent list of the documented example: T=2, D=3, N=6."""
    probabilities = [0.6, 0.3, 0.42, 0.12, 0.27, 0.015, 0.21, 0.168, 0.216, 0.027]
    tokens = [11, 12, 21, 22, 23, 24, 31, 32, 33, 34]
    return torch.tensor([probabilities]).log(), torch.tensor([tokens]), torch.tensor([[-1, 0, 1, 2, 4]])


def assert_equals_oracle(history, num_nodes, topk, roots=None):
    """Build with the reference and compare every row with the oracle."""
    scores, tokens, parent_list = history
    tree = build_tree(*history, num_nodes, topk, root_tokens=roots, debug=True, backend="reference")
    attends = unpack_mask(tree.mask, backend="reference")
    for row in range(scores.shape[0]):
        root = -1 if roots is None else int(roots[row])
        expected = oracle.tree(
            scores[row].tolist(), tokens[row].tolist(), parent_list[row].tolist(), num_nodes, topk, root
        )
        for field in FIELDS:
            found = getattr(tree, field)
            assert found.dtype == torch.int32
            assert found[row].tolist() == expected[field], field
        assert attends[row].tolist() == expected["attends"]


def test_worked_example():
    tree = build_tree(*worked_example(), 6, 2)
    assert tree.flat_ids.tolist() == [[0, 1, 2, 4, 8]]
    assert tree.tokens.tolist() == [[-1, 11, 12, 21, 23, 33]]
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 2, 4]]
    assert tree.depths.tolist() == [[0, 1, 1, 2, 2, 3]]
    assert tree.first_child.tolist() == [[1, 3, 4, -1, 5, -1]]
    assert tree.next_sibling.tolist() == [[-1, 2, -1, -1, -1, -1]]
    assert tree.mask.tolist() == [[[1], [3], [5], [11], [21], [53]]]
    assert tree.max_depth == 3


def test_thousands_of_small_trees():
    rows = 0
    for seed in range(450):
        cases = Cases(seed, "cpu")
        topk, depth = cases.choose.choice([1, 2, 3, 4]), cases.choose.choice([1, 2, 3, 4])
        history = cases.history(7, topk, depth)
        nodes = cases.choose.randint(depth + 1, 1 + history[0].shape[1])
        roots = cases.integers(0, 99, 7) if seed % 2 else None
        assert_equals_oracle([cases.place(part) for part in history], nodes, topk, roots)
        rows += 7
    assert rows > 3000


@pytest.mark.parametrize("num_nodes", [12, 32, 33, 64, 65, 130, 1024, 1025])
def test_large_trees(num_nodes):
    assert_equals_oracle(Cases(num_nodes, "cpu").history(3, 11, 10), num_nodes, 11)


@pytest.mark.parametrize(("topk", "depth"), [(1, 1), (1, 6), (9, 1), (40, 2)])
def test_degenerate_shapes(topk, depth):
    """A single child, a chain, a star, and more siblings than a mask word has bits; every legal N."""
    history = Cases(0, "cpu").history(3, topk, depth)
    for num_nodes in {depth + 1, depth + 2, 1 + history[0].shape[1]}:
        if num_nodes <= 1 + history[0].shape[1]:
            assert_equals_oracle(history, num_nodes, topk)


def test_a_chain_is_linear():
    tree = build_tree(*Cases(0, "cpu").history(2, 1, 5), 6, 1)
    assert tree.parents.tolist() == [[-1, 0, 1, 2, 3, 4]] * 2
    assert tree.depths.tolist() == [[0, 1, 2, 3, 4, 5]] * 2


def test_ties_go_to_the_smaller_id():
    """Certain children have their parents' score: with any other tie rule a child is kept without its parent."""
    scores = torch.zeros(1, 2 + 4 * 2)
    assert select_nodes(scores, 3).tolist() == [[0, 1, 2]]
    build_tree(scores, torch.arange(10)[None], torch.tensor([[-1, 0, 1, 2, 3]]), 4, 2, debug=True)


def test_nan_ranks_behind_minus_infinity_and_zero_has_no_sign():
    nan, low = float("nan"), float("-inf")
    scores = torch.tensor([[nan, low, -1.0, nan, -0.0, 0.0]])
    ranking = [select_nodes(scores, count).tolist()[0] for count in range(1, 7)]
    assert ranking == [[4], [4, 5], [2, 4, 5], [1, 2, 4, 5], [0, 1, 2, 4, 5], [0, 1, 2, 3, 4, 5]]


def test_same_result_for_every_layout_and_integer():
    scores, tokens, parent_list = Cases(3, "cpu").history(3, 3, 3)
    plain = build_tree(scores, tokens.int(), parent_list.int(), 12, 3)
    other = build_tree(scores.t().contiguous().t(), tokens.long(), parent_list.long().t().contiguous().t(), 12, 3)
    for field in (*FIELDS, "mask"):
        assert torch.equal(getattr(plain, field), getattr(other, field))


def test_empty_batch():
    scores, tokens, parent_list = worked_example()
    tree = build_tree(scores[:0], tokens[:0], parent_list[:0], 6, 2)
    assert tree.tokens.shape == (0, 6)
    assert tree.mask.shape == (0, 6, 1)


def test_a_child_above_its_parent_is_unreachable_and_found_by_debug():
    scores, tokens, parent_list = worked_example()
    scores[0, 8] = 1.0  # child of flat id 4, which itself is not among the best three
    tree = build_tree(scores, tokens, parent_list, 4, 2)
    assert tree.flat_ids.tolist() == [[0, 2, 8]]
    assert tree.parents.tolist() == [[-1, 0, 1, -1]]
    assert unpack_mask(tree.mask)[0, 3].tolist() == [False, False, False, True]
    with pytest.raises(DecodingError, match="node 3 has no parent before it"):
        build_tree(scores, tokens, parent_list, 4, 2, debug=True)


@pytest.mark.parametrize("num_nodes", [3, 12, 0, -1])
def test_the_bounds_of_num_nodes_are_in_the_message(num_nodes):
    with pytest.raises(DecodingError, match=r"\[4, 11\].*found " + str(num_nodes)):
        build_tree(*worked_example(), num_nodes, 2)


def test_bad_shapes_are_refused():
    scores, tokens, parent_list = worked_example()
    for arguments, message in [
        ((scores[:, :9], tokens[:, :9], parent_list, 6, 2), r"\(2, 6, ...\), found 9"),
        ((scores, tokens[:, :9], parent_list, 6, 2), r"tokens must have shape \[1, 10\]"),
        ((scores, tokens.float(), parent_list, 6, 2), "tokens must be int32 or int64"),
        ((scores, tokens, parent_list[:, :4], 6, 2), r"at least T\*\(D-1\)\+1 = 5"),
        ((scores.long(), tokens, parent_list, 6, 2), "scores must be floating point"),
        ((scores[0], tokens, parent_list, 6, 2), r"scores must have shape \[B, H\]"),
        ((scores, tokens, parent_list, 6, 0), "topk must be at least 1"),
    ]:
        with pytest.raises(DecodingError, match=message):
            build_tree(*arguments)
    with pytest.raises(DecodingError, match=r"root_tokens must have shape \[1\]"):
        build_tree(scores, tokens, parent_list, 6, 2, root_tokens=torch.tensor([1, 2]))
    with pytest.raises(DecodingError, match=r"\[1, H=10\], found 11"):
        select_nodes(scores, 11)
