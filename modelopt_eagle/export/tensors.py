"""Reading a head's tensors from disk: one safetensors file, shards with an index, or a pickled ``.bin``."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from modelopt_eagle.errors import CheckpointError

SINGLE_FILES = ("model.safetensors", "draft.safetensors", "pytorch_model.bin")
INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def read_json(path: Path) -> dict:
    """A JSON object.

    Raises:
        CheckpointError: missing, broken, or no object.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} must hold a JSON object, found {type(data).__name__}")
    return data


def weight_files(folder: Path) -> list[Path]:
    """The files that together hold the tensors.

    Raises:
        CheckpointError: none, or an index that names a file that is not there.
    """
    for name in INDEX_FILES:
        if (folder / name).is_file():
            shards = sorted(set(read_json(folder / name).get("weight_map", {}).values()))
            missing = [shard for shard in shards if not (folder / shard).is_file()]
            if missing or not shards:
                raise CheckpointError(
                    f"{folder / name} names {len(shards)} shards, missing: {', '.join(missing) or 'all'}: copy the "
                    "whole folder again"
                )
            return [folder / shard for shard in shards]
    for name in SINGLE_FILES:
        if (folder / name).is_file():
            return [folder / name]
    raise CheckpointError(f"{folder} holds no weights: expected one of {', '.join(SINGLE_FILES + INDEX_FILES)}")


def read_file(path: Path) -> dict[str, Tensor]:
    """All tensors of one file, on the CPU.

    Raises:
        CheckpointError: cut short, not of its format, or a pickle that holds anything but tensors.
    """
    try:
        if path.suffix == ".safetensors":
            with safe_open(str(path), framework="pt", device="cpu") as file:
                return {name: file.get_tensor(name) for name in file.keys()}
        data = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, OSError, EOFError, RuntimeError) as error:
        size = path.stat().st_size if path.exists() else 0
        raise CheckpointError(f"{path} ({size} bytes) is cut short or damaged: {error}: copy it again") from error
    except Exception as error:  # weights_only refuses code with an unpickling error of its own
        raise CheckpointError(
            f"{path} is refused: a pickle may hold tensors only ({str(error).splitlines()[0]})"
        ) from error
    if isinstance(data, dict) and isinstance(data.get("state_dict"), dict):
        data = data["state_dict"]
    if not isinstance(data, dict) or not all(isinstance(value, Tensor) for value in data.values()):
        raise CheckpointError(f"{path} must hold a plain dictionary of tensors")
    return data


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a head's folder, under the names they have there.

    Raises:
        CheckpointError: see :func:`weight_files` and :func:`read_file`; also a tensor that the index names and no
            shard holds, or one that two shards hold.
    """
    tensors: dict[str, Tensor] = {}
    for path in weight_files(folder):
        for name, tensor in read_file(path).items():
            if name in tensors:
                raise CheckpointError(f"{folder}: two shards hold {name!r}")
            tensors[name] = tensor
    for index in INDEX_FILES:
        if (folder / index).is_file():
            lost = sorted(set(read_json(folder / index)["weight_map"]) - set(tensors))
            if lost:
                raise CheckpointError(f"{folder / index} names tensors that no shard holds: {', '.join(lost[:5])}")
            break
    return tensors
