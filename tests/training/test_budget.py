"""The minutes of a whole run: rows are taken while there is time, stopped runs go on with what is left."""

import json
import types

import pytest

from modelopt_eagle.errors import StreamError
from modelopt_eagle.features import compute
from modelopt_eagle.recipe import load_recipe
from modelopt_eagle.training import budget, train
from modelopt_eagle.training.budget import FEATURES_UNTIL, LEFT_OUT, TRAINING_UNTIL, measuring_seconds, split_parts
from modelopt_eagle.training.streams import PATIENCE, patience
from modelopt_eagle.training.trainer import Trainer
from tests.training.runs import interrupt_at, small_recipe, write_conversations

ROWS = 24


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_conversations(tmp_path_factory.mktemp("data") / "rows.jsonl", ROWS)


@pytest.fixture
def slow(monkeypatch):
    """A clock that only the target's work moves on: ``slow.per_token`` seconds each; parts of 200 tokens."""
    machine = types.SimpleNamespace(now=1000.0, per_token=0.0, stop_after=None, tokens=0)
    monkeypatch.setattr(budget, "time", types.SimpleNamespace(monotonic=lambda: machine.now))
    monkeypatch.setattr(budget, "PART_TOKENS", 200)
    original = compute.compute_features

    def slowed(target, rows, *args, **kwargs):
        tokens = sum(len(row.input_ids) for row in rows)
        if machine.stop_after is not None and machine.tokens + tokens > machine.stop_after:
            machine.stop_after = None
            raise KeyboardInterrupt
        machine.tokens += tokens
        machine.now += machine.per_token * tokens
        return original(target, rows, *args, **kwargs)

    monkeypatch.setattr(compute, "compute_features", slowed)
    return machine


def recipe_of(target, data, folder, cache="disk", *options):
    return small_recipe(
        target, data, folder, "training.run_budget_minutes=1", f"data.cache_features={cache}", "training.dry_run=true",
        *options,
    )  # fmt: skip


def record(folder):
    return json.loads((folder / "budget.json").read_text())


def trained_rows(folder):
    return json.loads((folder / "data.json").read_text())["rows"]


def test_parts_hold_each_row_once_from_all_over_the_data():
    lengths = [1 + n % 7 for n in range(200)] + [500]
    parts = split_parts(lengths, seed=3, tokens=50)
    assert sorted(row for part in parts for row in part) == list(range(201))
    assert all(sum(lengths[row] for row in part) <= 50 or part == [200] for part in parts)
    assert parts == split_parts(lengths, seed=3, tokens=50) != split_parts(lengths, seed=4, tokens=50)
    first = {row for part in parts[:4] for row in part}
    again = split_parts(lengths, seed=3, tokens=80, rows=len(first))
    assert {row for part in again for row in part} == first, "the rows of parts do not hang on their size"
    spread = [max(part) - min(part) for part in parts if len(part) > 5]
    assert min(spread) > 80, "a part is drawn from all over the data"


@pytest.mark.parametrize("cache", ["disk", "memory"])
def test_a_quiet_machine_takes_all_rows_and_a_slow_one_as_many_as_fit(cache, slow, tiny_target_dir, data, tmp_path):
    slow.per_token = 0.001
    train(recipe_of(tiny_target_dir, data, tmp_path / "quiet", cache))
    assert trained_rows(tmp_path / "quiet") == ROWS and not (tmp_path / "quiet" / LEFT_OUT).exists()
    assert record(tmp_path / "quiet")["training_seconds"] == pytest.approx(TRAINING_UNTIL * 60 - 0.001 * slow.tokens)

    slow.per_token, slow.tokens = 0.025, 0
    result = train(recipe_of(tiny_target_dir, data, tmp_path / "slow", cache))
    kept, account = record(tmp_path / "slow"), json.loads((tmp_path / "slow" / "data.json").read_text())
    assert FEATURES_UNTIL * 60 * 0.6 < kept["feature_seconds"] <= FEATURES_UNTIL * 60, "the share is used, not passed"
    left_out = account["dropped"]["out_of_time"]
    assert 0 < left_out < ROWS and account["rows"] == ROWS - left_out == account["read"] - left_out
    names = (tmp_path / "slow" / LEFT_OUT).read_text().splitlines()
    assert len(names) == left_out and all(name.startswith("row-") for name in names)
    header = "\n".join(result.header)
    assert f"budget: {left_out} of {ROWS} rows" in header and "rows_not_taken.txt" in header
    said = f"{ROWS} conversations read, 0 dropped, {left_out} left out for want of time, {ROWS - left_out} rows"
    assert said in result.header[0] and f"  left out {left_out} (out_of_time: " in header and "  dropped" not in header
    assert kept["before_training"] + kept["training_seconds"] == pytest.approx(TRAINING_UNTIL * 60)
    assert sum(account["lengths"]["counts"]) == ROWS - left_out


