"""Files that are whole or absent: written under a temporary name, flushed to the disk, renamed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
from pathlib import Path

from modelopt_eagle.errors import FeatureError

TEMPORARY_PREFIX = ".writing-"


def write_durably(path: Path, content: bytes) -> None:
    """Write ``content`` so that ``path`` holds all of it or is untouched, whenever the process or machine dies.

    Raises:
        FeatureError: the disk is full, or the folder cannot be written.
    """
    temporary = path.with_name(TEMPORARY_PREFIX + path.name)
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        reason = "the disk is full" if error.errno == errno.ENOSPC else error.strerror
        raise FeatureError(
            f"cannot write {path} ({len(content):,} bytes): {reason}; what was written before is whole, "
            "make room and run the same command again"
        ) from error


def sync_folder(folder: Path) -> None:
    """Flush a folder, so that a rename in it outlives a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_sha256(path: Path) -> str:
    """Hex sha256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _digest(file)


def _digest(file) -> str:
    digest = hashlib.sha256()
    while block := file.read(2**20):
        digest.update(block)
    return digest.hexdigest()


class FolderLock:
    """An exclusive lock that the system releases when its holder dies.

    Args:
        path: the lock file; it stays behind, empty.
        what: what the holder does, for the message.

    Raises:
        FeatureError: another process holds it, or the folder cannot be written.
    """

    def __init__(self, path: Path, what: str):
        try:
            self._file = open(path, "a")
        except OSError as error:
            raise FeatureError(
                f"cannot write into {path.parent}: {error.strerror}; name a folder that can be written"
            ) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise FeatureError(
                f"another process already {what} ({path}); wait for it, or give this one another --shard i/n"
            ) from error

    def release(self) -> None:
        self._file.close()
