"""One shard, mapped into memory: its tensors are views of the file and cost no copy."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from modelopt_eagle.common.files import file_sha256
from modelopt_eagle.common.strict_json import parse_json
from modelopt_eagle.errors import FeatureError
from modelopt_eagle.features.batch import FeatureContract
from modelopt_eagle.features.store.files import REMEDY, map_safetensors
from modelopt_eagle.features.store.layout import layout_fault
from modelopt_eagle.features.store.manifest import ShardEntry


def check_size(folder: Path, entry: ShardEntry) -> None:
    """Find a shard that is absent or cut, without reading it.

    Raises:
        FeatureError: names the shard with both sizes.
    """
    path = folder / entry.file
    if not path.is_file():
        raise FeatureError(f"shard {path} is missing though the manifest names it; {REMEDY}")
    if (size := path.stat().st_size) != entry.bytes:
        raise FeatureError(f"shard {path} is cut or altered: {entry.bytes:,} bytes expected, {size:,} found; {REMEDY}")


def open_shard(folder: Path, entry: ShardEntry, contract: FeatureContract, checksum: bool) -> dict[str, Tensor]:
    """Map a shard and check it against its manifest entry.

    Args:
        folder: the store.
        entry: what the manifest says of it.
        contract: the store's contract.
        checksum: read the whole file and compare its sha256.

    Returns:
        its tensors by name, mapped into memory.

    Raises:
        FeatureError: names the shard: cut, altered, of other rows or another contract, or not a number.
    """
    path = folder / entry.file
    check_size(folder, entry)
    if checksum and (found := file_sha256(path)) != entry.sha256:
        raise FeatureError(
            f"shard {path} was altered: sha256 {entry.sha256[:16]}… expected, {found[:16]}… found; {REMEDY}"
        )
    shard, meta = map_safetensors(path)
    try:
        stated = FeatureContract.from_dict(parse_json(meta["contract"])) if "contract" in meta else contract
    except ValueError as error:
        raise FeatureError(f"shard {path} states no contract that can be read ({error}); {REMEDY}") from error
    stated.require(contract, f"shard {path}", ignore=())
    if checksum and (fault := layout_fault(shard, contract, entry)):
        raise FeatureError(f"shard {path} is not what its manifest says: {fault}; {REMEDY}")
    check_prefixes(path, shard)
    if checksum:
        check_finite(path, shard)
    return shard


def check_prefixes(path: Path, shard: dict[str, Tensor]) -> None:
    """Check that every row finds all its aux states: its own span, and those of an earlier row with equal tokens.

    Raises:
        FeatureError: names shard and row.
    """
    if "aux_offsets" not in shard:
        return
    lengths = shard["row_offsets"].diff()  # [R]
    length, row = shard["prefix_length"], shard["prefix_row"]  # [R]
    borrows = length > 0
    sound = (length >= 0) & (length <= lengths) & (~borrows | ((row >= 0) & (row < torch.arange(len(row)))))
    sound &= length <= torch.where(borrows, lengths[row.clamp(0, len(row) - 1)], 0)
    sound &= shard["aux_offsets"].diff() == lengths - length
    ids, starts = shard["input_ids"], shard["row_offsets"]
    for number in range(len(row)):
        if sound[number] and borrows[number]:
            n, ours, theirs = int(length[number]), int(starts[number]), int(starts[row[number]])
            sound[number] = torch.equal(ids[ours : ours + n], ids[theirs : theirs + n])
    if not sound.all() or len(shard["aux_hidden"]) != int(shard["aux_offsets"][-1]):
        number = int((~sound).nonzero()[0]) if not sound.all() else len(row) - 1
        raise FeatureError(f"shard {path}: row {number} names a prefix that no earlier row has; {REMEDY}")


def check_finite(path: Path, shard: dict[str, Tensor]) -> None:
    """Look for NaN and infinity in a shard's states and scales, at every position.

    Args:
        path: for the message.
        shard: its tensors.

    Raises:
        FeatureError: names shard, tensor and row.
    """
    pairs = (("aux", "aux_offsets" if "aux_offsets" in shard else "row_offsets"), ("final", "final_offsets"))
    for kind, offsets_name in pairs:
        for name in (f"{kind}_hidden", f"{kind}_scale"):
            if name not in shard or shard[name].dtype == torch.int8:
                continue
            for number, part in enumerate(shard[name].split(_POSITIONS)):
                finite = _is_finite(part)  # [p,width]
                if not finite.all():
                    position = number * _POSITIONS + int((~finite.all(-1)).nonzero()[0])
                    row = int(torch.searchsorted(shard[offsets_name], position, right=True)) - 1
                    raise FeatureError(f"shard {path}: {name} of row {row} holds NaN or infinity; {REMEDY}")


_POSITIONS = 4096
"""Positions looked at at a time."""


def _is_finite(states: Tensor) -> Tensor:
    """[p, width] bool; float8_e4m3fn has no infinity, and one pattern of bits for NaN, with either sign."""
    if states.dtype == torch.float8_e4m3fn:
        return states.view(torch.uint8) & 0x7F != 0x7F
    return torch.isfinite(states)
