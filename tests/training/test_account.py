"""What a run keeps for its page: the account of the data, the machine, and the time it waited for features."""

import json
import time

import pytest

from modelopt_eagle.common.machine import environment, machine_line
from modelopt_eagle.training import train
from modelopt_eagle.training.data import length_spread
from modelopt_eagle.training.metrics import Meter
from tests.training.runs import small_recipe, write_conversations


@pytest.mark.parametrize("lengths", [[7], [5, 5, 5], [3, 9, 4, 100], list(range(10, 500)), [1, 10_000]])
def test_the_spread_of_lengths_counts_every_row_once(lengths):
    spread = length_spread(lengths)
    edges, counts = spread["edges"], spread["counts"]
    assert sum(counts) == len(lengths) and len(edges) == len(counts) + 1 and len(counts) <= 25
    for low, high, count in zip(edges, edges[1:], counts, strict=False):
        assert count == sum(low <= length < high for length in lengths)
    assert spread["quantiles"][0] == min(lengths) and spread["quantiles"][-1] == max(lengths)
    assert spread["quantiles"] == sorted(spread["quantiles"])


def test_a_run_keeps_its_data_its_machine_and_its_waiting(tiny_target_dir, tmp_path):
    rows = write_conversations(tmp_path / "rows.jsonl", 12)
    with rows.open("a") as stream:
        stream.write('{"messages": []}\n')
    result = train(small_recipe(tiny_target_dir, rows, tmp_path / "run"))
    account = json.loads((tmp_path / "run" / "data.json").read_text())
    assert (account["read"], account["rows"], account["dropped"]) == (13, 12, {"no_messages": 1})
    assert sum(account["lengths"]["counts"]) == 12 and account["supervised"] < account["tokens"]
    assert json.loads((tmp_path / "run" / "environment.json").read_text()).keys() == environment().keys()
    assert all(0 < entry["waiting"] <= 1 for entry in result.history)
    assert "cores" in machine_line() or "GiB" in machine_line()


def test_waiting_is_the_time_until_the_next_item(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def slow():
        for item in range(3):
            now[0] += 3.0
            yield item

    meter = Meter(0.9, None)
    for _ in meter.waiting(slow()):
        now[0] += 1.0
    assert meter._waited == pytest.approx(9.0) and now[0] == 12.0
