"""The loop as a whole: it learns, resumes bit-equal, accumulates exactly, evaluates, stops on signals."""

import json
import signal

import pytest
import torch
from safetensors.torch import load_file

from modelopt_eagle.errors import CheckpointError, RecipeError
from modelopt_eagle.training import train
from modelopt_eagle.training.trainer import Trainer
from tests.training.runs import interrupt_at, small_recipe, write_conversations


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_conversations(tmp_path_factory.mktemp("data") / "rows.jsonl")


def weights(folder):
    return load_file(folder / "model.safetensors")


def train_counting_steps(recipe, monkeypatch):
    """Train, and say which steps were done."""
    steps, original = [], Trainer.optimise

    def optimise(self, index, window):
        steps.append(index)
        original(self, index, window)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "optimise", optimise)
        return train(recipe), steps


def assert_same_weights(a, b):
    a, b = weights(a), weights(b)
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def test_loss_falls_and_the_folder_is_complete(tiny_target_dir, data, tmp_path):
    result = train(small_recipe(tiny_target_dir, data, tmp_path / "run", "training.epochs=4"))
    assert result.finished and result.steps == 24
    assert result.history[-1]["loss"] < 0.9 * result.history[0]["loss"]
    assert (tmp_path / "run" / "best").resolve() == result.last_checkpoint.resolve()
    names = {file.name for file in result.last_checkpoint.iterdir()}
    assert names == {
        "model.safetensors", "draft_config.json", "optimizer.pt", "rng-0.pt", "trainer_state.json", "recipe.yaml",
        "complete.json",
    }  # fmt: skip
    state = json.loads((result.last_checkpoint / "trainer_state.json").read_text())
    assert state["finished"] and state["step"] == 24
    assert not (tmp_path / "run" / "checkpoint-0").exists()


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("training.gradient_accumulation_steps=4", "training.batch_size=1", "eagle.mix_hidden_states=0.5"),
        ("data.cache_features=memory", "training.optimizer=muon"),
        ("data.cache_features=disk", "training.lr_scheduler=linear"),
        ("training.max_tokens_per_batch=256", "data.max_length=256", "training.gradient_accumulation_steps=2"),
    ],
    ids=["online", "accumulated-mixed", "memory-muon", "disk-linear", "tokens"],
)
def test_resumed_run_equals_an_uninterrupted_one(tiny_target_dir, data, tmp_path, monkeypatch, options):
    whole = train(small_recipe(tiny_target_dir, data, tmp_path / "whole", *options))
    recipe = small_recipe(tiny_target_dir, data, tmp_path / "cut", *options)
    with monkeypatch.context() as patch:
        interrupt_at(patch, 5)
        cut = train(recipe)
    assert not cut.finished and cut.steps == 5
    torch.manual_seed(123)  # the resumed process has another random state
    resumed, steps = train_counting_steps(recipe, monkeypatch)
    assert steps == list(range(5, whole.steps)) and steps[-1] >= 7
    assert resumed.finished and resumed.steps == whole.steps
    assert_same_weights(whole.last_checkpoint, resumed.last_checkpoint)
    assert resumed.history[-1]["loss"] == whole.history[-1]["loss"]


def test_sources_train_the_same(tiny_target_dir, data, tmp_path):
    """Features made in the step, kept in memory or stored give the same head (rows are padded differently)."""
    heads = [
        weights(
            train(small_recipe(tiny_target_dir, data, tmp_path / kind, f"data.cache_features={kind}")).last_checkpoint
        )
        for kind in ("none", "memory", "disk")
    ]
    for other in heads[1:]:
        for name, tensor in heads[0].items():
            torch.testing.assert_close(other[name].float(), tensor.float(), rtol=1e-3, atol=1e-4)


def test_accumulation_equals_one_large_batch(tiny_target_dir, data, tmp_path):
    """Windows are normalised by all their positions, whatever the micro-batches hold."""
    one = train(small_recipe(tiny_target_dir, data, tmp_path / "one", "training.batch_size=4"))
    many = train(
        small_recipe(
            tiny_target_dir, data, tmp_path / "many", "training.batch_size=1", "training.gradient_accumulation_steps=4"
        )
    )
    assert one.steps == many.steps
    for a, b in zip(one.history, many.history, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)


def test_batches_of_tokens_equal_one_large_batch(tiny_target_dir, data, tmp_path):
    """However a step's rows are packed, each supervised token weighs the same; a step reads every row once."""
    window = "data.max_length=200"
    one = train(small_recipe(tiny_target_dir, data, tmp_path / "one", "training.batch_size=24", window))
    many = train(
        small_recipe(
            tiny_target_dir, data, tmp_path / "many", "training.max_tokens_per_batch=400", window,
            "training.gradient_accumulation_steps=50",
        )
    )  # fmt: skip
    assert one.steps == many.steps == 2
    for a, b in zip(one.history, many.history, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)
    for name, tensor in weights(one.last_checkpoint).items():
        torch.testing.assert_close(weights(many.last_checkpoint)[name].float(), tensor.float(), rtol=1e-3, atol=1e-4)


def test_last_window_of_an_epoch_may_be_short(tiny_target_dir, tmp_path):
    """10 micro-batches, accumulation 4: three steps an epoch, none mixes epochs."""
    rows = write_conversations(tmp_path / "ten.jsonl", 10)
    result = train(
        small_recipe(
            tiny_target_dir, rows, tmp_path / "run", "training.batch_size=1",
            "training.gradient_accumulation_steps=4", "training.log_steps=1",
        )
    )  # fmt: skip
    assert result.steps == 6
    assert [entry["epoch"] for entry in result.history] == pytest.approx([1 / 3, 2 / 3, 1, 4 / 3, 5 / 3, 2])


