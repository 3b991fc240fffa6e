"""Two launched gloo processes against one."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from modelopt_eagle.training import train
from tests.training.runs import small_recipe, write_conversations

SCRIPT = Path(__file__).with_name("two_processes.py")
ACCUMULATED = ("training.batch_size=1", "training.gradient_accumulation_steps=2")
IN_PARTS = ("data.cache_features=disk", "training.run_budget_minutes=600")  # of 200 tokens, see the script


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """11 rows: with one row a batch the second process has nothing in its last micro-batch."""
    return write_conversations(tmp_path_factory.mktemp("data") / "rows.jsonl", 11)


def launch(*arguments, script=SCRIPT, processes=2):
    """Run a script in two processes; returns what they printed."""
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
        [*command, *map(str, arguments)], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
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


def test_resume_on_two_processes_is_bit_equal(tiny_target_dir, data, tmp_path, two_processes):
    """The signal reaches one process; both stop after the same step and go on together."""
    said = launch(tiny_target_dir, data, tmp_path / "cut", "--stop-at", 2, *ACCUMULATED, *IN_PARTS)
    assert "stopped at step 2" in said and not (tmp_path / "cut" / "checkpoint-6").exists()
    folder = tmp_path / "cut" / "checkpoint-2"
    assert (folder / "rng-0.pt").is_file() and (folder / "rng-1.pt").is_file()
    refused = train_alone(tiny_target_dir, data, tmp_path / "cut")
    assert "written by 2 processes, this run has 1" in refused
    assert "going on from" in launch(tiny_target_dir, data, tmp_path / "cut", *ACCUMULATED, *IN_PARTS)
    whole, resumed = weights(two_processes), weights(tmp_path / "cut")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def train_alone(*arguments):
    """What one process says to the checkpoint of two."""
    from modelopt_eagle.errors import CheckpointError

    with pytest.raises(CheckpointError) as error:
        train(small_recipe(*arguments, *ACCUMULATED, *IN_PARTS))
    return str(error.value)
