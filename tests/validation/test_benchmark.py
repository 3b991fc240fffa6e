"""``scripts/benchmark/generation.py`` runs and its parts add up."""

import json
import subprocess
import sys
from pathlib import Path

from modelopt_eagle.target.tiny import make_tiny_target

ROOT = Path(__file__).parents[2]


def test_generation_benchmark(tmp_path):
    make_tiny_target(tmp_path / "target")
    (tmp_path / "prompts.jsonl").write_text('{"id": "a", "category": "c", "turns": ["Hello"]}\n')
    run = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "benchmark" / "generation.py"), "--target", str(tmp_path / "target")]
        + ["--prompts", str(tmp_path / "prompts.jsonl"), "--max_new_tokens", "12", "--steps", "2"]
        + ["--trees", "2,2,5", "--output", str(tmp_path / "rows.json")],
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
