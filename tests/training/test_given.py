"""``train`` with a loaded target, rows in memory and a callback, against the same run from names and files."""

import json
import logging

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from modelopt_eagle import train
from modelopt_eagle.errors import CheckpointError, DataError, RecipeError, TargetError
from modelopt_eagle.recipe import load_recipe
from modelopt_eagle.target import load_target, load_target_tables
from modelopt_eagle.target.tiny import make_byte_tokenizer, make_tiny_target
from modelopt_eagle.training.given import as_target
from tests.training.runs import small_recipe, write_conversations

SETTINGS = {
    "training": {
        "batch_size": 4, "epochs": 2, "learning_rate": 3e-3, "log_steps": 2, "report_to": "none", "save_steps": None,
    },
    "eagle": {"draft_vocab_size": 64},
}  # fmt: skip


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write_conversations(tmp_path_factory.mktemp("data") / "rows.jsonl", 12)


@pytest.fixture(scope="module")
def rows(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def from_files(tiny_target_dir, file, tmp_path_factory):
    return train(small_recipe(tiny_target_dir, file, tmp_path_factory.mktemp("files") / "run"))


def settings(folder, **more):
    return load_recipe({**SETTINGS, "training": {**SETTINGS["training"], "output_dir": str(folder)}, **more})


def weights(result):
    return load_file(result.last_checkpoint / "model.safetensors")


@pytest.mark.parametrize("form", ["target", "model", "pair"])
def test_a_loaded_target_and_rows_give_the_head_of_names_and_files(
    form, tiny_target_dir, rows, from_files, tmp_path, capfd
):
    model = AutoModelForCausalLM.from_pretrained(tiny_target_dir)
    target = {
        "target": lambda: load_target(tiny_target_dir),
        "model": lambda: model,
        "pair": lambda: (model, AutoTokenizer.from_pretrained(tiny_target_dir)),
    }[form]()
    data = {
        "target": rows,
        "model": (row["messages"] for row in rows),
        "pair": Dataset.from_list([{"messages": row["messages"]} for row in rows]),
    }[form]
    capfd.readouterr()
    result = train(settings(tmp_path / "run"), target=target, data=data, quiet=True)
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err == ""
    assert result.steps == from_files.steps == 6 and result.finished
    for name, tensor in weights(from_files).items():
        assert torch.equal(tensor, weights(result)[name]), name
    recorded = (tmp_path / "run" / "recipe.yaml").read_text()
    assert "train_path: in-memory  # given in Python" in recorded and f"base_model: {tiny_target_dir}" in recorded
    with pytest.raises(DataError, match="were given in Python"):
        train(tmp_path / "run" / "recipe.yaml", target=target)  # finished, but not known to be on these rows
        train(settings(tmp_path / "other", data={"train_path": "in-memory"}), target=target)


def test_the_callback_gets_plain_metrics_and_can_stop(tiny_target, rows, from_files, tmp_path, caplog):
    seen = []

    def watch(metrics):
        seen.append(json.loads(json.dumps(metrics)))
        metrics.clear()  # a copy: the run's own history stays whole
        return metrics is not None and len(seen) == 2

    with caplog.at_level(logging.INFO, logger="modelopt_eagle"):
        stopped = train(settings(tmp_path / "run"), target=tiny_target, data=rows, on_step=watch, quiet=True)
    assert [metrics["step"] for metrics in seen] == [1, 2] and not stopped.finished and stopped.steps == 2
    assert {"loss", "per_step", "accuracy", "learning_rate", "tokens_per_second", "elapsed"} <= seen[0].keys()
    assert len(seen[0]["per_step"]) == 3 and stopped.history[0]["loss"] == seen[0]["loss"]
    assert any("stopped at step 2" in record.getMessage() for record in caplog.records)
    result = train(settings(tmp_path / "run"), target=tiny_target, data=rows, on_step=seen.append, quiet=True)
    assert [metrics["step"] for metrics in seen] == [1, 2, 4, 6] and result.finished
    for name, tensor in weights(from_files).items():
        assert torch.equal(tensor, weights(result)[name]), name


def test_an_error_of_the_callback_is_the_callers(tiny_target, rows, tmp_path):
    def broken(metrics):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train(settings(tmp_path / "run"), target=tiny_target, data=rows, on_step=broken, quiet=True)


@pytest.mark.parametrize("finished", [False, True])
def test_other_rows_or_another_target_are_refused_on_resume(finished, tiny_target, rows, tmp_path):
    """A recipe says in-memory of all rows: what they were is in the checkpoint, also once the run is finished."""
    recipe = settings(tmp_path / "run")
    stop = None if finished else (lambda metrics: True)
    assert train(recipe, target=tiny_target, data=rows, on_step=stop, quiet=True).finished == finished
    with pytest.raises(CheckpointError, match="trained on other features:\n  data: .* before"):
        train(recipe, target=tiny_target, data=rows[1:], quiet=True)
    other = make_tiny_target()
    with torch.no_grad():
        other.model.model.layers[3].mlp.up_proj.weight.mul_(1.5)  # neither embedding nor head tells them apart
    model = as_target((other.model, other.tokenizer))
    model.name = tiny_target.name
    with pytest.raises(CheckpointError, match="trained on other features:\n  target"):
        train(recipe, target=model, data=rows, quiet=True)
    again = train(recipe, target=tiny_target, data=iter(rows), quiet=True)
    assert again.finished and again.steps == 6


def test_evaluation_rows_in_memory(tiny_target, tiny_target_dir, file, rows, tmp_path):
    result = train(settings(tmp_path / "memory"), target=tiny_target, data=rows, eval_data=rows[:5], quiet=True)
    held = write_conversations(tmp_path / "held.jsonl", 5)
    files = train(small_recipe(tiny_target_dir, file, tmp_path / "files", f"data.eval_path={held}"))
    assert result.evaluations == files.evaluations and result.evaluations[-1]["walked"] > 0
    assert any("evaluation: 5 rows of eval_data" in line for line in result.header)


def test_names_of_files_may_be_given(tiny_target, file, from_files, tmp_path):
    result = train(settings(tmp_path / "run"), target=tiny_target, data=file, quiet=True)
    assert torch.equal(weights(result)["fc.weight"], weights(from_files)["fc.weight"])
    assert f"train_path: {file}  # given in Python" in (tmp_path / "run" / "recipe.yaml").read_text()


def test_rows_for_a_target_that_is_only_named(tiny_target_dir, rows, from_files, tmp_path, capfd):
    recipe = settings(tmp_path / "run", model={"base_model": str(tiny_target_dir)})
    result = train(recipe, data=rows, quiet=True)
    assert torch.equal(weights(result)["fc.weight"], weights(from_files)["fc.weight"])
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err == ""


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"model": {"base_model": "other/model"}}, "model.base_model is other/model .*, and the target given is"),
        ({"model": {"chat_template": "{{ x }}"}}, "model.chat_template says how a target is loaded"),
        ({"model": {"revision": "abc", "attn_implementation": "eager"}}, "model.revision, model.attn_implementation"),
        ({"model": {"dtype": "bfloat16"}}, "model.dtype is bfloat16, the target given is in torch.float32"),
        ({"model": {"device": "cuda"}}, "model.device is cuda, the target given is on cpu"),
        ({"target_lora": {"rank": 4}}, "would stay in the one given"),
        ({"data": {"train_path": "rows.jsonl"}}, "data.train_path is rows.jsonl .*, and data= was given"),
        ({"data": {"offline_data_path": "store"}}, "data.offline_data_path holds the rows"),
        ({"data": {"eval_path": "held.jsonl"}}, "data.eval_path is held.jsonl .*, and eval_data= was given"),
        ({"data": {"streaming_server_url": "http://localhost:1"}}, "eval_data= needs the features of a loaded target"),
    ],
)
def test_what_does_not_go_together_is_said(sections, says, tiny_target, rows, tmp_path):
    with pytest.raises(RecipeError, match=says):
        train(settings(tmp_path / "run", **sections), target=tiny_target, data=rows, eval_data=rows)
    assert not (tmp_path / "run").exists()


def test_tables_cannot_make_features_and_other_things_are_no_target(tiny_target_dir, rows, tmp_path):
    with pytest.raises(RecipeError, match="was given as tables only"):
        train(settings(tmp_path / "run"), target=load_target_tables(tiny_target_dir), data=rows)
    with pytest.raises(TargetError, match="expected a loaded transformers model, .* found str"):
        train(settings(tmp_path / "run"), target=str(tiny_target_dir), data=rows)
    with pytest.raises(TargetError, match="give target=\\(model, tokenizer\\)"):
        train(settings(tmp_path / "run"), target=make_tiny_target().model, data=rows)
    built = as_target((make_tiny_target().model, make_byte_tokenizer()))
    assert built.name == "LlamaForCausalLM" and not built.model.training
    assert all(not parameter.requires_grad for parameter in built.model.parameters())
