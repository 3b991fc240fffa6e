"""Fingerprints that tell one target from another: weights, tokenizer, chat template."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelopt_eagle.common.files import read_json
from modelopt_eagle.errors import TargetError
from modelopt_eagle.target.chat import chat_settings
from modelopt_eagle.target.hashes import file_hashes

MARKER_FILE = "modelopt_eagle_target.json"  # in converted folders: {"model": name, "revision": of the GGUF file}
_CONVERT_AGAIN = "remove its folder, the target is converted again"
_BLOCKS, _BLOCK_BYTES = 16, 4096


@dataclass(frozen=True)
class TargetIdentity(Mapping[str, Any]):
    """What features and heads of a target are recorded with.

    It may be read as a mapping (``identity["model"]``, ``dict(identity)``), as it is in recorded files.

    Attributes:
        model: name, or that of the local folder.
        revision: commit on the hub, or a fingerprint of the content; compared by :func:`same_revision`.
        tokenizer_hash, template_hash: of :func:`tokenizer_hash` and :func:`template_hash`.
        hidden_size, num_layers, vocab_size: Ht, number of decoder layers, V.
    """

    model: str
    revision: str
    tokenizer_hash: str
    template_hash: str
    hidden_size: int
    num_layers: int
    vocab_size: int

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    def __getitem__(self, name: str) -> Any:
        if name not in self.__dataclass_fields__:
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return (part.name for part in fields(self))

    def __len__(self) -> int:
        return len(fields(self))

    def __or__(self, changes: Mapping[str, Any]) -> TargetIdentity:
        return replace(self, **changes)


def tokenizer_hash(tokenizer) -> str:
    """Hash of what decides the ids of a text: vocabulary, merges, added and special tokens (not padding)."""
    if tokenizer is None:
        return ""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    merges = []
    if backend is not None:
        pairs = json.loads(backend.to_str())["model"].get("merges") or []
        merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in pairs]
    parts = [
        sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0])),
        merges,
        [tokenizer.bos_token_id, tokenizer.eos_token_id],
    ]
    return _digest(json.dumps(parts, ensure_ascii=True).encode())


def template_hash(tokenizer) -> str:
    """Hash of the chat template in effect and of the arguments it is rendered with, ``""`` if there is no template."""
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        return ""
    arguments = chat_settings(tokenizer).arguments
    given = json.dumps(arguments, sort_keys=True) if arguments else ""
    return _digest((tokenizer.get_chat_template() + given).encode())


def same_revision(one: str | None, other: str | None) -> bool:
    """Whether two recorded revisions are of the same weights.

    A fingerprint is ``<of samples>-<of every byte>``. Stores and checkpoints of before 2026-12 have the first half
    alone, and are compared by that.

    Args:
        one, other: commits on the hub, fingerprints, or None.
    """
    if one is None or other is None:
        return one == other
    if "-" in one and "-" in other:
        return one == other
    return one.partition("-")[0] == other.partition("-")[0]


def other_revision(one: str | None, other: str | None) -> bool:
    """Whether two recorded revisions are known to differ; a commit and a fingerprint may be of the same files."""
    if not one or not other:
        return False
    return _is_commit(one) == _is_commit(other) and not same_revision(one, other)


def _is_commit(revision: str) -> bool:
    return len(revision) == 40


def file_fingerprint(path: Path) -> str:
    """Hash of a large file: of samples of its content, and of the whole."""
    return f"{_sampled(path)}-{file_hashes([path])[0][:16]}"


def _sampled(path: Path) -> str:
    """Hash of a file's size, its first block and 16 blocks spread over it."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as stream:
        for block in range(_BLOCKS + 1):
            stream.seek(size * block // (_BLOCKS + 1))
            digest.update(stream.read(_BLOCK_BYTES))
    return digest.hexdigest()[:16]


def folder_fingerprint(folder: Path) -> str:
    """Hash of a local model: of ``config.json`` and its weight files, of samples of them and of every byte.

    A converted folder gives the fingerprint of the file it came from, which no version of transformers changes.
    """
    marker = folder / MARKER_FILE
    if marker.is_file():
        return read_json(marker, TargetError, _CONVERT_AGAIN)["revision"]
    files = [folder / "config.json", *sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")])]
    files = [path for path in files if path.is_file()]
    samples = [[path.name, _sampled(path)] for path in files]
    whole = [[path.name, found] for path, found in zip(files, file_hashes(files), strict=True)]
    return "-".join(_digest(json.dumps(parts).encode()) for parts in (samples, whole))


def memory_fingerprint(config, weights: Iterable[Tensor]) -> str:
    """Hash of a model that came from no folder: of its config and weights, of samples of them and of every value."""
    samples = hashlib.sha256(config.to_json_string(use_diff=False).encode())
    whole = samples.copy()
    for weight in weights:
        if not weight.is_meta:  # offloaded
            flat = weight.detach().reshape(-1)  # [n]
            samples.update(flat[:: max(1, flat.numel() // 1024)].float().cpu().numpy().tobytes())
            whole.update(flat.cpu().contiguous().view(torch.uint8).numpy().data)
    return f"{samples.hexdigest()[:16]}-{whole.hexdigest()[:16]}"


def local_name(folder: Path) -> str:
    """The name of a local model: what a converted folder says of itself, or the name of the folder."""
    marker = folder / MARKER_FILE
    if marker.is_file():
        return read_json(marker, TargetError, _CONVERT_AGAIN)["model"]
    return folder.resolve().name


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
