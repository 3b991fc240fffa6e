"""The acceptance walk against a step-by-step simulation of speculative decoding on the same text."""

import torch

from modelopt_eagle.training import rollout
from modelopt_eagle.training.acceptance import WalkResult, acceptance_walk
from tests.training.test_rollout_and_loss import make_batch, make_module


def simulate(logits, module, tokens_top1, start, end, steps):
    """Draft, compare, accept, one step at a time; ``logits[k][i]`` of one row."""
    accepted, anchor = [], start - 1
    while anchor + 2 < end:
        n = 0
        while n < steps and anchor + 2 + n < end:
            draft = int(module.target_ids[logits[n][anchor].argmax()])
            if draft != int(tokens_top1[anchor + 1 + n]):
                break
            n += 1
        accepted.append(n)
        anchor += 1 + n
    return accepted


def test_walk_equals_a_simulation_over_packed_documents():
    module = make_module()
    embeddings, aux, _, _, documents = make_batch()
    output = rollout(module, embeddings, aux, 3, documents)
    logits = [output.logits(k) for k in range(3)]
    supervised = torch.zeros(2, 14, dtype=torch.bool)
    spans = [(0, 2, 5), (0, 7, 10), (0, 11, 14), (1, 4, 11), (1, 12, 14)]
    for row, start, end in spans:
        supervised[row, start:end] = True
    generator = torch.Generator().manual_seed(0)
    top1 = torch.randint(0, 40, (2, 14), generator=generator)
    for k in range(3):  # make about half of the drafts right
        for b in range(2):
            for i in range(13 - k):
                if torch.rand((), generator=generator) < 0.5:
                    top1[b, i + 1 + k] = module.target_ids[logits[k][b, i].argmax()]
    result = acceptance_walk(module, embeddings, aux, supervised, top1, 3, documents)
    expected = [simulate([x[r] for x in logits], module, top1[r], s, e, 3) for r, s, e in spans]
    assert result.accepted == expected
    assert 0 < result.per_position[0] < 1 and result.steps == sum(map(len, expected))


def test_pooled_length_is_not_a_mean_of_means():
    result = WalkResult(3, [[3, 3, 3, 3], [0]])
    assert result.acceptance_length == (4 * 4 + 1) / 5
    assert result.per_position == [0.8, 0.8, 0.8]
    assert WalkResult(2).acceptance_length == 0.0


def test_an_answer_of_one_token_takes_no_step():
    module = make_module()
    embeddings, aux, _, _, _ = make_batch(1, 6)
    supervised = torch.tensor([[False, False, True, False, False, False]])
    result = acceptance_walk(module, embeddings, aux, supervised, torch.zeros(1, 6, dtype=torch.int64), 3)
    assert result.accepted == [[]]
