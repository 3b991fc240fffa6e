"""Heads trained for a minute, exported, and judged by a real vLLM; and exports that it must not pass."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from modelopt_eagle.errors import CheckpointError
from modelopt_eagle.export import load_draft
from tests.engine.heads import HEADS, ROOT

FIRST = 0.15
"""Least share of first drafted tokens that a head must get right, so that a wrong one is seen."""


@pytest.mark.parametrize("name", HEADS)
def test_the_engine_serves_the_head_as_it_was_trained(name, head, check):
    trained = head(name)
    report = check.check(trained.export, checkpoint=trained.checkpoint)
    print("\n" + name + "\n" + report.table())
    assert report.passed, report.table()
    assert report.our_per_position[0] > FIRST and report.drafts > 100
    assert report.engine_version == "0.32.0" and report.left_out == []


def test_every_value_is_among_the_heads(head):
    configs = {name: load_draft(head(name).export).config for name in HEADS}
    assert {config.num_hidden_layers for config in configs.values()} == {1, 2}
    assert {config.num_aux for config in configs.values()} == {2, 3}
    assert {config.draft_vocab_size < config.vocab_size for config in configs.values()} == {True, False}
    assert len({config.aux_layer_ids for config in configs.values()}) == 3
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "attention_bias")
    assert all(getattr(configs["flags"], flag) and not getattr(configs["plain"], flag) for flag in flags)


@pytest.fixture
def edited(tmp_path):
    """``edited(export, change)``: a copy of an exported folder whose config and tensors went through ``change``."""

    def edit(export, change):
        folder = shutil.copytree(export, tmp_path / "edited")
        config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
        change(config, tensors)
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return edit


def test_layers_that_the_engine_does_not_find_are_noticed(head, check, edited):
    """Without the top-level ids vLLM captures its default triple; a reader of the nested ones sees no fault."""
    folder = edited(head("deep").export, lambda config, tensors: config.pop("eagle_aux_hidden_state_layer_ids"))
    report = check.check(folder)
    print("\n" + report.table())
    assert not report.passed and any("acceptance at position 1" in failure for failure in report.failures)
    assert report.our_per_position[0] > report.per_position[0] + 0.05


def test_layers_off_by_one_are_noticed(head, check, edited):
    """Outputs where inputs are asked for: the fault of the two numbering habits."""

    def off_by_one(config, tensors):
        config["eagle_aux_hidden_state_layer_ids"] = [i - 1 for i in config["eagle_aux_hidden_state_layer_ids"]]

    folder = edited(head("plain").export, off_by_one)
    with pytest.raises(CheckpointError, match="which were captured in training"):
        check.check(folder)
    report = check.check(folder, checkpoint=head("plain").checkpoint)
    print("\n" + report.table())
    assert not report.passed


def shifted(config, tensors):
    """Every draft token names the token after its own; the map still keeps its invariants."""
    tensors["d2t"] = tensors["d2t"] + 1
    tensors["t2d"] = torch.roll(tensors["t2d"], 1)


def test_a_shifted_map_is_noticed_by_the_command(head, prompts, engine_python, edited, tmp_path):
    folder, result = edited(head("plain").export, shifted), tmp_path / "result.json"
    command = [sys.executable, ROOT / "scripts" / "check_serving.py", "--export_path", folder, "--base_model"]
    command += ["quickstart", "--checkpoint", head("plain").checkpoint, "--prompts", prompts, "--num_samples", "4"]
    command += ["--max_new_tokens", "24", "--engine-python", engine_python, "--json", result]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "NOT SERVED RIGHT" in done.stdout and "Traceback" not in done.stderr
    found = json.loads(result.read_text())
    assert not found["passed"] and found["per_position"][0] < 0.05 < found["our_per_position"][0]


def test_a_map_that_is_missing_or_broken_never_reaches_the_engine(head, check, edited, tmp_path):
    def absent(config, tensors):
        del tensors["d2t"]

    def absolute(config, tensors):
        tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))

    for change in (absent, absolute):
        with pytest.raises(CheckpointError, match="d2t|map"):
            check.check(edited(head("plain").export, change))
        shutil.rmtree(tmp_path / "edited")
