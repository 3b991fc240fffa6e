"""The benchmarks of decoding run to their end on this machine."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from heads import make_head

from modelopt_eagle.export import export_checkpoint
from modelopt_eagle.target import load_target

FOLDER = Path(__file__).parents[2] / "scripts" / "benchmark"


def load(name, monkeypatch):
    """A script of the folder as a module; they import each other by name."""
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_dry_run_of_the_gpu_check(tmp_path, monkeypatch, capsys):
    script = load("gpu_check", monkeypatch)
    report = tmp_path / "report.json"
    assert script.main(["--dry_run", "--cases", "1", "--json", str(report)]) == script.NO_CUDA
    found = json.loads(report.read_text())
    for step in script.STEPS:
        assert found[step] == "equal"
    assert len(found["draft_loop ms"]) == 8 and len(found["whole_round ms"]) == 12 and len(found["rows"]) == 12
    assert "no kernel and no graph was checked" in capsys.readouterr().out


@pytest.fixture(scope="module")
def taught():
    """A head that knows the answers, as the GPU check teaches it."""
    with pytest.MonkeyPatch.context() as patch:
        return load("gpu_check", patch).taught_pair("cpu", torch.float32)


STALE = {"tokens": 0, "features": 1, "places": 2, "roots": 3, "keys": 4}
"""What a replay may have kept from its recording, and its place among the region's inputs."""


@pytest.mark.parametrize("what", [*STALE, "zeros"])
def test_a_stale_replay_fails_the_check(monkeypatch, taught, what):
    """The control of each kind; with an untrained head frozen lengths passed as equal."""
    script = load("gpu_check", monkeypatch)
    monkeypatch.setattr(script, "taught_pair", lambda device, dtype: taught)
    record = script.Repeat.record

    def stale(self, region, inputs):
        if what == "zeros":
            run = record(self, region, inputs)
            return lambda: tuple(tensor * 0 for tensor in run())
        kept = list(inputs)
        kept[STALE[what]] = inputs[STALE[what]].clone()
        return record(self, region, kept)

    monkeypatch.setattr(script.Repeat, "record", stale)
    shape = "tree 8,5,33" if what == "roots" else "chain 5"
    monkeypatch.setattr(script, "SHAPES", {shape: script.SHAPES[shape]})
    with pytest.raises(AssertionError, match=f"{shape}, float32: tokens of round .* differs"):
        script.draft_loop("cpu")


WHOLE = {"state": 0, "features": 1, "draft keys": 2, "target keys": 4}
"""The same of a whole round."""


@pytest.mark.parametrize("what", WHOLE)
def test_a_stale_whole_round_fails_the_check(monkeypatch, taught, what):
    script = load("gpu_check", monkeypatch)
    monkeypatch.setattr(script, "taught_pair", lambda device, dtype: taught)
    record = script.Repeat.record

    def stale(self, region, inputs):
        kept = list(inputs)
        kept[WHOLE[what]] = inputs[WHOLE[what]].clone()
        return record(self, region, kept)

    monkeypatch.setattr(script.Repeat, "record", stale)
    monkeypatch.setattr(script, "SHAPES", {"chain 5": script.SHAPES["chain 5"]})
    with pytest.raises(AssertionError, match="chain 5, float32: .* of round .* differs"):
        script.whole_round("cpu")


def test_a_step_that_dies_is_named_and_the_others_run(tmp_path, monkeypatch):
    script = load("gpu_check", monkeypatch)
    monkeypatch.setattr(script.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(script.benchmark, "machine", lambda device: "a machine")
    steps = []

    def run(command, check, timeout):
        name, answer = command[command.index("--step") + 1], Path(command[-1])
        steps.append(name)
        if name == "graph_replay":
            return SimpleNamespace(returncode=-6)
        if name == "large_moves":
            raise subprocess.TimeoutExpired(command, timeout)
        answer.write_text(json.dumps({name: "equal", "wrong": False, "fast": True}))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(script.subprocess, "run", run)
    report = tmp_path / "report.json"
    assert script.main(["--json", str(report)]) == script.WRONG
    found = json.loads(report.read_text())
    assert steps == [*script.STEPS, "random_cases", "speed"] and steps[0] == "whole_round"
    assert found["graph_replay"] == "its process died with exit code -6"
    assert "more than 150 seconds" in found["large_moves"] and found["compiled_step"] == "equal"


def test_linear_layers(monkeypatch, capsys):
    script = load("cpu_linear", monkeypatch)
    monkeypatch.setattr(sys, "argv", ["cpu_linear.py", "--shapes", "256x512", "--rows", "1", "4"])
    script.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and all("oneDNN packed" in line for line in lines[1:])


@pytest.mark.parametrize("decodes", [False, True])
def test_passes_and_speeds_by_context(tmp_path, monkeypatch, capsys, tiny_target_dir, decodes):
    generation = load("generation", monkeypatch)
    out = tmp_path / "passes.json"
    command = ["x", "--target", str(tiny_target_dir), "--contexts", "20", "60", "--repeats", "2", "--output", str(out)]
    if decodes:
        head = tmp_path / "head"
        export_checkpoint(make_head(load_target(tiny_target_dir)), None, head)
        command += ["--model_path", str(head), "--steps", "2", "--trees", "--num_prompts", "2", "--max_new_tokens", "8"]
    monkeypatch.setattr("sys.argv", command)
    generation.main()
    found, printed = json.loads(out.read_text()), capsys.readouterr().out
    rows = found["passes"] if decodes else found
    assert [row["context"] for row in rows] == [20, 60] and set(rows[0]["seconds"]) == {"1", "4", "9"}
    assert all(row["transformers"] > 0 for row in rows) and "4 over 1" in printed
    if decodes:
        assert [(row["context"], row["draft"]) for row in found["speeds"]] == [(20, "chain 2"), (60, "chain 2")]
        for row in found["speeds"]:
            spent = row["draft_step"] + row["verify_step"] + row["other_step"]
            assert row["decoding_speedup"] == pytest.approx(row["acceptance_length"] * row["plain_step"] / spent)
            assert 1 <= row["acceptance_length"] <= 3 and row["prompts"] == 2
        assert "80 % is the aim" in printed


def test_long_prompts_end_with_their_own_chat(monkeypatch):
    generation = load("generation", monkeypatch)
    chats = [[1, 2, 3], [4, 5]]
    assert generation.long_prompt(chats, 1, 4) == [2, 3, 4, 5]
    assert generation.long_prompt(chats, 0, 9) == [5, 1, 2, 3, 4, 5, 1, 2, 3]
