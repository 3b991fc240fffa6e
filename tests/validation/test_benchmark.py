"""``scripts/benchmark/generation.py`` and ``validation.py`` run and their parts add up."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from modelopt_eagle.export import export_checkpoint
from modelopt_eagle.target.tiny import make_tiny_target

ROOT = Path(__file__).parents[2]


def test_generation_benchmark(tmp_path):
    make_tiny_target(tmp_path / "target")
    (tmp_path / "prompts.jsonl").write_text('{"id": "a", "category": "c", "turns": ["Hello"]}\n')
    run = subprocess.run(
        [
            sys.executable,
            str(ROOT / "scripts" / "benchmark" / "generation.py"),
            "--target",
            str(tmp_path / "target"),
            "--prompts",
            str(tmp_path / "prompts.jsonl"),
            "--max_new_tokens",
            "12",
            "--steps",
            "2",
            "--trees",
            "2,2,5",
            "--output",
            str(tmp_path / "rows.json"),
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert run.returncode == 0, run.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["draft"] for row in rows] == ["chain 2", "tree 2,2,5"]
    for row in rows:
        parts = row["draft_step"] + row["verify_step"] + row["other_step"]
        assert abs(row["break_even"] - parts / row["plain_step"]) < 1e-9
        assert abs(row["efficiency"] - row["speedup"] / row["acceptance_length"]) < 1e-9
        assert f"{row['speedup']:.2f}x" in run.stdout


def test_validation_benchmark(tmp_path, good_head):
    """All contenders judge the same answers."""
    target = make_tiny_target(tmp_path / "target")
    export_checkpoint(good_head, None, tmp_path / "head", target=target)
    command = [
        sys.executable, str(ROOT / "scripts" / "benchmark" / "validation.py"), "--target", str(tmp_path / "target"),
        "--model_path", str(tmp_path / "head"), "--num_prompts", "3", "--context", "40", "--max_new_tokens", "10",
        "--batch_sizes", "1", "2", "--output", str(tmp_path / "rows.json"),
    ]  # fmt: skip
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    names = ["generator, batch 1", "generator, batch 2", "walk, batch 1", "walk, batch 8"]
    assert [row["name"] for row in rows] == names
    assert "parts from" not in run.stdout
    assert len({row["rounds"] for row in rows}) == 1 and len({row["tokens"] for row in rows}) == 1
    assert 3 < rows[0]["tokens"] <= 30
    for row in rows:
        assert abs(row["rate"] - row["tokens"] / row["used"]) < 1e-9 and f"{row['rate']:.2f}" in run.stdout


def test_an_interpreter_without_modelopt_is_said(tmp_path):
    make_tiny_target(tmp_path / "target")
    script = runpy.run_path(str(ROOT / "scripts" / "benchmark" / "validation.py"))
    asked = ["--target", str(tmp_path / "target"), "--model_path", "head", "--modelopt_python", "/bin/false"]
    with pytest.raises(SystemExit, match="modelopt's validation failed"):
        script["modelopt_rows"]([[1, 2, 3]], script["build_parser"]().parse_args(asked))
