"""Files that are whole or absent, their digests, and locks that the system frees when their holder dies.

:mod:`modelopt_eagle.common.folders` does the same for folders.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock

from modelopt_eagle.common.strict_json import parse_json
from modelopt_eagle.errors import EagleError

_BLOCK = 1 << 20
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def part_of(path: Path) -> Path:
    """The name under which this process writes a file or folder before it takes its own, hidden beside it."""
    return path.with_name(f".{path.name}.part-{os.getpid()}")


@contextlib.contextmanager
def whole_file(path: str | Path, part: Path | None = None) -> Iterator[Path]:
    """Write a file under a temporary name; at the end it is flushed to the disk and takes its own.

    If the body raises, or process or machine die, ``path`` is as it was.

    Args:
        path: the file to make or replace.
        part: the temporary name; default :func:`part_of`.

    Yields:
        The temporary path, to be written by any means.

    Raises:
        OSError: the disk is full or refuses; see :func:`disk_trouble`.
    """
    path = Path(path)
    part = part_of(path) if part is None else part
    part.unlink(missing_ok=True)  # a link under this name is not written through
    try:
        yield part
        flush_file(part)
        os.replace(part, path)
        flush_folder(path.parent)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def write_whole(
    path: str | Path, content: bytes | str | Callable[[BinaryIO], object], part: Path | None = None
) -> Path:
    """Write a file so that it holds all of its content or is untouched.

    Args:
        path: the file to make or replace.
        content: bytes, text (stored as UTF-8), or a function that writes to the open file.
        part: the temporary name; default :func:`part_of`.

    Returns:
        ``path``.

    Raises:
        OSError: the disk is full or refuses; see :func:`disk_trouble`.
    """
    with whole_file(path, part) as temporary, temporary.open("wb") as stream:
        if callable(content):
            content(stream)
        else:
            stream.write(content.encode() if isinstance(content, str) else content)
    return Path(path)


def disk_trouble(error: BaseException) -> str:
    """Why something could not be written, for a message: the full disk is named, whoever noticed it."""
    if getattr(error, "errno", None) in _DISK_FULL or "No space left" in str(error):
        return "the disk is full"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {error}"


def flush_file(path: Path) -> None:
    """Bring a closed file's content to the disk."""
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


def flush_folder(folder: Path) -> None:
    """Bring a folder's names to the disk, so that a rename in it outlives a power cut."""
    if os.name == "nt":  # folders cannot be opened there
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_sha256(path: str | Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def read_json(path: str | Path, error: type[EagleError], remedy: str) -> dict[str, Any]:
    """The JSON object in a file.

    Args:
        path: the file.
        error: what is raised if it cannot be read.
        remedy: what mends it, for the message.

    Raises:
        EagleError: of the given class: no such file, not JSON, or JSON that is no object.
    """
    try:
        value = parse_json(Path(path).read_bytes(), finite=False)
    except OSError as found:
        raise error(f"{path} cannot be read ({found.strerror}): {remedy}") from found
    except ValueError as found:  # of JSON, and of UTF-8
        raise error(f"{path} is not JSON ({found}): {remedy}") from found
    if not isinstance(value, dict):
        raise error(f"{path}: expected a JSON object, found {type(value).__name__}: {remedy}")
    return value


def file_lock(path: str | Path, wait: bool = True) -> FileLock:
    """An exclusive lock on a file, for a process with all its threads; not yet taken.

    Take it by ``acquire()`` and ``release()``, or as a context manager. The system frees it when its holder dies,
    however it dies; the file stays behind, empty.

    Args:
        path: the lock file, in a folder that exists.
        wait: wait for another holder; else taking a lock that is held raises ``filelock.Timeout``.

    Returns:
        The lock.

    Raises:
        OSError: the lock file is a link, which would make or lock a file elsewhere, or cannot be made.
    """
    if Path(path).is_symlink():
        raise OSError(errno.ELOOP, "the lock file is a link", str(path))
    Path(path).touch()  # where no file can be made, the library takes the lock for one that another holds
    return FileLock(path, timeout=-1 if wait else 0, thread_local=False, poll_interval=0.01)
