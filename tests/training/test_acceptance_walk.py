"""The acceptance walk against a step-by-step simulation of speculative decoding on the same text."""

import torch

from modelopt_eagle.draft.documents import Documents, WholeAxis
from modelopt_eagle.draft.predictions import BatchView
from modelopt_eagle.training import rollout
from modelopt_eagle.training.acceptance import WalkResult, acceptance_walk, target_law, walk
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


def test_what_is_expected_of_drafts_drawn_at_temperature_one():
    """1 + β₀ + β₀β₁ + … with β = Σ min(p, q), from full softmaxes; p of the whole vocabulary."""
    module = make_module()
    embeddings, aux, _, _, documents = make_batch()
    output = rollout(module, embeddings, aux, 3, documents)
    batch, length = documents.shape
    supervised = torch.zeros(2, 14, dtype=torch.bool)
    supervised[0, 2:5] = supervised[1, 4:11] = True
    torch.manual_seed(1)
    hidden, lm_head = torch.randn(batch * length, 12), torch.randn(40, 12)
    law = target_law(hidden, lm_head, module.target_ids, lambda logits, ids: logits * 0.7)
    view = BatchView(
        input_ids=torch.zeros(batch * length, dtype=torch.int64),
        supervised=supervised.flatten(),
        documents=Documents.make(batch, length, documents, supervised.device),
        aux_hidden=aux.flatten(0, 1),
        final_hidden=None,
        embed=embeddings.flatten(0, 1).__getitem__,
        length=length,
        axis=WholeAxis(batch * length, supervised.device),
    )
    result = walk(module, view, torch.zeros(batch * length, dtype=torch.int64), 3, law)
    full = (hidden @ lm_head.T * 0.7).softmax(-1).view(batch, length, 40)[..., module.target_ids]
    expected = []
    for row, start, end in ((0, 2, 5), (1, 4, 11)):
        answer = []
        for anchor in range(start - 1, end - 2):
            total, running = 1.0, 1.0
            for k in range(3):
                if anchor + 2 + k >= end:
                    break
                q = output.logits(k)[row, anchor].softmax(-1)
                running *= float(torch.minimum(full[row, anchor + 1 + k], q).sum())
                total += running
            answer.append(total)
        expected.append(answer)
    for mine, theirs in zip(result.drawn, expected, strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), atol=1e-5, rtol=1e-5)
    flat = [value for answer in expected for value in answer]
    assert abs(result.drawn_length - sum(flat) / len(flat)) < 1e-5 and 1 < result.drawn_length < 4
    assert result.numbers()["drawn_length"] == result.drawn_length and "drawn_length" not in WalkResult(3).numbers()
