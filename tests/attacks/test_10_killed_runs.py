"""What killed runs leave behind is swept at the next start and counted in one line; a dump goes on bit for bit."""

import logging
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from modelopt_eagle.features.dump import TargetBackEnd, dump
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_dump_that_was_killed_and_resumed_is_bit_equal_to_an_undisturbed_one(tiny_target, dataset, tmp_path, dtype):
    """Killed after each row in turn: what lies on the disk then is what a kill leaves."""
    rows = [replace(row, id=f"{row.id}-{copy}") for copy in range(3) for row in dataset.rows]
    back_end = TargetBackEnd(tiny_target, batch_tokens=150)
    snapshots = []

    def progress(tokens):
        snapshots.append(tmp_path / f"killed-{len(snapshots)}")
        shutil.copytree(tmp_path / "whole", snapshots[-1])

    dump(back_end, rows, tmp_path / "whole", dtype=dtype, shard_bytes=100_000, progress=progress)
    whole = {path.name: path.read_bytes() for path in (tmp_path / "whole").glob("*.*") if path.suffix}
    assert len(whole) > 4
    for snapshot in snapshots[::5]:
        dump(back_end, rows, snapshot, dtype=dtype, shard_bytes=100_000)
        assert {path.name: path.read_bytes() for path in snapshot.glob("*.*") if path.suffix} == whole
