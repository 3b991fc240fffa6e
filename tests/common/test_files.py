"""Files and folders that are whole or absent, digests, JSON and locks."""

import errno
import hashlib
import os
import signal
import subprocess
import sys

import pytest
from filelock import Timeout

from modelopt_eagle.common.files import disk_trouble, file_lock, file_sha256, read_json, whole_file, write_whole
from modelopt_eagle.common.folders import whole_folder
from modelopt_eagle.errors import CheckpointError, DataError


@pytest.mark.parametrize("content", ["täxt\n", b"\x00\xff", lambda stream: stream.write(b"written")])
def test_a_file_is_written_and_nothing_else_is_left(tmp_path, content):
    path = write_whole(tmp_path / "a", content)
    expected = b"written" if callable(content) else content if isinstance(content, bytes) else content.encode()
    assert path.read_bytes() == expected and [entry.name for entry in tmp_path.iterdir()] == ["a"]
    assert file_sha256(path) == hashlib.sha256(expected).hexdigest()


def test_a_failure_leaves_the_old_file(tmp_path):
    path = write_whole(tmp_path / "a", "old")
    with pytest.raises(KeyboardInterrupt), whole_file(path) as part:
        part.write_text("ne")
        raise KeyboardInterrupt
    with pytest.raises(OSError):
        write_whole(tmp_path / "missing" / "a", "new")
    assert path.read_text() == "old" and [entry.name for entry in tmp_path.iterdir()] == ["a"]


def killed(work):
    """Run something in a process that kills itself in it."""
    pid = os.fork()
    if pid:
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL
        return
    try:
        work()
    finally:
        os._exit(1)


def test_a_kill_leaves_the_old_file(tmp_path):
    path = write_whole(tmp_path / "a", "old")

    def half(stream):
        stream.write(b"ne")
        stream.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    killed(lambda: write_whole(path, half))
    assert path.read_text() == "old"


def test_the_content_is_on_the_disk_before_the_name(tmp_path, monkeypatch):
    steps, rename = [], os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: steps.append("flush"))
    monkeypatch.setattr(os, "replace", lambda a, b: (steps.append("rename"), rename(a, b)))
    write_whole(tmp_path / "a", "new")
    assert steps == ["flush", "rename", "flush"]


def test_a_folder_is_replaced_whole(tmp_path):
    path = tmp_path / "a"
    for text in ("old", "new"):
        with whole_folder(path) as part:
            (part / "inner").mkdir()
            (part / "inner" / f"{text}.txt").write_text(text)
            assert part.parent == tmp_path and path.exists() == (text == "new")
    with pytest.raises(ZeroDivisionError), whole_folder(path) as part:
        (part / "half").write_text("")
        raise ZeroDivisionError
    assert [str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*.txt")] == ["a/inner/new.txt"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize(
    "error, words",
    [
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full"),
        (RuntimeError("file write failed: No space left on device"), "the disk is full"),
        (OSError(errno.EACCES, "Permission denied"), "Permission denied"),
        (RuntimeError("odd"), "RuntimeError: odd"),
    ],
)
def test_disk_trouble(error, words):
    assert disk_trouble(error) == words


@pytest.mark.parametrize(
    "text, words",
    [("{", "is not JSON"), ("[1]", "expected a JSON object, found list"), (b"\xff\xfe", "is not JSON")],
)
def test_json_that_is_none(tmp_path, text, words):
    path = write_whole(tmp_path / "a.json", text)
    with pytest.raises(CheckpointError, match=rf"a\.json.*{words}.*: make it again"):
        read_json(path, CheckpointError, "make it again")


def test_json(tmp_path):
    assert read_json(write_whole(tmp_path / "a.json", '{"ä": [1]}'), DataError, "") == {"ä": [1]}
    with pytest.raises(DataError, match="cannot be read .No such file"):
        read_json(tmp_path / "b.json", DataError, "name another file")


HOLD = """
import sys
from modelopt_eagle.common.files import file_lock
with file_lock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_lock_is_freed_when_its_holder_dies(tmp_path):
    path = tmp_path / "lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(Timeout), file_lock(path, wait=False):
            pass
    finally:
        holder.kill()
        holder.communicate()
    with file_lock(path, wait=False), pytest.raises(Timeout), file_lock(path, wait=False):
        pass  # another lock of the same process is kept out too
    with file_lock(path):
        pass
    assert path.is_file()
