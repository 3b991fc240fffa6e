"""An export that is killed at any moment leaves the old folder or the new one, whole."""

import os
import shutil
import signal
import time

import pytest

from modelopt_eagle.common import folders
from modelopt_eagle.common.folders import bring_back
from modelopt_eagle.errors import CheckpointError, ExportError
from modelopt_eagle.export.folders import resolve_checkpoint, whole_folder

FILES = ("config.json", "model.safetensors", "README.md")


def write(path, text, overwrite=False):
    with whole_folder(path, overwrite) as part:
        for name in FILES:
            (part / name).write_text(text)


def die(*arguments, **options):
    os.kill(os.getpid(), signal.SIGKILL)


def after_some_files(part):
    """Dies while the old folder is being removed, one file gone."""
    next(iter(sorted(part.iterdir()))).unlink()
    die()


MOMENTS = {
    "while the new folder is written": ("write_text", "old"),
    "before it takes its name": ("put_in_place", "old"),
    "after it took its name": ("rmtree", "new"),
    "while the old one is removed": ("rmtree, late", "new"),
    "without exchange, the old one aside": ("part.rename", "old"),
    "without exchange, both in place": ("rmtree without exchange", "new"),
}


def killed(path, moment):
    """Overwrite ``path`` in a process that dies at a moment."""
    pid = os.fork()
    if pid:
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL
        return
    try:
        if "part.rename" in moment or "without exchange" in moment:
            folders.exchange = lambda a, b: False
        if moment == "put_in_place":
            folders.put_in_place = die
        elif moment == "part.rename":
            plain = folders.Path.rename
            folders.Path.rename = lambda self, to: die() if ".part-" in self.name else plain(self, to)
        elif moment == "rmtree, late":
            shutil.rmtree = lambda part, **options: after_some_files(part)
        elif moment.startswith("rmtree"):
            shutil.rmtree = die
        elif moment == "write_text":
            with whole_folder(path, True) as part:
                (part / FILES[0]).write_text("ne")
                die()
        write(path, "new", overwrite=True)
    finally:
        os._exit(1)


@pytest.mark.parametrize(("moment", "expected"), MOMENTS.values(), ids=MOMENTS)
def test_killed_while_replacing(tmp_path, moment, expected):
    out = tmp_path / "out"
    write(out, "old")
    killed(out, moment)
    assert resolve_checkpoint(out) == out
    assert {name: (out / name).read_text() for name in FILES} == dict.fromkeys(FILES, expected)
    for left in tmp_path.glob(".out.*"):
        os.utime(left, (time.time() - 7200, time.time() - 7200))
    write(out, "newer", overwrite=True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
    assert (out / FILES[0]).read_text() == "newer"


def test_killed_while_making_the_first_one(tmp_path):
    out = tmp_path / "out"
    killed(out, "put_in_place")
    with pytest.raises(CheckpointError, match="is no folder"):
        resolve_checkpoint(out)
    write(out, "new")
    assert (out / FILES[0]).read_text() == "new"


def test_what_a_living_process_writes_is_left_alone(tmp_path):
    mine = tmp_path / f".out.part-{os.getppid()}"
    mine.mkdir()
    os.utime(mine, (1, 1))
    young = tmp_path / ".out.part-999999999"
    young.mkdir()
    bring_back(tmp_path / "out")
    assert mine.is_dir() and young.is_dir()
    with pytest.raises(ExportError, match="is a file"):
        (tmp_path / "file").write_text("")
        write(tmp_path / "file", "new")
