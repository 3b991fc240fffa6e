"""A reader that leaves, a full disk behind the output, closed descriptors: the work goes on, and no traceback."""

import json
import os
import subprocess
import sys

import pytest

from modelopt_eagle.cli.main import OUTPUT_LOST
from tests.features.rows import fill
from tests.training.runs import write_conversations

CLI = [sys.executable, "-m", "modelopt_eagle.cli.main"]


def train_command(target, folder):
    data = write_conversations(folder / "data.jsonl")
    overrides = (
        f"model.base_model={target}", f"data.train_path={data}", f"training.output_dir={folder / 'run'}",
        "training.batch_size=4", "training.epochs=2", "training.log_steps=1", "training.report_to=none",
        "training.time_budget_minutes=null", "eagle.draft_vocab_size=64", "model.device=cpu",
    )  # fmt: skip
    return [*CLI, "train", *overrides]


def state(folder):
    found = sorted(folder.glob("run/checkpoint-*/trainer_state.json"), key=lambda path: path.stat().st_mtime)
    return json.loads(found[-1].read_text())


def test_training_goes_on_when_its_reader_leaves(tiny_target_dir, tmp_path):
    """``train … 2>&1 | head -1``."""
    with subprocess.Popen(
        train_command(tiny_target_dir, tmp_path), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as run:
        assert run.stdout.readline()
        run.stdout.close()
        assert run.wait(120) == 0
    assert state(tmp_path)["finished"]


def test_training_with_a_full_disk_behind_its_output(tiny_target_dir, tmp_path):
    """``train … > /dev/full``: everything is saved, and the exit code says that the output is lost."""
    with open("/dev/full", "w") as full:
        run = subprocess.run(
            train_command(tiny_target_dir, tmp_path), stdout=full, stderr=subprocess.PIPE, text=True, timeout=120
        )
    assert run.returncode == OUTPUT_LOST and "Traceback" not in run.stderr
    assert "what was printed is not whole: No space left on device" in run.stderr
    assert state(tmp_path)["finished"]


@pytest.mark.parametrize("ending", [">&-", "2>&-", "<&-", ">&- 2>&- <&-", "2>/dev/full", "| head -1", "| true"])
def test_a_command_with_closed_or_full_ends(tmp_path, ending):
    fill(tmp_path / "store")
    line = f'"$@" {ending}; exit ${{PIPESTATUS[0]}}'
    run = subprocess.run(
        ["bash", "-c", line, "bash", *CLI, "features", "inspect", str(tmp_path / "store")],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert run.returncode == 0 and "Traceback" not in run.stderr, run.stderr


@pytest.mark.parametrize("arguments", [["features", "inspect"], ["--help"], ["features", "--help"]])
def test_a_full_disk_is_said_in_a_line(tmp_path, arguments):
    fill(tmp_path / "store")
    arguments = [*arguments, str(tmp_path / "store")] if "inspect" in arguments else arguments
    with open("/dev/full", "w") as full:
        run = subprocess.run([*CLI, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert run.returncode == OUTPUT_LOST and run.stderr.count("\n") == 1, run.stderr
    assert "No space left" in run.stderr


def test_files_do_not_get_the_numbers_of_closed_descriptors(tmp_path):
    """Libraries print into descriptors 1 and 2, whatever lies behind them."""
    code = (
        "import os; from modelopt_eagle.common.output import guard_output; guard_output();"
        f"file = open({str(tmp_path / 'shard')!r}, 'wb'); os.write(1, b'noise'); os.write(2, b'noise'); file.close()"
    )
    subprocess.run(["bash", "-c", '"$@" >&- 2>&- <&-', "bash", sys.executable, "-c", code], check=True)
    assert (tmp_path / "shard").read_bytes() == b""


def test_characters_that_the_terminal_lacks_are_escaped():
    code = (
        "import sys; from modelopt_eagle.common.output import guard_output; guard_output();"
        "print('na\\u00efve \\ud800'); print('\\u2713', file=sys.stderr)"
    )
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, check=True)
    assert run.stdout == b"na\\xefve \\ud800\n" and run.stderr == b"\\u2713\n"