def test_a_run_stopped_in_its_features_goes_on_with_what_is_left(slow, tiny_target_dir, data, tmp_path, monkeypatch):
    monkeypatch.setattr("modelopt_eagle.training.data.CACHE_SHARD_BYTES", 1)
    slow.per_token = 0.025
    train(recipe_of(tiny_target_dir, data, tmp_path / "whole"))
    whole = slow.tokens
    slow.tokens, slow.stop_after = 0, 0.6 * whole
    with pytest.raises(KeyboardInterrupt):
        train(recipe_of(tiny_target_dir, data, tmp_path / "cut"))
    begun = record(tmp_path / "cut")
    assert 0 < begun["feature_seconds"] < FEATURES_UNTIL * 60 and not begun["settled"]
    slow.now += 3600  # the time between two starts does not count
    train(recipe_of(tiny_target_dir, data, tmp_path / "cut"))
    assert slow.tokens == whole, "what was made before is neither made again nor is there more time for more"
    assert (tmp_path / "cut" / LEFT_OUT).read_text() == (tmp_path / "whole" / LEFT_OUT).read_text()
    ended = record(tmp_path / "cut")
    assert begun["feature_seconds"] < ended["feature_seconds"] <= FEATURES_UNTIL * 60
    assert ended["before_training"] == pytest.approx(record(tmp_path / "whole")["before_training"], abs=6)


@pytest.mark.parametrize("cache", ["disk", "memory"])
def test_features_count_where_a_run_ended_between_them_and_training(cache, slow, tiny_target_dir, data, tmp_path):
    slow.per_token = 0.025
    recipe = recipe_of(tiny_target_dir, data, tmp_path / "run", cache)
    train(recipe)
    whole = record(tmp_path / "run")
    (tmp_path / "run" / "budget.json").write_text(json.dumps(whole | {"training_seconds": None, "before_training": 0}))
    train(recipe)
    assert record(tmp_path / "run") == pytest.approx(whole)


def test_features_in_memory_are_gone_and_so_is_their_time(slow, tiny_target_dir, data, tmp_path):
    slow.per_token, slow.stop_after = 0.025, 600
    with pytest.raises(KeyboardInterrupt):
        train(recipe_of(tiny_target_dir, data, tmp_path / "cut", "memory"))
    assert slow.tokens > 100
    slow.tokens = 0
    train(recipe_of(tiny_target_dir, data, tmp_path / "cut", "memory"))
    assert record(tmp_path / "cut")["feature_seconds"] == pytest.approx(0.025 * slow.tokens)


@pytest.mark.parametrize("cache", ["disk", "memory"])
def test_a_run_stopped_in_training_finds_its_rows_and_its_time_again(
    cache, slow, tiny_target_dir, data, tmp_path, monkeypatch
):
    slow.per_token = 0.025
    options = ("training.dry_run=false", "training.max_steps=4", "eagle.ttt_warmup=0.5")
    recipe, budgets = recipe_of(tiny_target_dir, data, tmp_path / "run", cache, *options), []
    fit = Trainer.fit
    monkeypatch.setattr(Trainer, "fit", lambda self: (budgets.append(self.schedule.budget_seconds), fit(self))[1])
    with monkeypatch.context() as patch:
        interrupt_at(patch, 2)
        assert not train(recipe).finished
    before, rows = record(tmp_path / "run"), trained_rows(tmp_path / "run")
    assert 0 < rows < ROWS
    slow.per_token = 0.0001  # the machine is quiet now; the rows stay those of the first start
    assert train(recipe).finished
    assert record(tmp_path / "run") == before and trained_rows(tmp_path / "run") == rows
    assert budgets == [before["training_seconds"]] * 2
    (tmp_path / "run" / "budget.json").write_text('{"minutes": -')
    assert measuring_seconds(recipe, 5.0) == pytest.approx((1 - TRAINING_UNTIL) * 60)
    assert train(recipe).finished


