"""The sampling walks are lossless: joint token sequences follow the target, and the known mistakes are caught.

A tree over four tokens and three levels; the target is a random table of next-token distributions for every prefix.
Each walk's tokens are continued by plain draws to three tokens, and the 64 joint outcomes are compared with the
table's own probabilities by a chi-square test over 200,000 rows.
"""

import pytest
import torch

from modelopt_eagle.errors import DecodingError
from modelopt_eagle.kernels import DraftTree, build_tree, reject_target_only, sample_and_match
from modelopt_eagle.kernels.inverse_cdf import draw_reference
from tests.kernels.test_build_tree import worked_example

V, LENGTH, ROWS = 4, 3, 200_000
PARENTS = [-1, 0, 0, 1, 1, 2, 3]
TOKENS = [-1, 2, 0, 1, 3, 0, 2]
TWINS = [-1, 2, 2, 1, 3, 0, 2]  # nodes 1 and 2 are siblings with one token


def target_table() -> list[torch.Tensor]:
    """Next-token distributions after every prefix: [1,V], [V,V], [V*V,V], prefixes numbered in base V."""
    generator = torch.Generator().manual_seed(7)
    return [(torch.randn(V**n, V, generator=generator) * 1.2).softmax(-1) for n in range(LENGTH + 1)]


def small_tree(tokens: list[int], batch: int = ROWS) -> tuple[DraftTree, torch.Tensor]:
    """The tree over PARENTS for ``batch`` rows, and the target's distributions at its nodes [B,N,V]."""
    nodes, table = len(PARENTS), target_table()
    prefix, depths = [0], [0]
    for node in range(1, nodes):
        prefix.append(prefix[PARENTS[node]] * V + tokens[node])
        depths.append(depths[PARENTS[node]] + 1)
    probs = torch.stack([table[d][p] for d, p in zip(depths, prefix, strict=True)])  # [N,V]
    first = [next((c for c in range(nodes) if PARENTS[c] == n), -1) for n in range(nodes)]
    following = [n + 1 if n and n + 1 < nodes and PARENTS[n + 1] == PARENTS[n] else -1 for n in range(nodes)]

    def rows(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32).expand(batch, -1)

    tree = DraftTree(
        rows(tokens), rows(list(range(nodes - 1))), rows(PARENTS), rows(depths),
        torch.zeros(batch, nodes, 1, dtype=torch.int32), rows(first), rows(following), max_depth=LENGTH,
    )  # fmt: skip
    return tree, probs.expand(batch, -1, -1)


def p_value(accepted) -> float:
    """Chi-square p-value of the joint sequences, the walk's tokens continued by plain draws from the table."""
    table, emitted = target_table(), accepted.tokens.long()  # [B,D+1]
    sequence = torch.zeros(len(emitted), dtype=torch.long)  # [B] in base V
    expected = torch.ones(1)
    for place in range(LENGTH):
        fresh = draw_reference(table[place][sequence], torch.rand(len(emitted)))
        token = torch.where(place <= accepted.num_accepted, emitted[:, place], fresh)
        sequence = sequence * V + token
        expected = (expected[:, None] * table[place]).flatten()
    counts = torch.bincount(sequence, minlength=V**LENGTH).double()
    expected = expected.double() * len(emitted)
    assert expected.min() > 5
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((V**LENGTH - 1) / 2).double(), statistic / 2))


def test_sample_and_match_is_lossless():
    tree, probs = small_tree(TOKENS)
    accepted = sample_and_match(tree, probs, torch.rand(ROWS, LENGTH + 1))
    assert p_value(accepted) > 1e-3
    assert accepted.num_accepted.bincount(minlength=4).min() > 100  # paths of every length were walked


def test_reject_target_only_is_lossless():
    tree, probs = small_tree(TOKENS)
    accepted = reject_target_only(tree, probs, torch.rand(ROWS, LENGTH), torch.rand(ROWS))
    assert p_value(accepted) > 1e-3
    assert accepted.num_accepted.bincount(minlength=4).min() > 100


def test_both_rules_accept_the_mass_of_the_children():
    """The largest acceptance that a lossless rule reaches at the root is the children's mass."""
    tree, probs = small_tree(TOKENS)
    mass = float(probs[0, 0, 2] + probs[0, 0, 0])
    drawn = sample_and_match(tree, probs, torch.rand(ROWS, LENGTH + 1)).num_accepted
    coined = reject_target_only(tree, probs, torch.rand(ROWS, LENGTH), torch.rand(ROWS)).num_accepted
    for accepted in (drawn, coined):
        assert float((accepted > 0).double().mean()) == pytest.approx(mass, abs=0.005)


