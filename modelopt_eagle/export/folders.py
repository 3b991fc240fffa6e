"""Folders on disk: written whole or not at all, and found again from a training run's output."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from modelopt_eagle.common import folders
from modelopt_eagle.common.files import disk_trouble
from modelopt_eagle.common.folders import bring_back
from modelopt_eagle.common.sealed import SEAL, is_sealed, seal_fault
from modelopt_eagle.errors import CheckpointError, ExportError, MissingExtraError
from modelopt_eagle.target.gguf import gguf_keys
from modelopt_eagle.target.lora import CONFIG as ADAPTER_CONFIG
from modelopt_eagle.target.lora import FOLDER as ADAPTER
from modelopt_eagle.target.lora import WEIGHTS as ADAPTER_WEIGHTS

COMPLETE_MARKER = SEAL
"""Written last into each training checkpoint; a folder without it was cut short."""

GGUF_FILE = "draft.gguf"
"""A head as llama.cpp reads it."""
GGUF_HEADS = ("eagle3", "dflash")
"""llama.cpp's names of what such a file may hold."""
EXPORT_FILES = ("config.json", "README.md", "hf_quant_config.json")
"""With ``*.safetensors`` or ``draft.gguf`` and the folder of the target's adapter, all that an export holds; a folder
with anything else is never overwritten."""


def is_export(path: Path) -> bool:
    """Whether a folder holds an earlier export and no link, and so may be replaced or uploaded."""
    if any(entry.is_symlink() for entry in path.rglob("*")):
        return False  # what it points to is no part of it
    return ((path / "config.json").is_file() or (path / GGUF_FILE).is_file()) and all(
        entry.name in (*EXPORT_FILES, GGUF_FILE)
        or entry.suffix == ".safetensors"
        or entry.name == "model.safetensors.index.json"
        or (entry.name == ADAPTER and {file.name for file in entry.glob("*")} <= {ADAPTER_WEIGHTS, ADAPTER_CONFIG})
        for entry in path.iterdir()
    )


@contextmanager
def whole_folder(path: str | Path, overwrite: bool = False) -> Iterator[Path]:
    """Write an export whole or not at all, see :func:`modelopt_eagle.common.folders.whole_folder`.

    Args:
        path: the folder to make; if it is a link to a folder, that one is written and the link stays.
        overwrite: replace an earlier export that stands there.

    Yields:
        The temporary folder to write into.

    Raises:
        ExportError: ``path`` exists and may not be replaced, or the disk is full or refuses.
    """
    path = Path(path)
    if path.is_symlink():
        path = path.resolve()
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
                f"{path} holds files that no export writes, or links, so it is not overwritten: name another folder"
            )
    try:
        with folders.whole_folder(path) as part:
            yield part
    except OSError as error:
        raise ExportError(
            f"could not write {path} ({disk_trouble(error)}); what stood there before is unchanged"
        ) from error


def head_in_gguf(path: Path) -> str | None:
    """What is to be said where a head is asked for and a GGUF file is found; ``None``: there is none.

    Args:
        path: as it was given, a file or a folder.
    """
    file = path if path.is_file() else path / GGUF_FILE
    if not file.is_file() or file.suffix != ".gguf":
        return None
    try:
        kind = gguf_keys(file).get("general.architecture")
    except MissingExtraError:
        return f"{file} is a GGUF file, which is no folder of a head: name the one that it was converted from"
    if kind not in GGUF_HEADS:
        return f"{file} is a model as a GGUF file ({kind}) and no head: name the folder of a head"
    return (
        f"{file} is a draft head as a GGUF file ({kind}), which llama.cpp reads and nothing here does: name the folder "
        f"that it was converted from; to serve it: llama-server -m TARGET.gguf -md {file} --spec-type draft-{kind}; to "
        f"hold it against that folder: check_serving.py --engine llama.cpp --export_path {file.parent} --checkpoint "
        "FOLDER --base_model TARGET"
    )


def step_of(folder: Path) -> int:
    """The step in the name ``checkpoint-STEP``; -1 if there is none."""
    found = re.fullmatch(r"checkpoint-(\d+)", folder.name)
    return int(found.group(1)) if found else -1


def as_written(folder: Path) -> Path:
    """A folder that holds a head; a training checkpoint's head is compared with its seal.

    Raises:
        CheckpointError: a file of the head was altered since it was written, or is missing.
    """
    if step_of(folder) >= 0 and is_sealed(folder):
        fault = seal_fault(folder, concerns=lambda name: not name.endswith(".pt"))  # the head does not depend on those
        if fault is not None:
            raise CheckpointError(f"{folder} is not as training wrote it: {fault}; use another checkpoint of the run")
    return folder


def resolve_checkpoint(path: str | Path) -> Path:
    """The folder that holds a head: ``path`` itself, or the best or newest complete checkpoint under it.

    Args:
        path: an export, another tool's head, a training checkpoint, or a run's output folder with ``checkpoint-*``
            (and perhaps ``best``) in it.

    Raises:
        CheckpointError: nothing there, no complete checkpoint, or one that was altered since it was written.
    """
    path = Path(path)
    if not path.is_dir():
        bring_back(path)
    if (said := head_in_gguf(path)) is not None and not (path / "config.json").is_file():
        raise CheckpointError(said)
    if not path.is_dir():
        raise CheckpointError(f"{path} is no folder: expected a draft checkpoint, an export or a run's output folder")
    if (path / "config.json").is_file() or (path / "draft_config.json").is_file():
        if step_of(path) >= 0 and not (path / COMPLETE_MARKER).is_file():
            raise CheckpointError(
                f"{path} was cut short while saving ({COMPLETE_MARKER} is missing): use an earlier checkpoint, or the "
                "run's output folder, which picks the newest complete one"
            )
        return as_written(path)
    best = path / "best"
    if best.is_dir() and (best / COMPLETE_MARKER).is_file():
        return as_written(best.resolve())
    checkpoints = sorted((c for c in path.glob("checkpoint-*") if step_of(c) >= 0), key=step_of)
    complete = [c for c in checkpoints if (c / COMPLETE_MARKER).is_file()]
    if complete:
        return as_written(complete[-1])
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
