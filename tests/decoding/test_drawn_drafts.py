"""Drafts that are drawn, logits processors, and shaping of visited nodes only: the law stays the target's (χ²)."""

import itertools
import math

import pytest
import torch
from test_sampling import DRAWS, LENGTH, PROMPT, VOCAB, deviation, joint, logits, small  # noqa: F401 (fixtures)
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from modelopt_eagle.decoding import PlainGenerator, PseudoSpeculativeGenerator, SamplingOptions, walk
from modelopt_eagle.decoding.requests import Request
from modelopt_eagle.decoding.sampling import shape_probabilities
from modelopt_eagle.draft.eagle3 import drawn
from modelopt_eagle.draft.trees import RoundTree, SampledDraft, branches_tree, chain_tree
from modelopt_eagle.errors import DecodingError
from modelopt_eagle.kernels import unpack_mask

SHAPES = {
    "chain": dict(num_steps=3),
    "tree": dict(mode="tree", topk=2, depth=2),
    "wide": dict(mode="tree", topk=4, depth=1),
}
OPTIONS = {
    "plain": dict(temperature=1.0),
    "hot": dict(temperature=1.7, top_k=3),
    "nucleus": dict(temperature=0.8, top_p=0.9),
    "narrow": dict(temperature=1.2, min_p=0.4, top_k=2),
}


def draw(pair, options, **shape):
    """Counts [V^LENGTH] of sampled sequences, and the acceptance length."""
    target, head = pair
    generator = PseudoSpeculativeGenerator(target, head, **shape)
    counts = torch.zeros(VOCAB**LENGTH, dtype=torch.float64)
    output = generator.generate([PROMPT] * DRAWS, LENGTH, seed=0, **options)
    for tokens in output.tokens:
        counts[sum(token * VOCAB ** (LENGTH - 1 - place) for place, token in enumerate(tokens))] += 1
    return counts, output.acceptance_length


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", OPTIONS)
def test_drawn_drafts_keep_the_targets_law(small, logits, shape, name):  # noqa: F811
    counts, length = draw(small, OPTIONS[name], sample_drafts=True, **SHAPES[shape])
    assert length > 1.1
    assert deviation(counts, joint(logits, SamplingOptions(**OPTIONS[name]))) < 3.7


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_control_another_law_than_the_one_drawn_from_fails(small, logits, shape, monkeypatch):  # noqa: F811
    right = drawn.SampledDraft

    def flat(tree, law, *rest):
        return right(tree, torch.full_like(law, 1 / VOCAB), *rest)

    monkeypatch.setattr(drawn, "SampledDraft", flat)
    counts, _ = draw(small, OPTIONS["plain"], sample_drafts=True, **SHAPES[shape])
    assert deviation(counts, joint(logits, SamplingOptions(**OPTIONS["plain"]))) > 6


@pytest.mark.parametrize("shape", SHAPES)
def test_control_a_rejection_that_leaves_all_fails(small, logits, shape, monkeypatch):  # noqa: F811
    """The token after a rejection drawn from the target's whole distribution."""
    monkeypatch.setattr(walk, "left_over", lambda p, q: p)
    counts, _ = draw(small, OPTIONS["plain"], sample_drafts=True, **SHAPES[shape])
    assert deviation(counts, joint(logits, SamplingOptions(**OPTIONS["plain"]))) > 6


@pytest.mark.parametrize("share", [0.0, 0.25])
def test_a_head_with_fewer_likely_tokens_than_children_leaves_the_law(share):
    """The second child of a root whose filtered distribution holds one token was drawn from nothing."""
    count, law = 4000, torch.tensor([0.4, 0.3 - share, 0.3, share])
    certain = torch.tensor([0.0, 0.0, 0.0, 1.0])  # the head's: its second child is the stand-in, token 0
    tree = branches_tree(torch.tensor([[1, 3, 0]]).expand(count, -1), 2)
    draft = SampledDraft(
        RoundTree(tree, unpack_mask(tree.mask, 3)), certain.expand(count, 1, 4), torch.arange(4), branching=2
    )
    streams = [torch.Generator().manual_seed(seed) for seed in range(count)]
    requests = [Request(i, [1], 5, SamplingOptions(1.0), stream) for i, stream in enumerate(streams)]
    path = walk.reject_path(draft, law.log().expand(count, 3, 4), requests)
    counts = torch.bincount(path.tokens[:, 0].long(), minlength=4).double()
    assert deviation(counts, law.double()) < 3.7


def test_the_siblings_of_a_rejected_child_are_asked_in_turn():
    """The target wants the second child and nothing else."""
    tree = branches_tree(torch.tensor([[1, 3, 0]]), 2)
    law = torch.tensor([0.5, 0.0, 0.0, 0.5]).expand(1, 1, 4)
    draft = SampledDraft(RoundTree(tree, unpack_mask(tree.mask, 3)), law, torch.arange(4), branching=2)
    request = Request(0, [1], 5, SamplingOptions(1.0), torch.Generator().manual_seed(0))
    path = walk.reject_path(draft, torch.tensor([60.0, 0.0, 0.0, -60.0]).expand(1, 3, 4), [request])
    assert path.num_accepted.tolist() == [1] and path.nodes[0, :2].tolist() == [0, 2]
    assert path.tokens[0, :2].tolist() == [0, 0]


