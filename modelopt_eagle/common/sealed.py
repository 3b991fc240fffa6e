"""Folders with a seal: a file written last of all, with the size and the SHA-256 of every other one."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from pathlib import Path, PurePosixPath

from modelopt_eagle.common.files import file_sha256, write_whole

SEAL = "complete.json"


def seal(folder: Path, **values) -> None:
    """Seal a folder whose files are all written.

    Args:
        values: further plain values for the seal.

    Raises:
        OSError: the disk is full or refuses.
    """
    found = sorted(file for file in folder.rglob("*") if file.is_file())
    files = {
        file.relative_to(folder).as_posix(): {"bytes": file.stat().st_size, "sha256": file_sha256(file)}
        for file in found
    }
    write_whole(folder / SEAL, json.dumps({**values, "files": files}, indent=1))


def is_sealed(folder: Path) -> bool:
    """Whether a folder has a seal that vouches for files; an empty object says only that the folder is complete."""
    marker = folder / SEAL
    return marker.is_file() and marker.read_bytes().strip() != b"{}"


def seal_fault(
    folder: Path, needed: Collection[str] = (), concerns: Callable[[str], bool] = lambda name: True
) -> str | None:
    """Why a sealed folder is not as it was written; ``None`` if it is.

    Args:
        needed: names that the seal must vouch for.
        concerns: for a name in the folder, whether its content is compared; all are there and of their size anyway.
    """
    marker = folder / SEAL
    if not marker.is_file():
        return f"it was cut short while saving ({SEAL} is missing)"
    try:
        files = json.loads(marker.read_text(encoding="utf-8"))["files"]
        sums = [(name, entry["bytes"], entry["sha256"]) for name, entry in files.items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"its {SEAL} cannot be read"
    if unnamed := [name for name in needed if name not in files]:
        return f"its {SEAL} does not name {', '.join(unnamed)}"
    for name, size, digest in sums:
        file, parts = folder / name, PurePosixPath(name).parts
        if not parts or parts[0] == "/" or ".." in parts:
            return f"its {SEAL} names {name!r}, which lies outside of it"
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes, {size} were written"
        if concerns(name) and file_sha256(file) != digest:
            return f"{name} was altered after it was written (checksum)"
    return None
