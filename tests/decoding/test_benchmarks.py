"""The benchmarks of decoding run to their end on this machine."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

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
    for step in ("large_trees", "large_moves", "graph_replay", "compiled_step", "draft_loop"):
        assert found[step] == "equal"
    assert len(found["draft_loop ms"]) == 8 and len(found["rows"]) == 12
    assert "no kernel and no graph was checked" in capsys.readouterr().out


def test_a_draft_loop_that_differs_fails_the_check(monkeypatch):
    script = load("gpu_check", monkeypatch)
    record = script.Repeat.record

    def wrong(self, region, inputs):
        run = record(self, region, inputs)
        return lambda: tuple(tensor * 0 for tensor in run())

    monkeypatch.setattr(script.Repeat, "record", wrong)
    with pytest.raises(AssertionError, match="chain 5: the graph's drafts are accepted elsewhere"):
        script.draft_loop("cpu")


def test_linear_layers(monkeypatch, capsys):
    script = load("cpu_linear", monkeypatch)
    monkeypatch.setattr(sys, "argv", ["cpu_linear.py", "--shapes", "256x512", "--rows", "1", "4"])
    script.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and all("oneDNN packed" in line for line in lines[1:])
