"""Two texts are equal, part where the target nearly ties, or one of them is wrong."""

import pytest
import torch

from modelopt_eagle.decoding.divergence import first_divergence
from modelopt_eagle.validation.report import same_text
from modelopt_eagle.validation.speed import Speed


def test_divergence_and_its_gap(target, prompts, greedy):
    assert first_divergence(target, prompts[0], greedy[0], list(greedy[0])) is None
    wrong = [*greedy[0][:7], (greedy[0][7] + 1) % 256, *greedy[0][8:]]
    found = first_divergence(target, prompts[0], greedy[0], wrong)
    assert found.position == 7 and found.tokens == (greedy[0][7], wrong[7])
    logits = target.model(torch.tensor([prompts[0] + greedy[0][:7]]), use_cache=False).logits[0, -1]
    assert found.gap == pytest.approx(float(logits[greedy[0][7]] - logits[wrong[7]]), rel=1e-4)
    assert not found.is_tie and found.gap > 1e-4
    short = first_divergence(target, prompts[0], greedy[0], greedy[0][:5])
    assert short.position == 5 and short.tokens == (greedy[0][5], None) and not short.is_tie
    speed = Speed(1, 1, 1, 1, 1, 1, 1, (found,))
    assert "1 texts part from plain decoding, 0 of them" in same_text(speed)


def test_a_near_tie_is_named(target, prompts, greedy, monkeypatch):
    """Two tokens share a row of the output head, so their logits tie exactly."""
    first, twin = greedy[1][3], (greedy[1][3] + 1) % 256
    weight = target.model.lm_head.weight
    kept = weight[twin].clone()
    with torch.no_grad():
        weight[twin] = weight[first]
    try:
        found = first_divergence(target, prompts[1], greedy[1], [*greedy[1][:3], twin])
    finally:
        with torch.no_grad():
            weight[twin] = kept
    assert found.is_tie and found.position == 3
