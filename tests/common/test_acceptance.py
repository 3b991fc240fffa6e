"""Pooled acceptance, and the one rule for no steps."""

import random

import pytest

from modelopt_eagle.common import acceptance
from modelopt_eagle.decoding import GenerationOutput
from modelopt_eagle.training.acceptance import WalkResult

TRACES = [[[3, 0, 1], [2]], [[0]], [[], [1, 1], []]]


@pytest.mark.parametrize("trace", TRACES)
def test_every_room_gives_the_same_number(trace):
    flat = [n for row in trace for n in row]
    length = sum(1 + n for n in flat) / len(flat)
    counts = acceptance.prefix_counts(trace, 3)
    output, walk = GenerationOutput([], trace, counts, []), WalkResult(3, trace)
    assert acceptance.pooled_length(trace) == pytest.approx(length)
    assert output.acceptance_length == walk.acceptance_length == acceptance.acceptance_length(trace)
    assert output.steps == walk.steps == acceptance.count_steps(trace) == len(flat)
    assert walk.per_position == acceptance.prefix_shares(trace, 3) == acceptance.shares_of_counts(counts, len(flat))
    assert acceptance.length_of_shares(walk.per_position, len(flat)) == pytest.approx(length)
    assert walk.text == f"{length:.3f}" and walk.numbers()["acceptance_length"] == walk.acceptance_length


@pytest.mark.parametrize("trace", [[], [[]], [[], []]])
def test_without_a_step_there_is_no_length(trace):
    assert acceptance.pooled_length(trace) is None and acceptance.length_text(None) == "none"
    assert acceptance.length_of_shares([0.0, 0.0], 0) is None and acceptance.prefix_shares(trace, 2) == [0.0, 0.0]
    assert acceptance.acceptance_length(trace) == GenerationOutput([], trace, [], []).acceptance_length == 1.0
    walk = WalkResult(2, trace)
    assert walk.acceptance_length == 0.0 and walk.text == "none" and walk.numbers()["acceptance_length"] is None


def test_counts_are_those_of_a_loop():
    random.seed(0)
    trace = [[random.randint(0, 4) for _ in range(9)] for _ in range(5)]
    expected = [0] * 4
    for row in trace:
        for n in row:
            for k in range(n):
                expected[k] += 1
    assert acceptance.prefix_counts(trace, 4) == expected
