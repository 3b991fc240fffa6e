"""The files in which other tools dump hidden states.

====================  =============================================================================================
format                what a folder holds
====================  =============================================================================================
Model-Optimizer       ``ID.pt`` a conversation: ``input_ids [s]``, ``aux_hidden_states [s, A·Ht]``,
                      ``hidden_states [s, Ht]``; newer ones also ``loss_mask [s]`` and ``hidden_states_prenorm``
SpecForge             ``rows_A-B/data_N.ckpt`` (or ``.ckpt.gz``): ``input_ids [s]``, ``loss_mask [s]``,
                      ``aux_hidden_state [1, s, A·Ht]``, ``hidden_state [1, s, Ht]``
AngelSlim             ``rank_R/rows_A-B/data_N.ckpt``: ``input_ids [1, s]``, ``loss_mask [1, s]``,
                      ``hidden_states [1, s, A·Ht]`` (of the captured layers), ``target_hiddens [1, s, Ht]``
speculators           ``hidden_states/hs_N.safetensors``: ``hidden_states [s, A+1, Ht]``, ``token_ids [s]``, beside a
                      ``datasets`` folder with ``input_ids`` and ``loss_mask``; older ones ``data_N.pt`` with a list
                      ``hidden_states`` of A+1 tensors
====================  =============================================================================================

Files are unpickled with ``weights_only=True``: they cannot run code.
"""

from __future__ import annotations

import gzip
import io
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from modelopt_eagle.common.package import require_extra
from modelopt_eagle.common.pickles import load_tensors
from modelopt_eagle.errors import FeatureError
from modelopt_eagle.features.store.files import map_safetensors


@dataclass
class ForeignFile:
    """One file's tensors in our names; ``final_is_normed`` is None where the file does not say it."""

    input_ids: Tensor
    aux_hidden: Tensor
    final_hidden: Tensor
    supervised: Tensor | None
    final_is_normed: bool | None


MOST_UNPACKED = 64
"""Times its size that a compressed file may unpack to; hidden states shrink by less than a half."""


