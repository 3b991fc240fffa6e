"""Numbers that are not finite are found in their step, named by their rows, and never applied."""

import json

import pytest
import torch
from accelerate import Accelerator

from modelopt_eagle.errors import RecipeError, TrainingError
from modelopt_eagle.export import load_draft
from modelopt_eagle.features import OnlineSource
from modelopt_eagle.recipe import load_recipe
from modelopt_eagle.training import train
from modelopt_eagle.training.stability import FEWEST, MOST_IN_A_ROW, StepWatch
from modelopt_eagle.training.trainer import Trainer
from tests.training.runs import small_recipe, write_conversations


@pytest.fixture
def poisoned(monkeypatch):
    """A source that gives one row states that are not numbers."""
    original = OnlineSource.load

    def load(self, indices):
        batch = original(self, indices)
        for number, row_id in enumerate(batch.row_ids):
            if row_id == "row-5":
                batch.aux_hidden[0, batch.document_ids[0] == number] = float("nan")
        return batch

    monkeypatch.setattr(OnlineSource, "load", load)


def run(tiny_target_dir, tmp_path, *overrides):
    data = write_conversations(tmp_path / "rows.jsonl", 24)
    return train(small_recipe(tiny_target_dir, data, tmp_path / "run", "training.log_steps=100", *overrides))


def test_a_row_that_is_no_number_stops_its_step_and_is_named(poisoned, tiny_target_dir, tmp_path):
    with pytest.raises(TrainingError) as caught:
        run(tiny_target_dir, tmp_path, "training.save_steps=1")
    message = str(caught.value)
    assert "the loss is not finite" in message and "'row-5'" in message and "training.nonfinite: skip" in message
    step = int(message.split("step ")[1].split(":")[0])
    good = load_draft(tmp_path / "run" / f"checkpoint-{step - 1}")  # the step before it was saved, and is whole
    assert all(torch.isfinite(tensor.float()).all() for tensor in good.state_dict().values())
    assert f"checkpoint-{step - 1} is the newest good" in message


def test_such_steps_can_be_left_out_and_are_counted(poisoned, tiny_target_dir, tmp_path, capsys):
    result = run(tiny_target_dir, tmp_path, "training.nonfinite=skip")
    state = json.loads((result.last_checkpoint / "trainer_state.json").read_text())
    assert result.steps == 12 and len(state["skipped"]) == 2  # once an epoch
    assert all("row-5" in entry["rows"] and len(entry["rows"]) == 4 for entry in state["skipped"])
    assert result.history[-1]["skipped_steps"] == 2
    assert all(torch.isfinite(t.float()).all() for t in load_draft(result.last_checkpoint).state_dict().values())
    assert "'row-5'" in capsys.readouterr().err


class Batch:
    def __init__(self, *row_ids):
        self.row_ids = row_ids


def watch(policy, said):
    return StepWatch(policy, Accelerator(cpu=True), said.append, lambda: "lower the rate")


def test_a_gradient_that_overflows_is_found_though_the_loss_is_finite():
    with pytest.raises(TrainingError, match="step 4: the gradient is not finite; rows 'a', 'b': lower the rate"):
        watch("stop", []).sound(3, [Batch("a"), Batch("b")], [torch.tensor(1.0)] * 2, [torch.tensor(float("inf"))])


class OneOfTwo:
    """An accelerator beside a process whose loss is not finite, and which has a row of its own."""

    num_processes = 2

    def __init__(self, bad, rows, monkeypatch, norm=1.0):
        self.bad, self.rows, self.norm = bad, rows, norm
        monkeypatch.setattr("accelerate.utils.gather_object", lambda own: [*own, *self.rows.pop(0)])

    def reduce(self, value, how):
        return value + torch.tensor([self.bad, self.norm])  # [2] not finite, gradient norm


@pytest.mark.parametrize(
    ("bad", "theirs", "says"),
    [
        (1, [["their bad row"]], "the loss is not finite; rows 'their bad row'"),
        (1, [[], ["their row"]], "the gradient is not finite; rows 'ours', 'their row'"),
    ],
)
def test_the_rows_of_other_processes_are_named(monkeypatch, bad, theirs, says):
    accelerator, said = OneOfTwo(bad, theirs, monkeypatch), []
    watched = StepWatch("skip", accelerator, said.append, lambda: "")
    assert not watched.sound(0, [Batch("ours")], [torch.tensor(1.0)], [torch.tensor(1.0)])
    assert said == [f"step 1: {says}: left out"]


def test_many_bad_steps_in_a_row_stop_a_run_that_skips():
    said = []
    watched, bad = watch("skip", said), [torch.tensor(float("nan"))]
    for index in range(MOST_IN_A_ROW - 1):
        assert not watched.sound(index, [Batch("a")], bad, [torch.tensor(1.0)])
    with pytest.raises(TrainingError, match="10 steps in a row"):
        watched.sound(MOST_IN_A_ROW, [Batch("a")], bad, [torch.tensor(1.0)])
    assert len(said) == MOST_IN_A_ROW - 1


def test_a_gradient_norm_out_of_the_usual_is_said_with_its_rows():
    said = []
    watched = watch("stop", said)
    for index in range(FEWEST):
        assert watched.sound(index, [Batch("usual")], [torch.tensor(1.0)], [torch.tensor(2.0)])
    assert watched.sound(FEWEST, [Batch("odd"), None], [torch.tensor(1.0)] * 2, [torch.tensor(50.0)])
    assert said == [f"step {FEWEST + 1}: the gradient norm is 50, 25 times the usual one; rows 'odd'"]


def test_an_outlier_names_the_rows_of_every_process(monkeypatch):
    said, accelerator = [], OneOfTwo(0, [["theirs"]], monkeypatch, 2.0)
    watched = StepWatch("stop", accelerator, said.append, lambda: "")
    for index in range(FEWEST):
        assert watched.sound(index, [Batch("usual")], [torch.tensor(1.0)], [torch.tensor(2.0)])
    accelerator.norm = 50.0
    assert watched.sound(FEWEST, [None], [torch.tensor(1.0)], [torch.tensor(50.0)])  # no row of its own
    assert said == [f"step {FEWEST + 1}: the gradient norm is 50, 25 times the usual one; rows 'theirs'"]


def test_training_ends_when_acceptance_grows_no_longer(tiny_target_dir, tmp_path, monkeypatch):
    lengths = iter([1.2, 1.4, 1.3, 1.4, 1.5])

    def evaluate(self):
        length = next(lengths)
        better = self.state.best_value is None or length > self.state.best_value
        self.state.evaluations.append({"step": self.state.step, "acceptance_length": length})
        if better:
            self.state.best_step, self.state.best_value = self.state.step, length
        return better

    monkeypatch.setattr(Trainer, "evaluate", evaluate)
    options = ("training.eval_steps=1", "training.early_stopping=2", "training.epochs=4")
    result = run(tiny_target_dir, tmp_path, *options, f"data.eval_path={tmp_path / 'rows.jsonl'}")
    assert result.finished and result.steps == 4 and result.acceptance_length == 1.4
    assert result.best_checkpoint.name == "checkpoint-2"


def test_early_stopping_needs_evaluations():
    with pytest.raises(RecipeError, match="set eval_steps"):
        load_recipe(None, ["training.early_stopping=2", "training.eval_steps=null"])
