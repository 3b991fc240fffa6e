"""What killed runs leave behind is swept at the next start and counted in one line; a dump goes on bit for bit."""

import logging
import os
import subprocess
import sys

from modelopt_eagle.training import train
from tests.training.runs import small_recipe, write_conversations


def dead_pid():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    return process.pid


def test_leftovers_are_swept_and_counted(tiny_target_dir, tmp_path, caplog):
    run, pid = tmp_path / "run", dead_pid()
    recipe = small_recipe(tiny_target_dir, write_conversations(tmp_path / "data.jsonl"), run)
    unfinished = run / "checkpoint-3"
    unfinished.mkdir(parents=True)
    (unfinished / "model.safetensors").write_bytes(bytes(100))
    (unfinished / f".complete.json.part-{pid}").write_text("{")
    (run / ".checkpoint-5.part").mkdir()
    (run / f".recipe.yaml.part-{pid}").write_text("half")
    (run / "report").mkdir()
    (run / "report" / f".acceptance.json.part-{pid}").write_text("half")
    mine = run / "checkpoint-7"  # not of ours: it holds something else
    mine.mkdir()
    (mine / "notes.txt").write_text("kept")
    alive = run / "report" / f".acceptance.json.part-{os.getpid()}"
    alive.write_text("being written")
    with caplog.at_level(logging.INFO, "modelopt_eagle"):
        assert train(recipe).finished
    lines = [line for line in caplog.messages if "killed runs" in line]
    assert lines == [f"{run}: removed what killed runs had left: 1 unfinished checkpoints, 3 temporary files"]
    assert not unfinished.exists() and (mine / "notes.txt").is_file() and alive.is_file()
    left = [path.name for path in run.rglob(".*") if "part" in path.name]
    assert left == [alive.name]
    caplog.clear()
    with caplog.at_level(logging.INFO, "modelopt_eagle"):
        assert train(recipe).finished
    assert not [line for line in caplog.messages if "killed runs" in line]
