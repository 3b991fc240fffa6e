"""Runs that train adapters on the target: what falls, what stays, what is saved, and what is refused."""

import runpy
import sys
from pathlib import Path

import peft
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from modelopt_eagle.errors import MissingExtraError, RecipeError, TargetError
from modelopt_eagle.features import OnlineSource
from modelopt_eagle.target import load_target
from modelopt_eagle.target.lora import merge_adapter
from modelopt_eagle.training import train
from modelopt_eagle.training.acceptance import evaluate
from modelopt_eagle.training.data import read_data
from modelopt_eagle.training.step import TeacherTables, TrainingStep
from modelopt_eagle.training.trainer import Trainer
from tests.training.runs import interrupt_at, small_recipe, write_conversations
from tests.training.test_distributed import launch

LORA = ("target_lora.rank=4", "target_lora.target_modules=[q_proj,v_proj,down_proj]", "target_lora.learning_rate=2e-3")
HELD = ("target_lora.preservation_weight=5", "target_lora.detach_teacher=0")
FREE = ("target_lora.preservation_weight=0.1",)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_conversations(tmp_path_factory.mktemp("data") / "rows.jsonl")


def head_of(checkpoint: Path):
    return load_file(checkpoint / "model.safetensors")


def adapter_of(checkpoint: Path):
    return load_file(checkpoint / "target_adapter" / "adapter_model.safetensors")


def assert_equal(a: dict, b: dict):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


@pytest.fixture(scope="module")
def run(tiny_target_dir, data, tmp_path_factory):
    """Four epochs with adapters, evaluated on the training rows."""
    output = tmp_path_factory.mktemp("lora") / "run"
    return train(
        small_recipe(tiny_target_dir, data, output, "training.epochs=4", f"data.eval_path={data}", *LORA, *HELD)
    )


def test_the_loss_falls_further_than_without_adapters(tiny_target_dir, data, tmp_path, run):
    plain = train(small_recipe(tiny_target_dir, data, tmp_path / "plain", "training.epochs=4"))
    free = train(small_recipe(tiny_target_dir, data, tmp_path / "free", "training.epochs=4", *LORA, *FREE))
    drifts = [[entry["preservation_kl"] for entry in result.history] for result in (run, free)]
    assert run.history[0]["step"] == 1 and run.history[0]["loss"] == plain.history[0]["loss"]
    assert drifts[0][0] == drifts[1][0] == 0
    # held by the preservation term the target stays near itself, and the head still gains
    assert drifts[0][-1] > 0 and max(drifts[0]) < 0.1
    assert run.history[-1]["loss"] < plain.history[-1]["loss"] - 0.02
    # with a small weight both go further
    assert free.history[-1]["loss"] < run.history[-1]["loss"] - 0.2
    assert drifts[1][-1] > 4 * drifts[0][-1]


def test_the_checkpoint_holds_a_peft_adapter_that_was_evaluated(tiny_target_dir, data, tmp_path, run):
    """The last evaluation is that of the head over the target with the adapter merged."""
    target = load_target(tiny_target_dir)
    other = peft.PeftModel.from_pretrained(load_target(tiny_target_dir).model, run.last_checkpoint / "target_adapter")
    ids = torch.arange(20, 60)[None]
    merge_adapter(target, run.last_checkpoint)
    torch.testing.assert_close(target.model(input_ids=ids).logits, other(input_ids=ids).logits, rtol=1e-4, atol=1e-4)

    from modelopt_eagle.export import load_draft

    module = load_draft(run.last_checkpoint)
    assert module.config.extra["target_adapter"] == {
        "rank": 4, "alpha": 16, "modules": ["down_proj", "q_proj", "v_proj"], "first": 0,
    }  # fmt: skip
    recipe = small_recipe(tiny_target_dir, data, tmp_path)
    step = TrainingStep(
        module, TeacherTables.make(target.embedding.weight, target.head, module.target_ids), recipe.eagle
    )
    source = OnlineSource(target, read_data(recipe, target, str(data)))
    walk = evaluate(step, source, Accelerator(cpu=True), batch_size=4, num_steps=recipe.validation.num_steps)
    assert walk.acceptance_length == run.evaluations[-1]["acceptance_length"]