def test_without_a_stage_of_features_training_ends_in_time(slow, tiny_target_dir, data, tmp_path):
    for name, more, limit in (("a", (), TRAINING_UNTIL * 60), ("b", ("validation.mode=none",), 60.0),
                              ("c", ("training.time_budget_minutes=0.1",), 6.0)):  # fmt: skip
        result = train(recipe_of(tiny_target_dir, data, tmp_path / name, "none", *more))
        assert trained_rows(tmp_path / name) == ROWS
        assert f"it gets at most {limit / 60:.1f}" in result.header[-1]


def test_training_keeps_a_least_share_and_says_so(slow, tiny_target_dir, data, tmp_path):
    slow.per_token = 1.0
    result = train(recipe_of(tiny_target_dir, data, tmp_path / "run"))
    assert record(tmp_path / "run")["training_seconds"] == pytest.approx(budget.TRAINING_LEAST * 60)
    assert "warning: they will not be kept" in result.header[-1]
    assert measuring_seconds(recipe_of(tiny_target_dir, data, tmp_path / "run"), 6.0) == pytest.approx(7.5)


def test_the_head_of_a_run_does_not_blame_features_for_what_reading_took(slow, tmp_path):
    folder = f"training.output_dir={tmp_path}"
    recipe = load_recipe(None, [folder, "training.run_budget_minutes=10", "data.cache_features=disk"])
    alone = types.SimpleNamespace(is_main_process=True, num_processes=1)
    for reading, making, said in ((180, 12, "3.2 went by before training (0.2 of them made features)"),
                                  (300, 0, "3.2 went by before training (0.2 of them made features)")):  # fmt: skip
        held = budget.RunBudget(recipe, alone)
        slow.now += reading
        for part in held.parts([100] * 4, "rows"):
            slow.now += making / 2
            assert len(part) == 2
        assert said in held.line()
    assert measuring_seconds(recipe, 300.0) == 600 - 192 - 300, "what training left of its own is measured in, too"
    other = budget.RunBudget(load_recipe(None, [folder, "training.run_budget_minutes=20"]), alone)
    list(other.parts([100] * 4, "rows"))
    assert record(tmp_path)["feature_seconds"] == 0, "a budget of other minutes begins anew"
    late = budget.RunBudget(recipe, alone)
    slow.now += 590
    assert len(list(late.parts([100] * 4, "other rows"))) == 1, "the first part always, however long reading took"
    other.write_left_out(["a\nb", "c"])
    assert (tmp_path / LEFT_OUT).read_text() == "a\\nb\nc\n"
    other.write_left_out([])
    assert not (tmp_path / LEFT_OUT).exists()
    without = budget.RunBudget(load_recipe(None, [folder, "training.run_budget_minutes=5"]), alone)
    slow.now += 30
    assert "0.5 went by before training, it gets" in without.line()


def test_servers_that_do_not_answer_are_waited_for_no_longer_than_features_have(tiny_target_dir, data, tmp_path):
    unreachable = ("data.streaming_server_url=http://127.0.0.1:9", "training.run_budget_minutes=0.01")
    with pytest.raises(StreamError, match="no feature server has answered for 0.24 s"):
        train(small_recipe(tiny_target_dir, data, tmp_path / "run", *unreachable), quiet=True)
    for long in ([], ["training.run_budget_minutes=60"]):
        assert patience(load_recipe(None, long)) == PATIENCE


def test_an_estimate_says_how_many_rows_fit():
    from modelopt_eagle.cli.estimate import budget_lines

    found = types.SimpleNamespace(target_flops=600e9)
    recipe = load_recipe("quickstart", ["training.run_budget_minutes=10"])
    (line,) = budget_lines(recipe, found, 5e9)
    assert "10.0 min" in line and "ends after 7.5; features have 4.0, enough for all rows" in line
    (line,) = budget_lines(recipe, found, 1e9)
    assert "enough for about 40% of the rows" in line
    (line,) = budget_lines(load_recipe("eagle3", ["training.run_budget_minutes=10"]), found, 1e9)
    assert "features have" not in line
    assert budget_lines(load_recipe("eagle3"), found, 1e9) == []
