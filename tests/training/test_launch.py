"""What launchers put into the environment: refused where it would change the run, told where it has no effect."""

import os
import subprocess
import sys

import pytest

from modelopt_eagle.errors import TrainingError
from modelopt_eagle.training.prechecks import SHARDING, check_launch, launch_lines
from modelopt_eagle.training.run import make_accelerator
from tests.training.runs import small_recipe

LAUNCHED = {"ACCELERATE_USE_CPU": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        *(({name: "true"}, "model.parallel=fsdp or tensor splits the target") for name in SHARDING),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, "set training.gradient_accumulation_steps=4"),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "set training.torch_compile=true"),
    ],
)
def test_what_would_change_a_run_behind_its_recipe_is_refused(tmp_path, monkeypatch, variables, says):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(TrainingError, match=says):
        make_accelerator(small_recipe("t", "d", tmp_path))


def test_what_accelerate_launch_always_says_is_accepted():
    check_launch({
        "ACCELERATE_USE_FSDP": "false", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
        "ACCELERATE_DYNAMO_BACKEND": "NO", "ACCELERATE_MIXED_PRECISION": "bf16",
    })  # fmt: skip


def test_the_header_says_how_many_processes_run_and_what_had_no_effect():
    assert launch_lines({}, 1, "cpu") == ["processes: 1 on cpu"]
    assert launch_lines({"WORLD_SIZE": "4", "MASTER_PORT": "1"}, 4, "cuda", 2) == [
        "processes: 4 on cuda, each with the whole target and head; each batch is shared by 2"
    ]
    (_, several) = launch_lines(LAUNCHED, 1, "cpu")
    assert "starts one on a CPU" in several and "torchrun --nproc_per_node N" in several
    (_, precision) = launch_lines({"ACCELERATE_MIXED_PRECISION": "fp16"}, 1, "cpu")
    assert "fp16 is not used; training.precision says it" in precision


def test_accelerate_launch_on_a_cpu_leaves_the_variables_by_which_one_process_is_told(tmp_path):
    """The installed accelerate is asked, so that a release that changes this is seen."""
    script = tmp_path / "show.py"
    script.write_text(
        "import os; from modelopt_eagle.training.prechecks import launch_lines; "
        "print('\\n'.join(launch_lines(os.environ, 1, 'cpu')))"
    )
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", str(script)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE", "MASTER"))}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("asked for several and starts one") == 1
