"""The learning rate by steps and by time."""

import itertools

import pytest

from modelopt_eagle.training.optimizer import Schedule


def factors(schedule, elapsed=lambda step: 0.0):
    return [schedule.factor(step, elapsed(step)) for step in range(schedule.total_steps)]


def test_linear_rises_then_falls_in_straight_lines():
    got = factors(Schedule("linear", 10, warmup_ratio=0.2))
    assert got[:2] == pytest.approx([0.25, 0.75])
    assert got[2:] == pytest.approx([(7.5 - i) / 8 for i in range(8)])


def test_cosine_is_half_way_in_the_middle_and_ends_near_the_least():
    got = factors(Schedule("cosine", 101, min_ratio=0.1))
    assert got[50] == pytest.approx(0.55)
    assert got[0] > 0.99 and got[-1] == pytest.approx(0.1, abs=1e-3)
    assert all(a >= b for a, b in itertools.pairwise(got))


def test_constant_stays():
    assert factors(Schedule("constant", 5, warmup_ratio=0.5)) == pytest.approx([0.2, 0.6, 1, 1, 1])


def test_time_takes_the_lead_when_it_is_further_on():
    schedule = Schedule("linear", 1000, budget_seconds=100.0)
    assert schedule.factor(10, 50.0) == pytest.approx(0.5)
    assert schedule.factor(10, 99.0) == pytest.approx(0.01)
    assert schedule.factor(10, 500.0) == 0.0
    assert schedule.factor(799, 10.0) == pytest.approx(1 - 0.7995)


def test_remaining_time_is_the_sooner_of_both():
    schedule = Schedule("linear", 100, budget_seconds=60.0)
    assert schedule.remaining_seconds(50, 30.0, 0.1) == pytest.approx(5.0)
    assert schedule.remaining_seconds(50, 30.0, 10.0) == pytest.approx(30.0)
    assert Schedule("linear", 100).remaining_seconds(50, 30.0, 10.0) == pytest.approx(500.0)