@pytest.mark.parametrize(
    "options",
    [
        ("target_lora.warmup_steps=4",),
        ("training.gradient_accumulation_steps=4", "training.batch_size=1", "target_lora.gradient_checkpointing=true",
         "training.optimizer=muon"),
    ],
    ids=["warm-up", "accumulated-recomputed-muon"],
)  # fmt: skip
def test_resumed_run_equals_an_uninterrupted_one(tiny_target_dir, data, tmp_path, monkeypatch, options):
    whole = train(small_recipe(tiny_target_dir, data, tmp_path / "whole", *LORA, *options))
    recipe = small_recipe(tiny_target_dir, data, tmp_path / "cut", *LORA, *options)
    with monkeypatch.context() as patch:
        interrupt_at(patch, 5)
        cut = train(recipe)
    assert not cut.finished and cut.steps == 5
    torch.manual_seed(123)  # the resumed process has another random state
    resumed = train(recipe)
    assert resumed.finished and resumed.steps == whole.steps == 12
    assert_equal(head_of(whole.last_checkpoint), head_of(resumed.last_checkpoint))
    assert_equal(adapter_of(whole.last_checkpoint), adapter_of(resumed.last_checkpoint))
    assert any(tensor.any() for name, tensor in adapter_of(cut.last_checkpoint).items() if "lora_B" in name)
    assert resumed.history[-1]["loss"] == whole.history[-1]["loss"]


def test_in_the_warm_up_the_head_trains_as_without_adapters(tiny_target_dir, data, tmp_path):
    plain = train(small_recipe(tiny_target_dir, data, tmp_path / "plain"))
    waiting = train(small_recipe(tiny_target_dir, data, tmp_path / "lora", *LORA, "target_lora.warmup_steps=12"))
    assert_equal(head_of(plain.last_checkpoint), head_of(waiting.last_checkpoint))
    assert not any(tensor.any() for name, tensor in adapter_of(waiting.last_checkpoint).items() if "lora_B" in name)
    assert [entry["preservation_kl"] for entry in waiting.history] == [0] * len(waiting.history)


def test_accumulation_equals_one_large_batch(tiny_target_dir, data, tmp_path):
    """Loss and preservation are shares of one sum."""
    settings = ("training.epochs=1", *LORA, "target_lora.detach_teacher=0")
    large = train(small_recipe(tiny_target_dir, data, tmp_path / "large", *settings))
    small = train(
        small_recipe(
            tiny_target_dir, data, tmp_path / "small", *settings, "training.batch_size=1",
            "training.gradient_accumulation_steps=4",
        )
    )  # fmt: skip
    for name, tensor in adapter_of(large.last_checkpoint).items():
        torch.testing.assert_close(adapter_of(small.last_checkpoint)[name], tensor, rtol=1e-3, atol=1e-4, msg=name)
    drifts = [result.history[-1]["preservation_kl"] for result in (large, small)]
    assert drifts[0] == pytest.approx(drifts[1], rel=1e-3)


def test_two_processes_train_as_one_does(tiny_target_dir, tmp_path):
    """11 rows: the second process has nothing in its last micro-batch. The first step is the head's alone."""
    rows = write_conversations(tmp_path / "rows.jsonl", 11)
    settings = (*LORA, "target_lora.detach_teacher=0", "target_lora.warmup_steps=1", "training.batch_size=1")
    launch(tiny_target_dir, rows, tmp_path / "two", *settings, "training.gradient_accumulation_steps=2")
    one = train(
        small_recipe(tiny_target_dir, rows, tmp_path / "one", *settings, "training.gradient_accumulation_steps=4")
    )
    two = tmp_path / "two" / "checkpoint-6"
    for of in (head_of, adapter_of):
        for name, tensor in of(one.last_checkpoint).items():
            torch.testing.assert_close(of(two)[name], tensor, rtol=1e-3, atol=2e-4, msg=name)


