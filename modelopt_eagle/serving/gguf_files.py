"""Target and head as the GGUF files that llama.cpp is given: made from what there is, and held against each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from modelopt_eagle.common.package import require_extra
from modelopt_eagle.draft.base import DraftModule
from modelopt_eagle.errors import ExportError
from modelopt_eagle.export.folders import GGUF_FILE
from modelopt_eagle.export.gguf import export_gguf
from modelopt_eagle.target.gguf import gguf_file_of, gguf_keys
from modelopt_eagle.target.to_gguf import unpacked_copy


@dataclass(frozen=True)
class TargetSizes:
    """What a head's file must agree with.

    Attributes:
        name: of the target, for messages.
        vocab_size, hidden_size, num_layers: V, Ht and the number of decoder layers.
    """

    name: str
    vocab_size: int
    hidden_size: int
    num_layers: int


def sizes_of_file(file: Path) -> TargetSizes:
    """Those of a target's GGUF file."""
    keys = gguf_keys(file)
    kind = keys["general.architecture"]
    vocab = keys.get(f"{kind}.vocab_size") or len(keys["tokenizer.ggml.tokens"])
    return TargetSizes(str(file), vocab, keys[f"{kind}.embedding_length"], keys[f"{kind}.block_count"])


def check_head_file(file: Path, target: TargetSizes) -> None:
    """Refuse a head's file that is one for another target; the server would read beyond its tables, or end.

    Raises:
        ExportError: another width, vocabulary or depth, or no head.
    """
    keys = gguf_keys(file)
    kind = keys.get("general.architecture")
    layers = keys.get(f"{kind}.target_layers")
    if not layers:
        raise ExportError(f"{file} is no head for llama.cpp: its architecture is {kind}, and it names no target_layers")
    told = {
        "tokens": (keys.get(f"{kind}.vocab_size"), target.vocab_size),
        "numbers a state": (keys.get(f"{kind}.target_hidden_size"), target.hidden_size),
    }
    wrong = [f"{head} {what}, not {own}" for what, (head, own) in told.items() if head is not None and head != own]
    if max(layers) > target.num_layers:
        wrong.append(f"at least {max(layers)} layers, not {target.num_layers}")
    if wrong:
        raise ExportError(
            f"{file} is a head for another target than {target.name}: one of {' and '.join(wrong)}; convert the head "
            "of this target"
        )


def head_file(export_path: Path, head: DraftModule | None, target: TargetSizes, folder: Path) -> Path:
    """The file that llama.cpp is given of a head.

    Args:
        export_path: its folder; a file of ``convert_checkpoint --to gguf`` in it is taken as it is.
        head: what was read from the folder, where it holds no such file.
        target: whose head it must be.
        folder: where the file is written, in float32.

    Raises:
        ExportError: a head that llama.cpp would compute otherwise, or one for another target.
    """
    given = export_path if export_path.suffix == ".gguf" else export_path / GGUF_FILE
    if head is None:
        file = given
    else:
        export_gguf(head, folder / "head", dtype=torch.float32, target_layers=target.num_layers, overwrite=True)
        file = folder / "head" / GGUF_FILE
    check_head_file(file, target)
    return file


def holds_file(export_path: Path) -> bool:
    """Whether a place is a head's GGUF file, or a folder with one."""
    return (export_path.suffix == ".gguf" and export_path.is_file()) or (export_path / GGUF_FILE).is_file()


def worded_target(base_model: str) -> Path:
    """The GGUF file of a target that a server can answer words with.

    Raises:
        ExportError: a target that is no GGUF file.
        MissingExtraError: gguf is not installed.
    """
    require_extra("gguf", "gguf")
    file = gguf_file_of(base_model)
    if file is None:
        raise ExportError(
            f"llama.cpp serves a target out of a GGUF file, with its words: convert {base_model} with llama.cpp's "
            "convert_hf_to_gguf.py --outtype f32, and give the file as --base_model"
        )
    return file


def float32_target(file: Path, folder: Path) -> tuple[Path, Mapping[str, Any]]:
    """A target's GGUF file unpacked into float32, and its keys."""
    path = folder / "target.gguf"
    unpacked_copy(file, path)
    return path, gguf_keys(path)
