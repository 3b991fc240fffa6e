"""The whole command on the tiny target: train, interrupted and resumed, then validate, export and the table."""

import importlib
import json
import os
import signal

import pytest
import torch

from modelopt_eagle.cli import train_and_export
from modelopt_eagle.cli.main import run_command
from modelopt_eagle.export import load_draft
from modelopt_eagle.pipeline import read_stamp
from modelopt_eagle.training.trainer import Trainer
from tests.training.runs import interrupt_at, write_conversations


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_conversations(tmp_path_factory.mktemp("data") / "rows.jsonl", 12)


def arguments(target, data, output, *overrides):
    """The command line of a small run of the quick-start recipe."""
    return [
        "--base_model", str(target), "--data", str(data), "--output_dir", str(output), "--recipe", "quickstart",
        "training.epochs=2", "training.batch_size=4", "training.time_budget_minutes=null", "training.report_to=none",
        "eagle.draft_vocab_size=64", "validation.num_samples=2", "validation.max_new_tokens=6",
        "validation.speedup_prompts=1", *overrides,
    ]  # fmt: skip


def test_train_interrupt_resume_validate_export(tiny_target_dir, tiny_target, data, tmp_path, monkeypatch, capfd):
    output = tmp_path / "run"
    command = arguments(tiny_target_dir, data, output)
    with monkeypatch.context() as patch:
        interrupt_at(patch, 2)
        assert train_and_export.main(command) == 130
    assert not (output / "export").exists() and not (output / "report").exists()
    assert train_and_export.main(command) == 0
    shown = capfd.readouterr().out
    for part in ("trained on", "acceptance length", "per position", "speed-up", "vllm serve", "sglang", "trtllm-serve"):
        assert part in shown, part
    (conversion,) = [line.strip() for line in shown.splitlines() if "--to gguf" in line]
    assert conversion.endswith(f"--base-model {tiny_target_dir}"), "the target's folder, also at a line's end"
    assert f"--input {output / 'export'} " in conversion
    measured = json.loads((output / "report" / "acceptance.json").read_text())
    assert {
        "acceptance_length", "ci95", "per_position", "per_category", "speedup", "steps", "prompts", "target", "commit",
    } <= measured.keys()  # fmt: skip
    low, high = measured["ci95"]
    assert 1 <= low <= measured["acceptance_length"] <= high <= 4
    assert f"{measured['acceptance_length']:.3f}" in shown and str(output / "export") in shown
    exported = load_draft(output / "export", tokenizer_hash=tiny_target.identity()["tokenizer_hash"])
    trained = load_draft(output)
    for name, tensor in trained.state_dict().items():
        assert torch.equal(tensor, exported.state_dict()[name]), name
    assert f"{measured['acceptance_length']:.3f}" in (output / "export" / "README.md").read_text()
    resolved = (output / "recipe.yaml").read_text()
    assert "learning_rate: " in resolved and "override" in resolved and "quickstart.yaml:" in resolved

    # the same command again: every stage is passed over, the table stays
    def never(*args, **kwargs):
        raise AssertionError("a finished stage ran again")

    monkeypatch.setattr(Trainer, "fit", never)
    monkeypatch.setattr("modelopt_eagle.validation.measure_acceptance", never)
    monkeypatch.setattr("modelopt_eagle.export.export_checkpoint", never)
    for again in (command, [*command, "--dry_run"]):
        assert train_and_export.main(again) == 0
        assert f"{measured['acceptance_length']:.3f}" in capfd.readouterr().out


@pytest.mark.parametrize("text", ["", '{"path": ', "[]", '"a"', "\xff\x00"])
def test_a_damaged_note_of_a_stage_is_no_note(text, tmp_path):
    file = tmp_path / "measured.json"
    assert read_stamp(file) == {}
    file.write_text(text, encoding="latin-1")
    assert read_stamp(file) == {}
    file.write_text('{"path": "a"}')
    assert read_stamp(file) == {"path": "a"}


@pytest.mark.parametrize(
    "stage",
    [
        "modelopt_eagle.features.compute.compute_features",
        "modelopt_eagle.validation.speed.measure_speed",
        "modelopt_eagle.export.write.compare",
    ],
)
def test_interrupt_in_any_stage_is_resumed_by_the_same_command(stage, tiny_target_dir, data, tmp_path, monkeypatch):
    """Ctrl-C while features are made, while the speed-up is timed, and while the export is compared."""
    output = tmp_path / "run"
    command = arguments(tiny_target_dir, data, output, "training.max_steps=2")
    calls = []

    def interrupted(*args, **kwargs):
        calls.append(stage)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        module, name = stage.rsplit(".", 1)
        for place in {"modelopt_eagle.validation.measure", module}:
            if hasattr(importlib.import_module(place), name):
                patch.setattr(f"{place}.{name}", interrupted)
        assert run_command("train_and_export", command) == 130
    assert calls and not (output / "export").exists()
    assert not list(output.parent.rglob("*.part*"))
    assert run_command("train_and_export", command) == 0
    assert load_draft(output / "export").vocab.size == 64 and (output / "report" / "acceptance.json").is_file()


def test_dry_run_exports_an_untrained_head_then_the_real_run_replaces_it(tiny_target_dir, data, tmp_path, capfd):
    command = arguments(tiny_target_dir, data, tmp_path / "run", "export.overwrite=false", "training.max_steps=1")
    assert train_and_export.main([*command, "--dry_run"]) == 0
    untrained = load_draft(tmp_path / "run" / "export").fc.weight.clone()
    assert not (tmp_path / "run" / "report" / "acceptance.json").exists()
    assert "0 steps" in capfd.readouterr().out
    assert train_and_export.main([*command, "validation.ar_lower_bound=5"]) == 1
    assert not torch.equal(load_draft(tmp_path / "run" / "export").fc.weight, untrained)


def test_export_folder_in_use_is_refused_before_training(tiny_target_dir, data, tmp_path, monkeypatch, capsys):
    (tmp_path / "busy").mkdir()
    (tmp_path / "busy" / "thesis.txt").write_text("mine")
    command = arguments(tiny_target_dir, data, tmp_path / "run", f"export.path={tmp_path / 'busy'}")
    assert run_command("train_and_export", command) == 2
    assert "thesis.txt" in os.listdir(tmp_path / "busy") and not list((tmp_path / "run").glob("checkpoint-*"))
    assert run_command("train_and_export", [*command, "export.overwrite=false"]) == 2
    assert "export.overwrite=true" in capsys.readouterr().err


def test_bad_input_ends_with_code_2_and_no_traceback(tiny_target_dir, data, tmp_path, capsys):
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"messages": [\n')
    assert run_command("train_and_export", arguments(tiny_target_dir, broken, tmp_path / "a")) == 2
    assert "broken.jsonl:1" in capsys.readouterr().err
    assert run_command("train", arguments(tiny_target_dir, data, tmp_path / "b", "training.lr=1")) == 2
    assert "learning_rate" in capsys.readouterr().err


def test_train_command_alone(tiny_target_dir, data, tmp_path, monkeypatch, capfd):
    command = arguments(tiny_target_dir, data, tmp_path / "run")
    with monkeypatch.context() as patch:
        interrupt_at(patch, 1, signal.SIGTERM)
        assert run_command("train", command) == 130
    assert run_command("train", command) == 0
    assert "checkpoint-6" in capfd.readouterr().out
