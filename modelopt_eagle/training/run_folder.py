"""The output folder of a run: held by one run at a time, and rid of what killed ones left half-written."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from filelock import Timeout

from modelopt_eagle.common.files import disk_trouble, file_lock
from modelopt_eagle.common.folders import alive
from modelopt_eagle.common.sealed import SEAL
from modelopt_eagle.errors import TrainingError
from modelopt_eagle.target.lora import FOLDER as ADAPTER

LOCK, HOLDER = ".lock", ".holder"
"""The lock of an output folder, and a file that says who holds it."""

_OURS = re.compile(r"model\.safetensors|draft_config\.json|optimizer\.pt|rng-\d+\.pt|trainer_state\.json|recipe\.yaml")


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep other runs out of an output folder while this is open; the system frees it when its holder dies.

    Raises:
        TrainingError: another run holds it, or it cannot be made.
    """
    holder = folder / HOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / LOCK).is_symlink() or holder.is_symlink():
            raise TrainingError(f"{folder / LOCK} is a link; name another training.output_dir, or remove it")
        lock = file_lock(folder / LOCK, wait=False)
        lock.acquire()
    except Timeout as error:
        who = ""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            who = f" ({holder.read_text(encoding='utf-8').strip()[:200]})"
        raise TrainingError(
            f"another run writes into {folder}{who}: wait for its end, or name another training.output_dir"
        ) from error
    except OSError as error:
        raise TrainingError(
            f"cannot write into {folder}: {disk_trouble(error)}; name a training.output_dir that can be written"
        ) from error
    try:
        with contextlib.suppress(OSError):  # only for the message of others
            holder.write_text(f"process {os.getpid()} on {socket.gethostname()}\n", encoding="utf-8")
        yield
    finally:
        with contextlib.suppress(OSError):
            holder.unlink(missing_ok=True)
        lock.release()


def sweep(folder: Path) -> str | None:
    """Remove what runs that were killed have left half-written; call it while the folder is held.

    Checkpoints without their seal are removed if all that lies in them is ours; links never lead anywhere.

    Returns:
        one line that counts it, or ``None`` if there was nothing.
    """
    checkpoints = [
        entry for entry in folder.glob("checkpoint-*")
        if re.fullmatch(r"checkpoint-\d+", entry.name) and _is_unsealed(entry)
    ]  # fmt: skip
    ours = re.compile(r"\.(checkpoint-\d+\.part|best\.link|tokens-[0-9a-f]{32})")
    parts = [entry for entry in folder.glob(".*") if ours.fullmatch(entry.name)]
    for place in (folder, folder / "report"):
        found = ((entry, re.fullmatch(r"\..+\.part-(\d+)", entry.name)) for entry in place.glob(".*.part-*"))
        parts += [entry for entry, match in found if match and not alive(int(match[1]))]
    for entry in (*checkpoints, *parts):
        remove(entry)
    if not checkpoints and not parts:
        return None
    return (
        f"{folder}: removed what killed runs had left: {len(checkpoints)} unfinished checkpoints, "
        f"{len(parts)} temporary files"
    )


def _is_unsealed(entry: Path) -> bool:
    """Whether an entry is a checkpoint of ours that never got its seal."""
    if entry.is_symlink() or not entry.is_dir() or (entry / SEAL).exists():
        return False
    names = [file.name for file in entry.iterdir() if not re.fullmatch(r"\..+\.part-\d+", file.name)]
    return all(_OURS.fullmatch(name) or name == ADAPTER for name in names)


def remove(entry: Path) -> None:
    """Remove a file, a folder with all in it, or a link (and nothing of what it points to).

    Raises:
        OSError: it cannot be removed.
    """
    if entry.is_symlink() or not entry.is_dir():
        entry.unlink(missing_ok=True)
    else:
        shutil.rmtree(entry)
