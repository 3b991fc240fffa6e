"""Stored rows computed again: whoever made them, they must be the target's (B95, B37, B49)."""

import itertools
from dataclasses import replace

import pytest
import torch

from modelopt_eagle.cli.main import run_command
from modelopt_eagle.errors import FeatureError
from modelopt_eagle.features.checks import recompute, sample_rows
from modelopt_eagle.features.dump import TargetBackEnd, dump
from modelopt_eagle.features.store import STORAGE_DTYPES, StoreReader
from modelopt_eagle.target import Target
from tests.features.test_foreign import target_states, write_specforge  # noqa: F401 (a fixture)

AUX = (1, 3, 4)


class Engine(TargetBackEnd):
    """A back end that spoils its rows, with every count and shape in order."""

    spoil = staticmethod(lambda rows: rows)

    def features(self, rows):
        yield from self.spoil(dict(super().features(rows))).items()


def swapped(rows):
    """States of two rows of the same length, changed over."""
    numbers = sorted(rows, key=lambda n: len(rows[n]))
    pairs = [(a, b) for a, b in itertools.pairwise(numbers) if len(rows[a]) == len(rows[b])]
    for a, b in pairs[:1]:
        states = {"aux_hidden": rows[b].aux_hidden, "final_hidden": rows[b].final_hidden}
        rows[a], rows[b] = replace(rows[a], **states), replace(rows[b], aux_hidden=rows[a].aux_hidden)
    assert pairs
    return rows


def store(target, rows, folder, spoil=None, dtype="float32", aux=AUX):
    back_end = Engine(target, aux)
    back_end.spoil = spoil or (lambda rows: rows)
    dump(back_end, rows, folder, dtype=dtype)
    return StoreReader(folder)


def problems(checks):
    return [check.problem for check in checks if check.problem]


@pytest.mark.parametrize("dtype", list(STORAGE_DTYPES))
def test_honest_rows_pass_in_every_dtype(tiny_target, dataset, tmp_path, dtype):
    checks = recompute(store(tiny_target, dataset.rows, tmp_path, dtype=dtype), tiny_target, sample=5)
    assert len(checks) == 5 and not problems(checks)
    assert all(check.top1 == 1.0 for check in checks)
    if dtype == "float32":
        assert max(max(check.aux) for check in checks) < 1e-4 and all(check.final < 1e-4 for check in checks)


def test_states_of_another_row_are_found(tiny_target, dataset, tmp_path):
    rows = [*dataset.rows]
    twin = replace(rows[0], id="twin", input_ids=[(i + 1) % 240 for i in rows[0].input_ids])  # of the same length
    checks = recompute(store(tiny_target, [*rows, twin], tmp_path, swapped), tiny_target, sample=len(rows) + 1)
    assert len(problems(checks)) >= 2 and "of no layer of this target on these tokens" in problems(checks)[0]


def test_states_of_another_layer_are_named(tiny_target, dataset, tmp_path):
    reader = store(tiny_target, dataset.rows, tmp_path, aux=(2, 4, 5))  # an extractor that counts inputs
    reader.contract = replace(reader.contract, aux_layer_ids=AUX)
    found = problems(recompute(reader, tiny_target, sample=2))
    assert len(found) == 2
    for stated, held in zip(AUX, (2, 4, 5), strict=True):
        assert f"states of layer {stated} are" in found[0] and f"they are those of layer {held}" in found[0]


def test_a_final_state_of_another_norm_is_found(tiny_target, dataset, tmp_path):
    def tripled(rows):
        return {number: replace(row, final_hidden=3 * row.final_hidden) for number, row in rows.items()}

    found = problems(recompute(store(tiny_target, dataset.rows, tmp_path, tripled), tiny_target))
    assert len(found) == 8 and "final states are 200% off" in found[0]


def test_the_command(tiny_target, tiny_target_dir, dataset, target_states, tmp_path, capsys):  # noqa: F811
    store(tiny_target, dataset.rows, tmp_path / "good")
    store(tiny_target, dataset.rows, tmp_path / "bad", aux=(1, 3, 5))
    model = ["--model", str(tiny_target_dir), "--device", "cpu", "--sample", "3"]
    assert run_command("features", ["verify", str(tmp_path / "good"), *model]) == 0
    said, count = capsys.readouterr().out, len(dataset.rows)
    assert f"3 of {count} rows computed again by " in said and "tiny: 0 bad" in said
    assert f"warning: {count - 3} rows were not compared with the target; --all compares every one" in said
    everything = ["verify", str(tmp_path / "good"), *model[:-2], "--all"]
    assert run_command("features", everything) == 0
    said = capsys.readouterr().out
    assert f"{count} of {count} rows computed again" in said and "warning" not in said
    with pytest.raises(SystemExit):
        run_command("features", [*everything, "--sample", "3"])
    assert run_command("features", ["verify", str(tmp_path / "good"), *model[:-1], "0"]) == 2
    (tmp_path / "theirs").mkdir()
    write_specforge(tmp_path / "theirs", target_states)
    theirs = ["verify", str(tmp_path / "theirs"), *model, "--final-states", "normed", "--aux-layers"]
    assert run_command("features", [*theirs, "1,3,4"]) == 0
    assert run_command("features", [*theirs, "2,4,5"]) == 1
    assert "they are those of layer 1" in capsys.readouterr().out


def test_another_target_is_refused(tiny_target, dataset, tmp_path):
    reader = store(tiny_target, dataset.rows, tmp_path)
    other = Target(tiny_target.model, tiny_target.tokenizer, name="other", revision="r")
    with pytest.raises(FeatureError, match="model: .*'other'"):
        recompute(reader, other)
    reader.contract = replace(reader.contract, aux_layer_ids=(1, 3, 9))
    with pytest.raises(FeatureError, match=r"names layers \[9\]"):
        recompute(reader, tiny_target)


def test_samples_are_spread():
    assert sample_rows(100, 4) == [12, 37, 62, 87]
    assert sample_rows(3, 8) == [0, 1, 2] and torch.tensor(sample_rows(1000, 64)).diff().min() > 10


@pytest.mark.parametrize("rows", [["--all"], ["--sample", "3"]])
def test_rows_to_compute_again_need_a_target(rows, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run_command("features", ["verify", str(tmp_path), *rows])
    assert f"{rows[0]} says which rows are computed again: give --model, too" in capsys.readouterr().err
