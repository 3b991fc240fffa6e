"""The files of a store: written whole or not at all, locked, and mapped again."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from modelopt_eagle.common.files import disk_trouble, file_lock, write_whole
from modelopt_eagle.errors import FeatureError

TEMPORARY_PREFIX = ".writing-"
"""Of half-written files, by which a later run knows and removes them."""
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
    try:
        write_whole(path, content, part=path.with_name(TEMPORARY_PREFIX + path.name))
    except OSError as error:
        raise FeatureError(
            f"cannot write {path} ({len(content):,} bytes): {disk_trouble(error)}; what was written before is whole, "
            "make room and run the same command again"
        ) from error


def take_lock(path: Path, what: str) -> FileLock:
    """A lock of a store, or an error without waiting: two writers of one share would make the same rows.

    The lock files ``.lock-i-of-n`` are part of the store's format, as their names tell one run how many workers
    another has.

    Args:
        path: the lock file; it stays behind, empty.
        what: what the holder does, for the message.

    Returns:
        The lock; ``release()`` lets go of it.

    Raises:
        FeatureError: another process holds it, or the folder cannot be written.
    """
    lock = file_lock(path, wait=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise FeatureError(
            f"another process already {what} ({path}); wait for it, or give this one another --shard i/n"
        ) from error
    except OSError as error:
        raise FeatureError(
            f"cannot write into {path.parent}: {disk_trouble(error)}; name a folder that can be written"
        ) from error
    return lock


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