def _unpacked(path: Path) -> io.BytesIO:
    """The content of a gzip file, which may not be out of all proportion.

    Raises:
        ValueError: it is.
    """
    limit = MOST_UNPACKED * path.stat().st_size + 2**20
    with gzip.open(path, "rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"it unpacks to more than {limit:,} bytes, {MOST_UNPACKED} times its size")
    return io.BytesIO(content)


def _load(path: Path) -> dict:
    """The dictionary of a ``.pt``, ``.ckpt`` or ``.ckpt.gz`` file."""
    try:
        value = load_tensors(_unpacked(path)) if path.suffix == ".gz" else load_tensors(path, mmap=True)
    except (ValueError, OSError, EOFError, zlib.error) as error:
        raise FeatureError(f"{path} cannot be read: {error}; dump it again or delete it") from error
    if not isinstance(value, dict):
        raise FeatureError(f"{path} holds {type(value).__name__}, a dictionary of tensors expected")
    return value


def _take(values: dict, name: str, path: Path, kinds: tuple[type, ...] = (Tensor,)):
    if name not in values:
        raise FeatureError(f"{path} has no {name}; it has {sorted(values)}")
    if not isinstance(values[name], kinds):
        found = type(values[name]).__name__
        raise FeatureError(f"{path}: {name} is a {found}, a {kinds[0].__name__} expected; dump it again")
    return values[name]


def _read_model_optimizer(path: Path, masks) -> ForeignFile:
    values = _load(path)
    prenorm = values.get("hidden_states_prenorm")
    return ForeignFile(
        _take(values, "input_ids", path),
        _take(values, "aux_hidden_states", path),
        _take(values, "hidden_states", path),
        values.get("loss_mask"),
        None if prenorm is None else not bool(prenorm),
    )


def _read_specforge(path: Path, masks) -> ForeignFile:
    """Also a rank's folder of AngelSlim, whose files are called alike."""
    values = _load(path)
    if "target_hiddens" in values:
        return _read_angelslim(path, masks)
    aux, final = _take(values, "aux_hidden_state", path), _take(values, "hidden_state", path)
    return ForeignFile(
        _take(values, "input_ids", path), aux.flatten(0, -2), final.flatten(0, -2), values.get("loss_mask"), None
    )


def _read_angelslim(path: Path, masks) -> ForeignFile:
    values = _load(path)
    ids, mask = _take(values, "input_ids", path), values.get("loss_mask")
    aux, final = _take(values, "hidden_states", path), _take(values, "target_hiddens", path)
    return ForeignFile(
        ids.flatten(), aux.flatten(0, -2), final.flatten(0, -2), None if mask is None else mask.flatten(), None
    )


def _read_speculators(path: Path, masks) -> ForeignFile:
    if path.suffix == ".pt":
        values = _load(path)
        states = torch.stack(list(_take(values, "hidden_states", path, (list, tuple))), 1)  # [s,A+1,Ht]
        ids, mask = _take(values, "input_ids", path), values.get("loss_mask")
    else:
        values, _ = map_safetensors(path)
        states, ids = _take(values, "hidden_states", path), _take(values, "token_ids", path)
        mask = masks(_number(path), ids) if masks is not None else None
    if states.ndim != 3:
        raise FeatureError(f"{path}: hidden_states of shape [s, A+1, Ht] expected, {tuple(states.shape)} found")
    return ForeignFile(ids, states[:, :-1].flatten(1), states[:, -1], mask, None)


FORMATS: dict[str, tuple[tuple[str, ...], Callable]] = {
    "speculators": (("hs_*.safetensors", "hidden_states/hs_*.safetensors", "data_*.pt"), _read_speculators),
    "SpecForge": (("data_*.ckpt", "data_*.ckpt.gz", "rows_*/data_*.ckpt", "rows_*/data_*.ckpt.gz"), _read_specforge),
    "AngelSlim": (("rank_*/rows_*/data_*.ckpt",), _read_angelslim),
    "Model-Optimizer": (("*.pt",), _read_model_optimizer),
}


def _number(path: Path) -> int:
    return int(re.findall(r"\d+", path.name)[0])


def _natural(path: Path) -> list:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", str(path))]


def row_name(path: Path) -> str:
    """A file's path without what says its kind; a conversation's id may hold dots itself."""
    return re.sub(r"\.(pt|ckpt|ckpt\.gz|safetensors)$", "", str(path))


def find_format(folder: str | Path) -> tuple[str, list[Path]]:
    """Name of the format of a foreign dump, and its files in their natural order.

    Raises:
        FeatureError: not a folder, or none of the known layouts.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FeatureError(f"folder of features {folder} does not exist")
    for name, (patterns, _) in FORMATS.items():
        if files := sorted({path for pattern in patterns for path in folder.glob(pattern)}, key=_natural):
            return name, files
    raise FeatureError(
        f"{folder} is neither a feature store (manifest.json) nor a dump of Model-Optimizer (*.pt), SpecForge "
        "(rows_*/data_*.ckpt[.gz]), AngelSlim (rank_*/rows_*/data_*.ckpt) or speculators (hs_*.safetensors)"
    )


def arrow_masks(folder: Path) -> Callable[[int, Tensor], Tensor] | None:
    """Loss masks of a speculators folder by file number, from the data set beside it; None if there is none."""
    place = next((p for p in (folder, folder.parent) if (p / "dataset_info.json").is_file()), None)
    if place is None:
        return None
    rows = require_extra("datasets", "data").load_from_disk(str(place))

    def mask(number: int, ids: Tensor) -> Tensor:
        if number >= len(rows):
            raise FeatureError(f"{place} has {len(rows)} rows, none for hs_{number}.safetensors")
        row = rows[number]
        if list(row["input_ids"]) != ids.flatten().tolist():
            raise FeatureError(f"hs_{number}.safetensors holds states of other tokens than row {number} of {place}")
        return torch.as_tensor(row["loss_mask"])

    return mask