def test_sigterm_saves_at_the_next_boundary(tiny_target_dir, data, tmp_path, monkeypatch):
    interrupt_at(monkeypatch, 3, signal.SIGTERM)
    result = train(small_recipe(tiny_target_dir, data, tmp_path / "run"))
    assert not result.finished
    assert result.last_checkpoint.name == "checkpoint-3" and (result.last_checkpoint / "complete.json").is_file()


def test_second_signal_stops_at_once(tiny_target_dir, data, tmp_path, monkeypatch):
    import os

    def optimise(self, index, window):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("the second signal should have stopped this")

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(Trainer, "optimise", optimise)
    with pytest.raises(KeyboardInterrupt):
        train(small_recipe(tiny_target_dir, data, tmp_path / "run"))
    assert signal.getsignal(signal.SIGINT) is before


def test_finished_run_is_not_trained_again(tiny_target_dir, data, tmp_path, monkeypatch):
    recipe = small_recipe(tiny_target_dir, data, tmp_path / "run")
    first = train(recipe)
    monkeypatch.setattr("modelopt_eagle.training.main.assemble", None)
    again = train(recipe)
    assert again.finished and again.last_checkpoint == first.last_checkpoint
    assert again.best_checkpoint.resolve() == first.best_checkpoint.resolve()


def test_other_recipe_in_the_same_folder_is_refused(tiny_target_dir, data, tmp_path):
    train(small_recipe(tiny_target_dir, data, tmp_path / "run"))
    with pytest.raises(RecipeError, match=r"training\.learning_rate was 0\.003, is 0\.001"):
        train(small_recipe(tiny_target_dir, data, tmp_path / "run", "training.learning_rate=1e-3"))
    with pytest.raises(RecipeError, match=r"resume is never"):
        train(small_recipe(tiny_target_dir, data, tmp_path / "run", "training.resume=never"))


def test_changed_data_is_refused(tiny_target_dir, tmp_path, monkeypatch):
    rows = write_conversations(tmp_path / "rows.jsonl")
    with monkeypatch.context() as patch:
        interrupt_at(patch, 2)
        train(small_recipe(tiny_target_dir, rows, tmp_path / "run"))
    write_conversations(rows, 23)
    with pytest.raises(CheckpointError, match="rows: 24 before, 23 now"):
        train(small_recipe(tiny_target_dir, rows, tmp_path / "run"))


def test_best_checkpoint_is_by_acceptance_length(tiny_target_dir, data, tmp_path, monkeypatch):
    lengths = iter([1.2, 1.7, 1.5, 1.4])
    from modelopt_eagle.training import acceptance as evaluate
    from modelopt_eagle.training.acceptance import WalkResult

    real = evaluate.evaluate

    def walk(step, *args, **kwargs):
        assert step.training
        result = real(step, *args, **kwargs)
        assert step.training and isinstance(result, WalkResult) and result.steps > 0
        wanted = next(lengths)
        return WalkResult(3, [[1] * round((wanted - 1) * 10) + [0] * round((2 - wanted) * 10)])

    monkeypatch.setattr(evaluate, "evaluate", walk)
    result = train(
        small_recipe(
            tiny_target_dir, data, tmp_path / "run", f"data.eval_path={data}", "training.eval_steps=3",
            "training.save_steps=4", "training.save_total_limit=2",
        )
    )  # fmt: skip
    assert [entry["step"] for entry in result.evaluations] == [3, 6, 9, 12]
    assert result.best_checkpoint.name == "checkpoint-6" and result.acceptance_length == pytest.approx(1.7)
    assert (tmp_path / "run" / "best").resolve().name == "checkpoint-6"
    assert {f.name for f in (tmp_path / "run").glob("checkpoint-*")} == {"checkpoint-6", "checkpoint-12"}


def test_dry_run_leaves_an_untrained_head(tiny_target_dir, data, tmp_path):
    recipe = small_recipe(tiny_target_dir, data, tmp_path / "run", "training.dry_run=true")
    result = train(recipe)
    assert result.steps == 0 and not result.finished and result.best_checkpoint.name == "checkpoint-0"
    untrained = weights(result.best_checkpoint)
    recipe.training.dry_run = False
    trained = train(recipe)
    assert trained.finished and not torch.equal(weights(trained.last_checkpoint)["fc.weight"], untrained["fc.weight"])


def test_time_budget_ends_the_run_with_the_learning_rate_at_its_end(tiny_target_dir, data, tmp_path):
    result = train(
        small_recipe(
            tiny_target_dir, data, tmp_path / "run", "training.epochs=5000", "training.time_budget_minutes=0.03",
            "training.log_steps=1",
        )
    )  # fmt: skip
    assert result.finished and result.steps < 1000
    assert 1.8 <= result.seconds < 4
    assert result.history[-1]["learning_rate"] < 0.05 * 3e-3


def test_the_warm_up_trains_the_first_rollout_step_alone(tiny_target_dir, data, tmp_path, monkeypatch):
    """A resume in the middle of the warm-up equals an uninterrupted run, and later steps come in after their share."""
    options = ("eagle.ttt_warmup=0.5", "training.log_steps=1")
    whole = train(small_recipe(tiny_target_dir, data, tmp_path / "whole", *options))
    late = [entry["per_step"][1] for entry in whole.history]
    half = len(late) // 2
    assert not any(late[:half]) and all(late[half:])
    recipe = small_recipe(tiny_target_dir, data, tmp_path / "cut", *options)
    interrupt_at(monkeypatch, 2)
    assert not train(recipe).finished
    monkeypatch.undo()
    assert_same_weights(train(recipe).last_checkpoint, whole.last_checkpoint)
