"""The comparison of the losses trains both on one store, measures at each temperature, and goes on where it stopped."""

import json
import sys

import pytest
from test_benchmarks import load

from tests.training.runs import write_conversations


def test_losses_are_compared_on_one_store(tmp_path, monkeypatch, capsys, tiny_target_dir):
    script = load("losses", monkeypatch)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "say 3"}) + "\n" + json.dumps({"prompt": "again"}) + "\n")
    command = ["x", "--output_dir", str(tmp_path / "out"), "--steps", "2", "--seeds", "5", "--rows", "8"]
    command += ["--prompts", str(prompts), "--num_prompts", "2", "--max_new_tokens", "6"]
    command += [
        f"model.base_model={tiny_target_dir}",
        f"data.train_path={write_conversations(tmp_path / 'rows.jsonl', 8)}",
    ]
    command += ["eagle.draft_vocab_size=64", "training.batch_size=4", "training.report_to=none"]
    monkeypatch.setattr(sys, "argv", command)
    script.main()
    rows = json.loads((tmp_path / "out" / "losses.json").read_text())
    assert [(row["loss"], row["seed"], row["steps"]) for row in rows] == [("kl", 5, 2), ("lk", 5, 2)]
    for row in rows:
        assert row["seconds"] > 0 and set(row["acceptance_length"]) == {"T = 0", "T = 1"}
        assert all(1 <= length <= 4 for length in row["acceptance_length"].values())
    weights = [
        next(iter((tmp_path / "out" / f"{loss}-5-2").rglob("model.safetensors"))).read_bytes() for loss in ("kl", "lk")
    ]
    assert weights[0] != weights[1]  # the losses were told apart
    assert "lk" in capsys.readouterr().out
    monkeypatch.setattr(script, "one_run", lambda *a: pytest.fail("a finished run is done again"))
    script.main()
