"""Two runs in one output folder: the second is refused, the first is not disturbed."""

import json
import os
import signal
import subprocess
import sys

import pytest

from modelopt_eagle.errors import TrainingError
from modelopt_eagle.training import train
from modelopt_eagle.training.run_folder import held
from tests.training.runs import small_recipe, write_conversations

HOLDER = """
import sys, time
from pathlib import Path
from modelopt_eagle.training.run_folder import held
with held(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_run_is_refused_until_the_first_ends_however_it_ends(tiny_target_dir, tmp_path):
    recipe = small_recipe(tiny_target_dir, write_conversations(tmp_path / "data.jsonl"), tmp_path / "run")
    with subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path / "run"], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "held\n"
        with pytest.raises(TrainingError, match=f"another run writes into .* \\(process {first.pid} on "):
            train(recipe)
        assert not list((tmp_path / "run").glob("checkpoint-*")) and not (tmp_path / "run" / "recipe.yaml").exists()
        os.kill(first.pid, signal.SIGKILL)
    assert train(recipe).finished
    assert train(recipe).finished  # and lets go of it


def test_a_lock_that_is_a_link_is_not_written_through(tmp_path):
    (tmp_path / "precious").write_text("kept")
    for name in (".lock", ".holder"):
        run = tmp_path / f"run{name}"
        run.mkdir()
        (run / name).symlink_to(tmp_path / "precious")
        with pytest.raises(TrainingError, match="is a link"), held(run):
            pass
    assert (tmp_path / "precious").read_text() == "kept"


def test_an_unfinished_checkpoint_of_a_living_run_is_left_alone(tiny_target_dir, tmp_path):
    recipe = small_recipe(tiny_target_dir, write_conversations(tmp_path / "data.jsonl"), tmp_path / "run")
    with held(tmp_path / "run"):
        part = tmp_path / "run" / ".checkpoint-4.part"
        part.mkdir()
        (part / "trainer_state.json").write_text(json.dumps({}))
        with pytest.raises(TrainingError):
            train(recipe)
        assert (part / "trainer_state.json").is_file()
