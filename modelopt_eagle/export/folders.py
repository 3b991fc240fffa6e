"""Folders on disk: written whole or not at all, and found again from a training run's output."""

from __future__ import annotations

import ctypes
import errno
import glob
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from modelopt_eagle.errors import CheckpointError, ExportError
from modelopt_eagle.target.lora import CONFIG as ADAPTER_CONFIG
from modelopt_eagle.target.lora import FOLDER as ADAPTER
from modelopt_eagle.target.lora import WEIGHTS as ADAPTER_WEIGHTS

COMPLETE_MARKER = "complete.json"
"""Written last into each training checkpoint; a folder without it was cut short."""

AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""Linux: names from the working directory; ``renameat2`` exchanges two of them."""
LEFT_FOR = 3600.0
"""Seconds after which parts of a folder whose process is gone are removed; it may run on another machine."""

EXPORT_FILES = ("config.json", "README.md", "hf_quant_config.json")
"""With ``*.safetensors`` and the folder of the target's adapter, all that an export holds; a folder with anything else
is never overwritten."""


def is_export(path: Path) -> bool:
    """Whether a folder holds an earlier export, and so may be replaced."""
    return (path / "config.json").is_file() and all(
        entry.name in EXPORT_FILES
        or entry.suffix == ".safetensors"
        or entry.name == "model.safetensors.index.json"
        or (entry.name == ADAPTER and {file.name for file in entry.glob("*")} <= {ADAPTER_WEIGHTS, ADAPTER_CONFIG})
        for entry in path.iterdir()
    )


def exchange(a: Path, b: Path) -> bool:
    """Let two folders change names in one step; ``False`` where the system cannot (nothing is changed then)."""
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


@contextmanager
def whole_folder(path: str | Path, overwrite: bool = False) -> Iterator[Path]:
    """Write a folder under a temporary name beside ``path`` and rename it at the end.

    If the body raises, ``path`` is as it was: absent, or with its old content. If the process is killed, ``path`` is
    the old folder or the new one, whole.

    Args:
        path: the folder to make.
        overwrite: replace an earlier export that stands there.

    Yields:
        The temporary folder to write into.

    Raises:
        ExportError: ``path`` exists and may not be replaced, or the disk is full or refuses.
    """
    path = Path(path)
    bring_back(path)
    if path.exists() and not path.is_dir():
        raise ExportError(f"{path} is a file; name a folder to export to")
    if path.is_dir() and any(path.iterdir()):
        if not overwrite:
            raise ExportError(
                f"{path} exists and is kept: name another folder, or pass --overwrite to replace it whole"
            )
        if not is_export(path):
            raise ExportError(
                f"{path} holds files that no export writes, so it is not overwritten: name another folder"
            )
    part = path.with_name(f".{path.name}.part-{os.getpid()}")
    try:
        part.mkdir(parents=True)
        yield part
        put_in_place(part, path)
    except OSError as error:
        full = " (the disk is full)" if error.errno == errno.ENOSPC or "No space left" in str(error) else ""
        raise ExportError(f"could not write {path}{full}: {error}; what stood there before is unchanged") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def step_of(folder: Path) -> int:
    """The step in the name ``checkpoint-STEP``; -1 if there is none."""
    found = re.fullmatch(r"checkpoint-(\d+)", folder.name)
    return int(found.group(1)) if found else -1


def resolve_checkpoint(path: str | Path) -> Path:
    """The folder that holds a head: ``path`` itself, or the best or newest complete checkpoint under it.

    Args:
        path: an export, another tool's head, a training checkpoint, or a run's output folder with ``checkpoint-*``
            (and perhaps ``best``) in it.

    Raises:
        CheckpointError: nothing there, or no complete checkpoint.
    """
    path = Path(path)
    if not path.is_dir():
        bring_back(path)
    if not path.is_dir():
        raise CheckpointError(f"{path} is no folder: expected a draft checkpoint, an export or a run's output folder")
    if (path / "config.json").is_file() or (path / "draft_config.json").is_file():
        if step_of(path) >= 0 and not (path / COMPLETE_MARKER).is_file():
            raise CheckpointError(
                f"{path} was cut short while saving ({COMPLETE_MARKER} is missing): use an earlier checkpoint, or the "
                "run's output folder, which picks the newest complete one"
            )
        return path
    best = path / "best"
    if best.is_dir() and (best / COMPLETE_MARKER).is_file():
        return best.resolve()
    checkpoints = sorted((c for c in path.glob("checkpoint-*") if step_of(c) >= 0), key=step_of)
    complete = [c for c in checkpoints if (c / COMPLETE_MARKER).is_file()]
    if complete:
        return complete[-1]
    if checkpoints:
        raise CheckpointError(
            f"none of the {len(checkpoints)} checkpoints in {path} is complete ({COMPLETE_MARKER} is written last): "
            "train on, it resumes from what is there"
        )
    found = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "nothing"
    raise CheckpointError(
        f"{path} holds no head: expected config.json (a head), draft_config.json (a training checkpoint) or "
        f"checkpoint-* folders; found {found}"
    )
