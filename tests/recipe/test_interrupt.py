"""Ctrl-C while a command starts: one line and exit code 130, whatever the imports that it meets make of it."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from modelopt_eagle.common.interrupts import interruptible

ROOT = Path(__file__).resolve().parents[2]

# A package that gets Ctrl-C in the middle of its import and makes another error of it, as numpy does.
STAND_IN = """
import os, signal, time
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(30)
except BaseException as error:
    raise ImportError("cannot load module more than once per process") from error
"""
ENTRIES = {
    "module": ["-m", "modelopt_eagle", "estimate"],
    "older name": ["-m", "modelopt_eagle.cli.main", "estimate"],
    "console script": ["-c", "from modelopt_eagle.__main__ import main; main()", "estimate"],
    "script": [str(ROOT / "scripts" / "convert_checkpoint.py"), "--input", "a", "--output", "b", "--to", "universal"],
}


def interrupted_in(package, entry, folder):
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text(STAND_IN)
    path = os.pathsep.join([str(folder), str(ROOT)])
    done = subprocess.run(
        [sys.executable, *ENTRIES[entry]], cwd=folder, env={**os.environ, "PYTHONPATH": path}, timeout=60,
        capture_output=True, text=True,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("entry", ENTRIES)
def test_in_the_imports_of_a_command(entry, tmp_path):
    assert interrupted_in("torch", entry, tmp_path) == (130, "", "\ninterrupted\n")


@pytest.mark.parametrize("entry", ["module", "console script", "script"])
def test_in_the_imports_of_the_dispatcher(entry, tmp_path):
    assert interrupted_in("tqdm", entry, tmp_path) == (130, "", "\ninterrupted\n")


def test_outside_of_imports_it_is_python_s_own_and_nothing_stays_behind():
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            interruptible(lambda: os.kill(os.getpid(), signal.SIGINT))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_others_and_other_threads_are_left_alone():
    seen = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append(1))
    try:
        assert interruptible(lambda: os.kill(os.getpid(), signal.SIGINT)) is None and seen == [1]
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a shell's background jobs
        assert interruptible(lambda: os.kill(os.getpid(), signal.SIGINT) or 7) == 7
    finally:
        signal.signal(signal.SIGINT, before)
    thread = threading.Thread(target=lambda: seen.append(interruptible(lambda: 5)))
    thread.start()
    thread.join()
    assert seen == [1, 5]
