"""Two launched gloo processes against one."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from modelopt_eagle.data import plan_batches
from modelopt_eagle.errors import RecipeError
from modelopt_eagle.recipe import TrainingSection
from modelopt_eagle.training import train
from modelopt_eagle.training.trainer import Trainer
from tests.training.runs import small_recipe, write_conversations

SCRIPT = Path(__file__).with_name("two_processes.py")
ACCUMULATED = ("training.batch_size=1", "training.gradient_accumulation_steps=2")
IN_PARTS = ("data.cache_features=disk", "training.run_budget_minutes=600")  # of 200 tokens, see the script


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """11 rows: with one row a batch the second process has nothing in its last micro-batch."""
    return write_conversations(tmp_path_factory.mktemp("data") / "rows.jsonl", 11)


def launch(*arguments, script=SCRIPT, processes=2, well=True):
    """Run a script in two processes, to end well or not; returns what they printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nproc_per_node={processes}",
        f"--master_port={port}",
        str(script),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, *map(str, arguments)], capture_output=True, text=True, env=environment, timeout=900
    )
    assert (done.returncode == 0) == well, done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def two_processes(tiny_target_dir, data, tmp_path_factory):
    """A finished run of two processes: 6 micro-batches each (one empty), accumulated in pairs."""
    output = tmp_path_factory.mktemp("two") / "run"
    said = launch(tiny_target_dir, data, output, *ACCUMULATED, *IN_PARTS)
    assert said.count("budget: 600.0 minutes") == 1
    return output


def weights(output, step=6):
    return load_file(output / f"checkpoint-{step}" / "model.safetensors")


def test_two_processes_train_as_one_does(tiny_target_dir, data, tmp_path, two_processes):
    """Gradients are those of one process with twice the accumulation, though one rank runs out of rows.

    The two agree on each part of the features that they make, and fill one store.
    """
    assert json.loads((two_processes / "budget.json").read_text())["rows"] == 11
    one = train(
        small_recipe(
            tiny_target_dir, data, tmp_path / "one", "training.batch_size=1", "training.gradient_accumulation_steps=4"
        )
    )
    assert one.steps == 6
    for name, tensor in weights(tmp_path / "one").items():
        torch.testing.assert_close(weights(two_processes)[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


@pytest.fixture(scope="module")
def cut(tiny_target_dir, data, tmp_path_factory):
    """The same run, stopped after 2 of its 6 steps by a signal that reaches one process."""
    output = tmp_path_factory.mktemp("cut") / "run"
    said = launch(tiny_target_dir, data, output, "--stop-at", 2, *ACCUMULATED, *IN_PARTS)
    assert "stopped at step 2" in said and not (output / "checkpoint-6").exists()
    folder = output / "checkpoint-2"
    assert (folder / "rng-0.pt").is_file() and (folder / "rng-1.pt").is_file()
    return output


def copy_of(run, tmp_path):
    return shutil.copytree(run, tmp_path / "run", symlinks=True)


def test_resume_on_two_processes_is_bit_equal(tiny_target_dir, data, tmp_path, two_processes, cut):
    """Both stop after the same step and go on together."""
    run = copy_of(cut, tmp_path)
    assert "going on from" in launch(tiny_target_dir, data, run, *ACCUMULATED, *IN_PARTS)
    whole, resumed = weights(two_processes), weights(run)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def rows_read(recipe, monkeypatch):
    """Train; the rows of each step's micro-batches, in their order."""
    rows, original = [], Trainer.windows

    def windows(self):
        for index, window in original(self):
            rows.append([row for batch in window if batch is not None for row in batch.row_ids])
            yield index, window

    monkeypatch.setattr(Trainer, "windows", windows)
    return train(recipe), rows


def order(epoch):
    """The rows of an epoch in the order in which every number of processes reads them."""
    return [f"row-{n}" for (n,) in plan_batches([1] * 11, batch_size=1, seed=TrainingSection().seed, epoch=epoch)]


def test_one_process_goes_on_where_two_stopped(tiny_target_dir, data, tmp_path, monkeypatch, two_processes, cut):
    """With twice the accumulation a step is what it was: the same rows, and the same weights but for rounding."""
    more = ("training.batch_size=1", "training.gradient_accumulation_steps=4", *IN_PARTS)
    result, rows = rows_read(small_recipe(tiny_target_dir, data, copy_of(cut, tmp_path), *more), monkeypatch)
    assert rows == [order(0)[8:], order(1)[:4], order(1)[4:8], order(1)[8:]]
    assert result.steps == 6 and result.history[-1]["epoch"] == 2
    for name, tensor in weights(two_processes).items():
        torch.testing.assert_close(weights(tmp_path / "run")[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


def test_one_process_with_smaller_steps_reads_the_rows_that_are_left(
    tiny_target_dir, data, tmp_path, monkeypatch, capsys, cut
):
    recipe = small_recipe(tiny_target_dir, data, copy_of(cut, tmp_path), *ACCUMULATED, *IN_PARTS)
    result, rows = rows_read(recipe, monkeypatch)
    assert [row for step in rows for row in step] == order(0)[8:] + order(1)
    assert result.steps == 2 + 2 + 6 and result.finished
    assert "processes: 1 in place of 2; from here on a step takes 2 batches, 4 before" in "".join(capsys.readouterr())


def test_other_accumulation_is_refused_where_a_step_would_take_another_number(tiny_target_dir, data, tmp_path, cut):
    recipe = small_recipe(
        tiny_target_dir, data, copy_of(cut, tmp_path), "training.batch_size=1", "training.gradient_accumulation_steps=3"
    )
    with pytest.raises(RecipeError, match="gradient_accumulation_steps was 2, is 3"):
        train(recipe)
