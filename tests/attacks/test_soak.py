"""Real processes, killed at random moments for a given time (``--soak-seconds``) and started again until they finish.

What is finished then is, byte for byte, what an undisturbed process makes.
"""

import hashlib
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.training.runs import write_conversations

CHILD = Path(__file__).with_name("soak_child.py")


def start(*arguments):
    """A process that has said that it begins its work."""
    process = subprocess.Popen(
        [sys.executable, str(CHILD), *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "begun\n", process.communicate()[1][-3000:]
    return process


def finish(process):
    said = process.communicate(timeout=300)
    assert process.returncode == 0, said[1][-3000:]


def made(what, folder):
    """What a finished process leaves: the last head of a run, or every file of a store."""
    if what == "train":
        (last,) = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))[-1:]
        tensors = load_file(last / "model.safetensors")
        return last.name, {name: hashlib.sha256(t.numpy().tobytes()).hexdigest() for name, t in tensors.items()}
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".safetensors", ".json")}


@pytest.mark.parametrize("what", ["train", "dump"])
def test_killed_again_and_again(what, tiny_target_dir, tmp_path, request):
    draw = random.Random(f"{what}/{request.config.getoption('--fuzz-seed')}")
    data = write_conversations(tmp_path / "rows.jsonl", 24)
    process, begun = start(what, tiny_target_dir, data, tmp_path / "whole"), time.monotonic()
    finish(process)
    needs = time.monotonic() - begun
    whole = made(what, tmp_path / "whole")
    until, rounds, kills = time.monotonic() + request.config.getoption("--soak-seconds") / 2, 0, 0
    while rounds == 0 or time.monotonic() < until:
        folder = tmp_path / f"round-{rounds}"
        for _ in range(draw.randint(1, 3)):
            process = start(what, tiny_target_dir, data, folder)
            try:
                process.wait(draw.uniform(0.0, 0.8 * needs))
            except subprocess.TimeoutExpired:
                process.kill()
                kills += 1
            process.communicate()
        finish(start(what, tiny_target_dir, data, folder))
        assert made(what, folder) == whole, f"round {rounds}, seed {request.config.getoption('--fuzz-seed')}"
        assert not [path for path in folder.rglob(".*") if "part" in path.name or "tokens" in path.name]
        rounds += 1
    print(f"{what}: {kills} kills in {rounds} rounds")
    assert kills
