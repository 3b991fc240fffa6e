"""The safetensors of a model, one file or sharded, local or in the hub's cache; single tensors are read from them."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from modelopt_eagle.common.strict_json import parse_json
from modelopt_eagle.common.text import first_line
from modelopt_eagle.errors import TargetError
from modelopt_eagle.target.identity import folder_fingerprint

_PLAIN = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class CheckpointFiles:
    """The tensors of a checkpoint by key; a shard is opened (and fetched, for a hub id) when a key in it is asked for.

    Args:
        place: local folder or hub id.
        revision: on the hub.

    Raises:
        TargetError: no safetensors there, or a file that cannot be read.
    """

    def __init__(self, place: Path | str, revision: str | None = None):
        self.place = place
        self._revision = revision
        self._handles: dict[str, object] = {}
        index = self._find("model.safetensors.index.json")
        if index is not None:
            try:
                self._file_of = dict(parse_json(index.read_bytes(), finite=False)["weight_map"])
            except (ValueError, KeyError, TypeError) as error:
                raise TargetError(f"{index}: expected a weight_map of keys to files: {error}") from error
        elif self._find("model.safetensors") is not None:
            self._file_of = dict.fromkeys(self._open("model.safetensors").keys(), "model.safetensors")
        else:
            raise TargetError(
                f"{place}: expected model.safetensors or model.safetensors.index.json, found neither; save the model "
                "with save_pretrained, which writes safetensors"
            )

    @property
    def keys(self) -> list[str]:
        """The keys of all tensors."""
        return list(self._file_of)

    def shape(self, key: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        return tuple(self._handle(key).get_slice(key).get_shape())

    def tensor(self, key: str) -> Tensor:
        """Read one tensor; returns it on the CPU, in the dtype it is stored in."""
        if key not in self._file_of:
            raise TargetError(f"{self.place}: expected a tensor {key}, found none")
        tensor = self._handle(key).get_tensor(key)
        if tensor.dtype not in _PLAIN:
            raise TargetError(
                f"{self.place}: expected {key} in plain floating point, found {tensor.dtype}; give a checkpoint that "
                "leaves embedding, final norm and output head unquantised"
            )
        return tensor

    def _handle(self, key: str):
        handle = self._open(self._file_of[key])
        if key not in set(handle.keys()):
            raise TargetError(f"{self.place}: the index puts {key} in {self._file_of[key]}, which does not hold it")
        return handle

    def _open(self, file_name: str):
        if file_name not in self._handles:
            from safetensors import SafetensorError, safe_open

            path = self._find(file_name)
            if path is None:
                raise TargetError(f"{self.place}: the shard {file_name} named in the index is missing; fetch it again")
            try:
                self._handles[file_name] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise TargetError(f"{path}: cut short or damaged ({error}); fetch it again") from error
        return self._handles[file_name]

    def _find(self, file_name: str) -> Path | None:
        """The local path of a file of the model, or None if the model has no such file."""
        if isinstance(self.place, Path):
            path = self.place / file_name
            return path if path.is_file() else None
        return hub_file(self.place, file_name, self._revision)


def hub_file(name: str, file_name: str, revision: str | None = None) -> Path | None:
    """The local path of a file of a model on the hub, fetched or from the cache; None if the model has no such file.

    Raises:
        TargetError: the repository is gated, or has no such revision.
    """
    from transformers.utils import cached_file

    try:
        found = cached_file(
            name,
            file_name,
            revision=revision or "main",
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    except OSError as error:
        raise TargetError(f"{name}: cannot fetch {file_name}: {first_line(error)}") from error
    return None if found is None else Path(found)


def content_revision(place: Path | str, revision: str | None = None) -> str:
    """What tells one version of a model from another: its commit on the hub, a fingerprint of a local folder."""
    if isinstance(place, Path):
        return folder_fingerprint(place)
    config = hub_file(place, "config.json", revision)
    if config is None:
        raise TargetError(f"{place}: expected a config.json on the hub or in its cache, found none")
    commit = re.search(r"/snapshots/([0-9a-f]{40})/", config.as_posix())
    return commit.group(1) if commit else folder_fingerprint(config.parent)