def test_drawn_drafts_beside_greedy_rows_and_graphs(target, good_head, prompts, greedy):
    generator = PseudoSpeculativeGenerator(target, good_head, sample_drafts=True)
    mixed = [0.0, 1.0, 0.0, 0.8, 0.0, 0.0]
    output = generator.generate(prompts, 30, mixed, seed=2)
    for row in (0, 2, 4, 5):
        assert output.tokens[row] == greedy[row][:30]
    alone = generator.generate(prompts[1:2], 30, 1.0, seed=2)
    assert alone.tokens[0] == output.tokens[1] and alone.accepted_lengths[0] == output.accepted_lengths[1]
    assert generator.generate(prompts, 30).tokens == [answer[:30] for answer in greedy]
    with pytest.raises(DecodingError, match="1 \\+ topk \\* depth, 7, found 6"):
        PseudoSpeculativeGenerator(target, good_head, "tree", topk=2, depth=3, num_nodes=6, sample_drafts=True)


def forbid_repeats(ids, scores):
    """No token twice in a row."""
    return scores.scatter(1, ids[:, -1:], float("-inf"))


PENALTY = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.6), forbid_repeats])


@pytest.mark.parametrize("drawn_drafts", [False, True])
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_processors_keep_the_law_of_plain_decoding_with_them(small, logits, shape, drawn_drafts):  # noqa: F811
    """Penalty and mask depend on the path that is walked."""
    options = SamplingOptions(temperature=1.1)
    expected = []
    for sequence in itertools.product(range(VOCAB), repeat=LENGTH):
        mass = 1.0
        for place, token in enumerate(sequence):
            scores = PENALTY(torch.tensor([PROMPT + list(sequence[:place])]), logits[sequence[:place]][None])
            mass *= float(shape_probabilities(scores[None], [options])[0, 0, token])
        expected.append(mass)
    given = dict(temperature=1.1, logits_processor=PENALTY)
    counts, length = draw(small, given, sample_drafts=drawn_drafts, **SHAPES[shape])
    assert length > 1.05
    assert deviation(counts, torch.tensor(expected, dtype=torch.float64)) < 3.7
    plain = joint(logits, options)
    assert math.fsum(abs(plain - torch.tensor(expected, dtype=torch.float64)).tolist()) > 0.2  # they matter


@pytest.mark.parametrize("shape", [dict(num_steps=3), dict(mode="tree", topk=3, depth=3)])
def test_greedy_with_processors_equals_generate(target, good_head, prompts, shape):
    own = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = target.model.generate(
            ids, max_new_tokens=24, do_sample=False, attention_mask=torch.ones_like(ids), logits_processor=PENALTY
        )
        own.append(out[0, len(prompt) :].tolist())
    output = PseudoSpeculativeGenerator(target, good_head, **shape).generate(prompts, 24, logits_processor=PENALTY)
    assert output.tokens == own
    one = [PENALTY] + [None] * (len(prompts) - 1)
    mixed = PseudoSpeculativeGenerator(target, good_head, **shape).generate(prompts, 24, logits_processor=one)
    free = PlainGenerator(target).generate(prompts, 24).tokens
    assert mixed.tokens == [own[0], *free[1:]]
    with pytest.raises(DecodingError, match="logits_processor must be callable"):
        PlainGenerator(target).generate(prompts[:1], 4, logits_processor=[3])


def test_only_visited_nodes_are_shaped(target, good_head, prompts, monkeypatch):
    shaped, right = [], walk.shape_probabilities
    monkeypatch.setattr(
        walk, "shape_probabilities", lambda rows, options: shaped.append(rows.shape[0]) or right(rows, options)
    )
    generator = PseudoSpeculativeGenerator(target, good_head, "tree", topk=4, depth=3, num_nodes=20)
    output = generator.generate(prompts[:1], 30, 1.0, top_p=0.9, seed=1)
    walked = sum(1 + accepted for accepted in output.accepted_lengths[0])
    assert sum(shaped) <= 1 + walked  # the prefill's token, and a row of logits a visited node


def test_top_p_of_a_ranked_prefix_equals_that_of_a_full_sort():
    torch.manual_seed(0)
    rows = torch.randn(3, 2, 6000) * torch.tensor([6.0, 2.0, 0.1])[:, None, None]  # 256, 4096 and all are needed
    for top_p in (0.3, 0.9, 0.99):
        shaped = shape_probabilities(rows, [SamplingOptions(1.0, top_p=top_p)] * 3)
        ranked, order = rows.softmax(-1).sort(-1, descending=True)
        keep = ranked.cumsum(-1) - ranked < top_p
        expected = torch.zeros_like(rows).scatter(-1, order, torch.where(keep, ranked, 0.0))
        torch.testing.assert_close(shaped, expected / expected.sum(-1, keepdim=True), atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize(("branching", "depth"), [(1, 4), (3, 1), (3, 4), (5, 9)])
def test_chains_below_one_root(branching, depth):
    tokens = torch.arange(2 * (1 + branching * depth)).view(2, -1)
    tree = branches_tree(tokens, branching)
    tree.check()
    assert tree.depth_limit() == depth
    if branching == 1:
        chain = chain_tree(tokens)
        for name in ("tokens", "parents", "depths", "mask", "first_child", "next_sibling"):
            assert torch.equal(getattr(tree, name), getattr(chain, name)), name
    for node in range(1, tokens.shape[1]):
        assert tree.parents[0, node] == max(0, node - branching)
        assert tree.depths[1, node] == tree.depths[1, tree.parents[1, node]] + 1
