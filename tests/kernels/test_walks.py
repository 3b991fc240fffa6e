"""The sampling walks on random trees against the walk over links, one row and one token at a time in plain Python.

Probabilities are 64ths, so that every sum is exact and results must be equal, not close.
"""

import torch

from modelopt_eagle.kernels import reject_target_only, sample_and_match
from modelopt_eagle.kernels.parity import Cases
from tests.kernels import oracle

LINKS = ("tokens", "first_child", "next_sibling")


def compare_row(accepted, row: int, expected) -> int:
    """Check one row of an Accepted; returns what it accepted."""
    count, path, tokens = expected
    assert int(accepted.num_accepted[row]) == count
    assert accepted.nodes[row].tolist() == path
    assert accepted.tokens[row].tolist() == tokens
    return count


def test_random_trees_against_the_walk_over_links():
    rows, longest = 0, 0
    for seed in range(360):
        cases = Cases(seed, "cpu")
        tree = cases.tree(vocabulary=cases.choose.choice([3, 9]))
        batch, nodes = tree.tokens.shape
        probs = cases.probabilities(batch, nodes)
        short = int(tree.tokens.max()) + 1 - probs.shape[2]
        probs = torch.nn.functional.pad(probs, (0, max(0, short)))  # the oracle has no tokens beyond the vocabulary
        valid = cases.valid(batch)
        uniforms, lasts = cases.uniform(batch, tree.max_depth + 1).double(), cases.uniform(batch).double()
        coins = uniforms[:, :-1]
        drawn = sample_and_match(tree, cases.place(probs), cases.place(uniforms), valid, backend="reference")
        tossed = reject_target_only(
            tree, cases.place(probs), cases.place(coins), cases.place(lasts), valid, backend="reference"
        )
        for row in range(batch):
            links = {name: getattr(tree, name)[row].tolist() for name in LINKS}
            ok = valid is None or bool(valid[row])
            table = probs[row].tolist()
            expected = oracle.sample(links, table, uniforms[row].tolist(), tree.max_depth, ok)
            longest = max(longest, compare_row(drawn, row, expected))
            expected = oracle.toss(links, table, coins[row].tolist(), float(lasts[row]), tree.max_depth, ok)
            longest = max(longest, compare_row(tossed, row, expected))
            rows += 1
    assert rows > 1000 and longest >= 3
