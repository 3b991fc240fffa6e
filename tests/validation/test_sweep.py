"""What a sweep advises."""

from modelopt_eagle.validation.report import best_setting, speed_line
from modelopt_eagle.validation.speed import Speed
from modelopt_eagle.validation.sweep import advice, sweep_table


def measured(steps, accepted, draft, verify, plain=1.0):
    """A row of a sweep by a model of costs: seconds of a step over those of plain decoding."""
    speed = Speed(accepted * plain / (draft + verify), accepted, plain, draft, verify, 0.0, 100)
    return {
        "mode": "chain", "num_steps": steps, "acceptance_length": accepted, "speedup": speed.speedup,
        "break_even": speed.break_even,
    }  # fmt: skip


def test_drafting_nothing_is_advised_where_verification_costs_too_much():
    """B140: the target's pass costs as much again with every token (experts), and acceptance grows by less."""
    dear = [measured(k, 1 + 0.5 * k, 0.1 * k, 1.0 + k) for k in (1, 3, 5)]
    dear.sort(key=lambda row: -row["speedup"])
    assert all(row["break_even"] > row["acceptance_length"] for row in dear)
    assert "draft nothing" in sweep_table(dear)
    cheap = [measured(k, 1 + 0.5 * k, 0.1 * k, 1.0) for k in (1, 3)]
    cheap.sort(key=lambda row: -row["speedup"])
    assert "best on this machine: chain, steps 3" in sweep_table(cheap)
    assert best_setting(dear) == {"mode": "plain"} and best_setting(cheap) == {"mode": "chain", "num_steps": 3}


def test_a_busy_machine_is_said():
    quiet = Speed(1.2, 2.0, 1.0, 0.2, 1.4, 0.0, 100, processor_share=1.9)
    busy = Speed(4.5, 2.0, 1.0, 0.2, 0.2, 0.0, 100, processor_share=0.31)
    assert "quiet machine" not in speed_line(quiet)
    assert "31 % of the time on a processor" in speed_line(busy)
    row = {"mode": "chain", "num_steps": 3, "acceptance_length": 2.0, "speedup": 4.5, "break_even": 0.4}
    assert "doubtful: other work held this one up, 31 %" in advice([row | {"processor_share": 0.31}])
    assert "doubtful" not in advice([row | {"processor_share": None}])
