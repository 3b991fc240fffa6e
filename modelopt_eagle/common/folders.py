"""Folders that are whole or absent: written under a temporary name beside their own, then renamed."""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from modelopt_eagle.common.files import flush_file, flush_folder, part_of

AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""Linux: names from the working directory; ``renameat2`` exchanges two of them."""
LEFT_FOR = 3600.0
"""Seconds after which parts of a folder whose process is gone are removed; it may run on another machine."""


@contextlib.contextmanager
def whole_folder(path: str | Path, part: Path | None = None) -> Iterator[Path]:
    """Write a folder; at the end it is flushed to the disk and takes the place of what stands at ``path``.

    If the body raises, ``path`` is as it was: absent, or with its old content. If process or machine die, ``path`` is
    the old folder or the new one, whole (after :func:`bring_back`, where the system cannot exchange two names).

    Args:
        path: the folder to make or replace.
        part: the temporary name, for a caller that holds a lock on it: what a killed process left there is removed.
            Default :func:`~modelopt_eagle.common.files.part_of`.

    Yields:
        The temporary folder to write into.

    Raises:
        OSError: the disk is full or refuses; see :func:`modelopt_eagle.common.files.disk_trouble`.
    """
    path = Path(path)
    bring_back(path)
    if part is None:
        part = part_of(path)
    elif part.exists():
        shutil.rmtree(part)
    try:
        part.mkdir(parents=True)
        yield part
        flush_tree(part)
        put_in_place(part, path)
        flush_folder(path.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def flush_tree(folder: Path) -> None:
    """Bring all files and names in a folder to the disk."""
    for place, _, names in os.walk(folder):
        for name in names:
            flush_file(Path(place) / name)
        flush_folder(Path(place))


def exchange(a: Path, b: Path) -> bool:
    """Let two folders change names in one step.

    Returns:
        whether they were; ``False`` where the system cannot, and then nothing is changed.
    """
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2  # Linux, glibc 2.28
    except (OSError, AttributeError):
        return False
    return renameat2(AT_FDCWD, os.fsencode(a), AT_FDCWD, os.fsencode(b), RENAME_EXCHANGE) == 0


def put_in_place(part: Path, path: Path) -> None:
    """Give the finished folder ``part`` the name ``path``; what stood there goes with ``part`` or is removed.

    Where the system cannot exchange two names, the old folder is moved aside for a moment; :func:`bring_back` returns
    it if the process dies then.
    """
    if not path.exists():
        part.rename(path)
        return
    if exchange(part, path):
        return
    old = path.with_name(f".{path.name}.old-{os.getpid()}")
    path.rename(old)
    try:
        part.rename(path)
    except OSError:
        old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)


def alive(pid: int) -> bool:
    """Whether a process of this machine exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def bring_back(path: Path) -> None:
    """Undo what a process that was killed left beside ``path``: an old folder moved aside, parts of a new one."""
    if not path.parent.is_dir():
        return
    for left in path.parent.glob(f".{glob.escape(path.name)}.*-*"):
        found = re.fullmatch(r"(old|part)-(\d+)", left.name[len(path.name) + 2 :])
        if not found or alive(int(found.group(2))):
            continue
        if found.group(1) == "old" and not path.exists():
            left.rename(path)
        elif time.time() - left.stat().st_mtime > LEFT_FOR:
            shutil.rmtree(left, ignore_errors=True)
