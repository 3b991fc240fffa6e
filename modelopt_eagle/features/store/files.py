"""Files that are whole or absent: written under a temporary name, flushed to the disk, renamed; and mapped again."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
from pathlib import Path

import torch

from modelopt_eagle.errors import FeatureError

TEMPORARY_PREFIX = ".writing-"
_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}
REMEDY = "delete this shard and its entry by `modelopt-eagle features verify DIR --drop-bad`, then run the dump again"


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


def map_safetensors(path: Path) -> tuple[dict[str, torch.Tensor], dict]:
    """Map a safetensors file; the pages are read when they are used, and the file handle is closed at once.

    Returns:
        its tensors, views of the file (private: writing to them leaves the file as it is), and its metadata.

    Raises:
        FeatureError: a file that is not safetensors, or is shorter or longer than its header says.
    """
    size = path.stat().st_size
    try:
        with open(path, "rb") as file:
            header_length = int.from_bytes(file.read(8), "little")
            if not 2 <= header_length <= min(size - 8, 100_000_000):
                raise ValueError(f"header length {header_length} in a file of {size} bytes")
            header = json.loads(file.read(header_length))
        meta = header.pop("__metadata__", {})
        start = 8 + header_length
        end = start + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if end != size:
            raise ValueError(f"{end} bytes expected from the header, {size} found")
        storage = torch.UntypedStorage.from_file(str(path), shared=False, nbytes=size)
        tensors = {}
        for name, entry in header.items():
            dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
            first, last = entry["data_offsets"]
            if last - first != dtype.itemsize * math.prod(shape):
                raise ValueError(f"tensor {name} of shape {shape} has {last - first} bytes")
            view = torch.empty(0, dtype=torch.uint8).set_(storage, start + first, (last - first,))
            if (start + first) % dtype.itemsize:
                view = view.clone()  # a foreign writer may leave tensors unaligned
            tensors[name] = view.view(dtype).view(shape)
        return tensors, meta
    except (ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise FeatureError(f"{path} is not a whole safetensors file: {error}; {REMEDY}") from error