def test_a_damaged_adapter_makes_the_checkpoint_incomplete(tiny_target_dir, data, tmp_path, monkeypatch, capsys):
    recipe = small_recipe(tiny_target_dir, data, tmp_path / "run", *LORA, "training.save_steps=2")
    with monkeypatch.context() as patch:
        interrupt_at(patch, 4)
        train(recipe)
    (tmp_path / "run" / "checkpoint-4" / "target_adapter" / "adapter_model.safetensors").unlink()
    train(recipe)
    said = capsys.readouterr().err
    assert "checkpoint-4 is passed over: target_adapter/adapter_model.safetensors is missing" in said
    assert "going on from" in said and "checkpoint-2" in said


@pytest.mark.parametrize(
    ("overrides", "error", "says"),
    [
        (["target_lora.target_modules=[qkv]"], TargetError, "no linear module qkv .* there are down_proj"),
        (["target_lora.first_layer=8"], TargetError, "first_layer is 8; .* has layers 0 to 7"),
        (["data.cache_features=memory"], RecipeError, "takes them from before"),
    ],
)
def test_bad_input_is_said_before_features_are_made(
    tiny_target_dir, data, tmp_path, monkeypatch, overrides, error, says
):
    from modelopt_eagle.training import run as run_module

    monkeypatch.setattr(run_module, "from_target", lambda *_: pytest.fail("features were made"))
    with pytest.raises(error, match=says):
        train(small_recipe(tiny_target_dir, data, tmp_path / "run", "target_lora.rank=4", *overrides))


@pytest.mark.parametrize(
    ("place", "says"), [(None, "lies on several devices"), (torch.device("cuda:1"), "lies on cuda:1")]
)
def test_a_target_on_other_devices_than_the_head_is_refused(tiny_target_dir, data, tmp_path, monkeypatch, place, says):
    monkeypatch.setattr("modelopt_eagle.target.lora.TargetAdapter.device", place)
    with pytest.raises(RecipeError, match=f"{says}: .*model.device"):
        train(small_recipe(tiny_target_dir, data, tmp_path / "run", *LORA))


def test_a_missing_package_is_named(tiny_target_dir, data, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(MissingExtraError, match=r"peft .*pip install -e .*\[lora\]"):
        train(small_recipe(tiny_target_dir, data, tmp_path / "run", "target_lora.rank=4"))


def test_other_adapters_in_the_same_folder_are_refused(tiny_target_dir, data, tmp_path, monkeypatch):
    recipe = small_recipe(tiny_target_dir, data, tmp_path / "run", *LORA)
    with monkeypatch.context() as patch:
        interrupt_at(patch, 2)
        train(recipe)
    with pytest.raises(RecipeError, match="target_lora.rank was 4, is 8"):
        train(small_recipe(tiny_target_dir, data, tmp_path / "run", *LORA, "target_lora.rank=8"))


def test_weights_that_are_not_finite_are_not_saved(tiny_target_dir, data, tmp_path, monkeypatch):
    original = Trainer.optimise

    def optimise(self, index, window):
        original(self, index, window)
        with torch.no_grad():
            self.run.adapter.parameters()[0].fill_(float("nan"))

    monkeypatch.setattr(Trainer, "optimise", optimise)
    with pytest.raises(ValueError, match="finite|nan"):
        train(small_recipe(tiny_target_dir, data, tmp_path / "run", *LORA))
    assert [folder.name for folder in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-0"]


def test_the_benchmark_of_the_docs_trains_on_the_shipped_text(monkeypatch, capsys):
    script = Path(__file__).parents[2] / "scripts" / "benchmark" / "target_lora.py"
    names = runpy.run_path(str(script))
    monkeypatch.setitem(names["main"].__globals__, "WEIGHTS", (1,))
    monkeypatch.setitem(names["main"].__globals__, "CHANCES", (0,))
    monkeypatch.setattr(sys, "argv", [str(script), "--rows", "4", "--epochs", "1"])
    names["main"]()
    plain, adapted = capsys.readouterr().out.splitlines()
    assert plain.startswith("without adapters: loss ") and adapted.startswith("| 1 | ") and ", KL " in adapted
