"""The files of a store: written whole or not at all, locked, and mapped again."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from modelopt_eagle.common.files import disk_trouble, file_lock, write_whole
from modelopt_eagle.common.strict_json import parse_json
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
    try:
        lock = file_lock(path, wait=False)
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


def refuse_other_workers(folder: Path, count: int) -> None:
    """A store is filled by one set of workers at a time: look for living workers of another count.

    Args:
        count: how many workers fill the store now; each holds a lock ``.lock-i-of-count``.

    Raises:
        FeatureError: one of another count holds its lock, so it might make the rows that this one makes.
    """
    for path in folder.glob(".lock-*-of-*"):
        if path.name.endswith(f"-of-{count}"):
            continue  # the writer asks for its own
        try:
            with file_lock(path, wait=False):
                pass
        except (Timeout, OSError) as error:
            raise FeatureError(
                f"another process already writes into {folder} ({path.name}); a store is filled by one run at a "
                "time: wait for it, or use another folder"
            ) from error


LARGEST_HEADER = 100_000_000
"""Bytes of a safetensors header at most, as in the safetensors library."""


def map_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Map a safetensors file; the pages are read when they are used, and the file handle is closed at once.

    Returns:
        its tensors, views of the file (private: writing to them leaves the file as it is), and its metadata.

    Raises:
        FeatureError: a file that is not safetensors, or is shorter or longer than its header says.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            header_length = int.from_bytes(file.read(8), "little")
            if not 2 <= header_length <= min(size - 8, LARGEST_HEADER):
                raise ValueError(f"header length {header_length} in a file of {size} bytes")
            header = parse_json(file.read(header_length))
        meta, entries = read_header(header, size - 8 - header_length)
        start = 8 + header_length
        storage = torch.UntypedStorage.from_file(str(path), shared=False, nbytes=size)
        tensors = {}
        for name, (dtype, shape, first, last) in entries.items():
            view = torch.empty(0, dtype=torch.uint8).set_(storage, start + first, (last - first,))
            if (start + first) % dtype.itemsize:
                view = view.clone()  # a foreign writer may leave tensors unaligned
            tensors[name] = view.view(dtype).view(shape)
        return tensors, meta
    except (ValueError, RuntimeError, OSError) as error:
        raise FeatureError(f"{path} is not a whole safetensors file: {error}; {REMEDY}") from error


def read_header(header, size: int) -> tuple[dict[str, str], dict[str, tuple[torch.dtype, tuple[int, ...], int, int]]]:
    """The metadata, and (dtype, shape, first byte, one past the last) of every tensor of a safetensors header.

    Args:
        header: the parsed JSON, whatever it is.
        size: bytes behind the header; the tensors must fill them one after the other.

    Raises:
        ValueError: says what is not as the format has it.
    """
    if not isinstance(header, dict):
        raise ValueError(f"a header of type {type(header).__name__}")
    meta = header.pop("__metadata__", {})
    if not isinstance(meta, dict) or not all(isinstance(value, str) for value in meta.values()):
        raise ValueError("metadata that is no table of texts")
    entries = {}
    for name, entry in header.items():
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise ValueError(f"tensor {name!r} without dtype, shape and data_offsets, or with more")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            raise ValueError(f"tensor {name!r} of dtype {dtype!r}; one of {', '.join(_DTYPES)} expected")
        for what, values in (("shape", shape), ("data_offsets", offsets)):
            if not isinstance(values, list) or not all(type(n) is int and 0 <= n < 2**62 for n in values):
                raise ValueError(f"tensor {name!r} with {what} {values!r}")
        if len(offsets) != 2 or offsets[1] - offsets[0] != _DTYPES[dtype].itemsize * math.prod(shape):
            raise ValueError(f"tensor {name!r} of shape {shape} at the bytes {offsets}")
        entries[name] = (_DTYPES[dtype], tuple(shape), *offsets)
    end = 0
    for name, (_, _, first, last) in sorted(entries.items(), key=lambda item: item[1][2:]):
        if first != end:
            raise ValueError(f"tensor {name!r} begins at byte {first}, {end} expected")
        end = last
    if end != size:
        raise ValueError(f"{end} bytes of tensors expected from the header, {size} found")
    return meta, entries