def test_control_a_reused_coin_is_found_out():
    tree, probs = small_tree(TOKENS)
    same = torch.rand(ROWS, 1)
    assert p_value(sample_and_match(tree, probs, same.expand(-1, LENGTH + 1))) < 1e-6
    assert p_value(reject_target_only(tree, probs, torch.rand(ROWS, LENGTH), same[:, 0])) > 1e-3
    assert p_value(reject_target_only(tree, probs, same.expand(-1, LENGTH), same[:, 0])) < 1e-6


def test_control_duplicate_siblings_are_found_out():
    tree, probs = small_tree(TWINS)
    assert p_value(reject_target_only(tree, probs, torch.rand(ROWS, LENGTH), torch.rand(ROWS))) < 1e-6


def test_debug_refuses_duplicate_siblings_and_bad_values():
    tree, probs = small_tree(TWINS, batch=2)
    coins, lasts = torch.rand(2, LENGTH), torch.rand(2)
    with pytest.raises(DecodingError, match="draft tree 0: node 2 repeats the token of a sibling"):
        reject_target_only(tree, probs, coins, lasts, debug=True)
    with pytest.raises(DecodingError, match="repeats the token of a sibling"):
        sample_and_match(tree, probs, torch.rand(2, LENGTH + 1), debug=True)
    tree, probs = small_tree(TOKENS, batch=2)
    with pytest.raises(DecodingError, match="must sum to 1"):
        reject_target_only(tree, probs * 1.1, coins, lasts, debug=True)
    with pytest.raises(DecodingError, match=r"coins must lie in \[0, 1\)"):
        reject_target_only(tree, probs, coins + 1, lasts, debug=True)


def test_draws_at_the_edges():
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]])

    def draw(u: float) -> int:
        return int(draw_reference(probs, torch.tensor([u], dtype=torch.float64)))

    assert [draw(0.0), draw(0.2499), draw(0.25), draw(1 - 1e-12)] == [1, 1, 3, 3]
    assert int(draw_reference(torch.zeros(1, 5), torch.tensor([0.5]))) == -1
    assert int(draw_reference(probs * 8, torch.tensor([0.2]))) == 1  # rows need no normalisation


def test_an_invalid_tree_draws_from_the_root():
    tree, probs = small_tree(TOKENS, batch=2)
    valid = torch.tensor([True, False])
    uniforms = torch.zeros(2, LENGTH + 1) + 0.5
    accepted = sample_and_match(tree, probs, uniforms, valid)
    assert accepted.nodes[1].tolist() == [0, -1, -1, -1]
    assert accepted.tokens[1, 0] == draw_reference(probs[1:, 0], uniforms[1:, 0])[0]
    coined = reject_target_only(tree, probs, torch.zeros(2, LENGTH), uniforms[:, 0], valid)
    assert coined.num_accepted[0] > 0
    assert coined.nodes[1].tolist() == [0, -1, -1, -1]
    assert coined.tokens[1].tolist() == [int(accepted.tokens[1, 0]), -1, -1, -1]


def test_the_coin_is_strict_and_siblings_cumulate():
    tree, probs = small_tree(TOKENS, batch=3)
    probs = torch.tensor([0.25, 0.25, 0.5, 0.0]).expand(3, len(PARENTS), V)  # root's children: 2 (.5), 0 (.25)
    coins = torch.tensor([[0.4999], [0.5], [0.75]]).expand(3, LENGTH)
    nodes = reject_target_only(tree, probs, coins, torch.zeros(3)).nodes
    assert nodes[:, 1].tolist() == [1, 2, -1]
    assert reject_target_only(tree, probs, coins, torch.zeros(3)).tokens[2, 0] == 1  # all that the children left


def test_bad_shapes_are_refused():
    tree = build_tree(*worked_example(), 6, 2)
    probs = torch.full((1, 6, 40), 1 / 40)
    with pytest.raises(DecodingError, match=r"uniforms must have shape \[1, 4\], found \[1, 3\]"):
        sample_and_match(tree, probs, torch.rand(1, 3))
    with pytest.raises(DecodingError, match=r"coins must have shape \[1, 3\], found \[1, 4\]"):
        reject_target_only(tree, probs, torch.rand(1, 4), torch.rand(1))
    with pytest.raises(DecodingError, match=r"target_probs must have shape \[1, 6, any\]"):
        sample_and_match(tree, probs[:, :5], torch.rand(1, 4))
