"""The loss with one kernel a chunk against the plain one: values, hits, gradients, over odd shapes and every kind."""

import pytest
import torch

from modelopt_eagle.draft.predictions import Predictions
from modelopt_eagle.kernels.distill_rows import MAX_ROWS
from modelopt_eagle.training import fused_loss
from modelopt_eagle.training.loss import LossKind, prediction_loss
from modelopt_eagle.training.loss_plan import LossWork, RowPlan, chunk_bounds
from modelopt_eagle.training.teacher import Teacher

TOKENS, WIDTH, VOCAB, DRAFT = 37, 16, 61, 43


def make_case(depths: int, matrices: int, *, hard=False, cap=False, weighted=False, logits=False, seed=0):
    """Arguments of ``prediction_loss``; several depths meet one position, some positions nobody."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randperm(VOCAB, generator=random)[:DRAFT].sort().values  # [Vd]
    to_draft = torch.full((VOCAB,), -1)
    to_draft[ids] = torch.arange(DRAFT)
    counted = torch.rand(depths, TOKENS - depths, generator=random) < 0.6
    depth, anchor = counted.nonzero(as_tuple=True)
    weight = torch.rand(len(depth), generator=random) if weighted else None
    predictions = Predictions(anchor, depth, anchor + depth, depths, weight)
    states = torch.randn(len(depth), WIDTH, generator=random, requires_grad=True)
    heads = [torch.randn(DRAFT, WIDTH, generator=random, requires_grad=True) for _ in range(matrices)]
    lm_head = torch.randn(VOCAB, 12, generator=random)
    hidden = torch.randn(TOKENS, 12, generator=random)
    labels = ids[torch.randint(0, DRAFT, (TOKENS,), generator=random)] if hard else None
    top1 = torch.randint(-1, VOCAB, (TOKENS,), generator=random) if weighted else None
    teacher = Teacher(
        ids, hidden @ lm_head.T if logits else None, hidden, lm_head[ids], lm_head,
        (lambda x, ids: 2 * torch.tanh(x / 2)) if cap else None, top1, labels,
    )  # fmt: skip
    outputs = [heads[k % matrices] for k in range(depths)]
    return states, heads, (predictions, outputs, teacher, to_draft, torch.rand(depths, generator=random))


def run(case, kind: LossKind, fused: bool):
    """``loss, sums, hits`` and the gradients."""
    states, heads, given = case
    loss, sums, hits = prediction_loss(states, *given, kind, fused=fused)
    return (loss, sums, hits, *torch.autograd.grad(loss * 1.7, [states, *heads]))


@pytest.mark.parametrize("kind", [LossKind(), LossKind(lk=True), LossKind(lk=True, subtract_entropy=True)])
@pytest.mark.parametrize(
    ("depths", "matrices", "options"),
    [
        (3, 1, {}),
        (1, 1, {"cap": True}),
        (7, 1, {"hard": True}),
        (4, 4, {"weighted": True}),
        (5, 2, {"logits": True, "weighted": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("chunk_bytes", [1, 4 * DRAFT * 20, 2**20])
def test_fused_rows_equal_the_plain_loss(monkeypatch, kind, depths, matrices, options, chunk_bytes):
    monkeypatch.setattr(fused_loss, "CHUNK_BYTES", chunk_bytes)
    case = make_case(depths, matrices, **options)
    for one, other in zip(run(case, kind, True), run(case, kind, False), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=1e-6)


def test_a_value_without_a_gradient():
    states, _, given = make_case(3, 1)
    with torch.no_grad():
        plain, fused = (prediction_loss(states, *given, fused=choice) for choice in (False, True))
    for one, other in zip(plain, fused, strict=True):
        torch.testing.assert_close(one, other)


def test_bfloat16_products_accumulate_in_float32():
    """Terms and hits of bf16 logits are those of the float32 arithmetic on the same rounded logits."""
    states, _, (predictions, outputs, *rest) = make_case(3, 1)
    with torch.no_grad():
        short = [weight.bfloat16() for weight in outputs[:1]] * 3
        found = prediction_loss(states, predictions, short, *rest, fused=True)
        plain = prediction_loss(states, predictions, short, *rest, fused=False)
    for one, other in zip(found, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_a_process_without_predictions_gives_zero():
    states, heads, (predictions, *rest) = make_case(3, 1)
    none = predictions.select(torch.zeros(len(predictions), dtype=torch.bool))
    loss, sums, hits = prediction_loss(states[:0], none, *rest, LossKind(lk=True), fused=True)
    grads = torch.autograd.grad(loss, heads)
    assert loss == 0 and not sums.any() and not hits.any() and not grads[0].any()


def test_every_row_is_planned_once_and_groups_meet_one_position_with_one_matrix():
    predictions, _, teacher, to_draft, weights = make_case(9, 2)[2]
    matrix_of = tuple(k % 2 for k in range(9))
    work = LossWork(predictions, weights, to_draft, teacher, LossKind(), matrix_of)
    plan = RowPlan.make(work, 40)
    assert plan.order.sort().values.tolist() == list(range(len(predictions)))
    assert len(plan.chunks) > 3 and plan.most == MAX_ROWS
    seen = 0
    for chunk in plan.chunks:
        order, positions = plan.order[chunk.rows], plan.positions[chunk.positions]
        assert positions[plan.place[chunk.rows]].tolist() == predictions.teacher[order].tolist()
        for head, own in chunk.heads:
            assert {matrix_of[k] for k in plan.depth[chunk.rows][own].tolist()} == {head}
        for first, size in plan.groups[chunk.groups].tolist():
            part = order[first : first + size]
            assert 1 <= size <= MAX_ROWS
            assert len({(int(predictions.teacher[i]), matrix_of[predictions.depth[i]]) for i in part}) == 1
            seen += size
    assert seen == len(predictions)


def test_a_chunk_is_as_large_as_its_bytes(monkeypatch):
    monkeypatch.setattr(fused_loss, "CHUNK_BYTES", 4 * DRAFT * 20)
    states, heads, (predictions, _, teacher, to_draft, weights) = make_case(3, 1)
    work = LossWork(predictions, weights, to_draft, teacher, LossKind(), (0, 0, 0))
    plan = fused_loss.Rows(work, states, heads).plan
    sizes = [c.rows.stop - c.rows.start + c.positions.stop - c.positions.start for c in plan.chunks]
    assert max(sizes) <= 20 and min(sizes[:-1]) > 20 - 4  # a position more has up to three rows
    halves = fused_loss.Rows(work, states, [heads[0].bfloat16()]).plan
    assert len(halves.chunks) < len(plan.chunks)


def test_chunks_hold_what_fits_and_one_position_at_least():
    counts = torch.tensor([3, 3, 1, 9, 1, 1])
    assert chunk_bounds(counts, 8) == [0, 2, 3, 4, 6]
    assert chunk_bounds(counts, 1) == [0, 1, 2, 3, 4, 5, 6]
    assert chunk_bounds(counts, 1000) == [0, 6]
