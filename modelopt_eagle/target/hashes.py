"""Hashes of whole weight files, each file read once: they are kept by path, size and times of the file."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from modelopt_eagle.common.console import say
from modelopt_eagle.common.files import file_lock, file_sha256, write_whole

KEPT = "hashes.json"
MOST_KEPT = 10_000
"""Files that are remembered; the ones hashed longest ago are forgotten first."""
_TOLD_BYTES = 4 * 2**30
_THREADS = 4


def cache_folder() -> Path:
    """Where converted targets and the hashes of weight files lie."""
    return Path(os.environ.get("MODELOPT_EAGLE_CACHE") or "~/.cache/modelopt_eagle").expanduser()


def file_hashes(files: Sequence[Path]) -> list[str]:
    """SHA-256 of each file's bytes, from the cache where the file is as it was.

    A file counts as unchanged with the same resolved path, size, inode, and times of content and status; the last is
    set by the system alone, so that a copy with its times kept is read again. Several processes read a file once: the
    others wait. Where the cache cannot be written, files are read each time.

    Raises:
        OSError: a file cannot be read.
    """
    files = [file.resolve() for file in files]
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        with file_lock(folder / f"{KEPT}.lock"):
            return _through_cache(files, folder / KEPT)
    except OSError:
        return _read(files)


def _through_cache(files: list[Path], cache: Path) -> list[str]:
    kept = _load(cache)
    states = {str(file): _state(file) for file in files}
    missing = [file for file in files if kept.get(str(file), [None])[:-1] != states[str(file)]]
    if missing:
        for file, value in zip(missing, _read(missing), strict=True):
            kept.pop(str(file), None)
            if _state(file) == states[str(file)]:  # not written to while it was read
                kept[str(file)] = [*states[str(file)], value]
            else:
                raise OSError(f"{file} changes while it is read")
        newest = list(kept.items())[-MOST_KEPT:]
        write_whole(cache, json.dumps(dict(newest)))
    return [kept[str(file)][-1] for file in files]


def _state(file: Path) -> list[int]:
    """What changes with the content of a file."""
    found = file.stat()
    return [found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns]


def _load(cache: Path) -> dict[str, list]:
    """The hashes kept so far; a file that is not ours to read counts as empty, and is written anew."""
    try:
        kept = json.loads(cache.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(kept, dict):
        return {}
    return {name: value for name, value in kept.items() if isinstance(value, list) and len(value) == 5}


def _read(files: list[Path]) -> list[str]:
    size = sum(file.stat().st_size for file in files)
    if size > _TOLD_BYTES:
        say(f"reading {size / 2**30:.0f} GiB of weights once, to tell this target from others")
    with ThreadPoolExecutor(_THREADS) as threads:
        return list(threads.map(file_sha256, files))
