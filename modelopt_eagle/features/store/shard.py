"""One shard, mapped into memory: its tensors are views of the file and cost no copy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from modelopt_eagle.common.files import file_sha256
from modelopt_eagle.common.strict_json import parse_json
from modelopt_eagle.errors import FeatureError
from modelopt_eagle.features.batch import FeatureContract, needed_final_positions, predicting_positions
from modelopt_eagle.features.store.codec import STORAGE_DTYPES
from modelopt_eagle.features.store.files import REMEDY, map_safetensors
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
        check_finite(path, shard, entry.row_ids)
    return shard


_SCALED = ("float8_e4m3", "int8")


def layout_fault(shard: dict[str, Tensor], contract: FeatureContract, entry: ShardEntry) -> str | None:
    """What is wrong with a shard's tensors, or ``None``: whether they are what ``codec`` writes.

    A checksum tells that a file is as it was written, not who wrote it. What passes here can be read without surprises.

    Args:
        shard: tensors by name.
        contract: the store's contract.
        entry: what the manifest says of the shard.
    """
    if contract.dtype not in STORAGE_DTYPES:
        return f"no store holds states in {contract.dtype}"
    return _kinds(shard, contract) or _offsets(shard, entry) or _rows(shard, contract, entry)


def _kinds(shard: dict[str, Tensor], contract: FeatureContract) -> str | None:
    """Names, dtypes, dimensions and widths."""
    states, width, layers = STORAGE_DTYPES[contract.dtype], contract.hidden_size, len(contract.aux_layer_ids)
    wanted = {
        "row_offsets": (torch.int64, None),
        "input_ids": (torch.int32, None),
        "supervised": (torch.uint8, None),
        "aux_hidden": (states, width * layers),
        "final_offsets": (torch.int64, None),
        "final_hidden": (states, width),
    }
    if contract.dtype in _SCALED:
        wanted |= {"aux_scale": (torch.float32, layers), "final_scale": (torch.float32, 1)}
    if "teacher_offsets" in shard:
        wanted |= {"teacher_offsets": (torch.int64, None), "target_top1": (torch.int32, None)}
        if "target_logsumexp" in shard:
            wanted["target_logsumexp"] = (torch.float32, None)
    if "aux_offsets" in shard:
        wanted |= dict.fromkeys(("aux_offsets", "prefix_row", "prefix_length"), (torch.int64, None))
    if set(shard) != set(wanted):
        return f"tensors {sorted(wanted)} expected, {sorted(shard)} found"
    for name, (dtype, columns) in wanted.items():
        tensor = shard[name]
        fits = tensor.ndim == (1 if columns is None else 2) and (columns is None or tensor.shape[1] == columns)
        if tensor.dtype != dtype or not fits:
            shape = "[n]" if columns is None else f"[n, {columns}]"
            return f"{name} of {dtype} {shape} expected, {tensor.dtype} {list(tensor.shape)} found"
    return None


def _offsets(shard: dict[str, Tensor], entry: ShardEntry) -> str | None:
    """Offsets that ascend from 0 to the length of what they point into, a row each."""
    own_span = ["aux_hidden", "aux_scale"]
    places = {"row_offsets": ["input_ids", "supervised"], "final_offsets": ["final_hidden", "final_scale"]}
    if "aux_offsets" in shard:
        places["aux_offsets"] = own_span[1:]  # ``check_prefixes`` looks at the states themselves
    else:
        places["row_offsets"] += own_span
    if "teacher_offsets" in shard:
        places["teacher_offsets"] = ["target_top1", "target_logsumexp"]
    rows = len(entry.tokens)
    for name, pointed in places.items():
        offsets = shard[name]
        if len(offsets) != rows + 1 or int(offsets[0]) != 0 or bool((offsets.diff() < 0).any()):
            return f"{name} does not ascend from 0 over {rows} rows"
        for tensor in pointed:
            if tensor in shard and len(shard[tensor]) != int(offsets[-1]):
                return f"{name} ends at {int(offsets[-1])}, {tensor} has {len(shard[tensor])} positions"
    for name in ("prefix_row", "prefix_length"):
        if name in shard and len(shard[name]) != rows:
            return f"{name} has {len(shard[name])} values for {rows} rows"
    if shard["row_offsets"].diff().tolist() != entry.tokens:
        return "it does not hold the rows that the manifest names"
    return None


def _rows(shard: dict[str, Tensor], contract: FeatureContract, entry: ShardEntry) -> str | None:
    """Values of ids and masks, and as many states and predictions as each row's mask asks for."""
    ids, marks = shard["input_ids"], shard["supervised"]
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < contract.vocab_size:
        return f"token ids outside of [0, {contract.vocab_size})"
    if len(marks) and int(marks.max()) > 1:
        return "supervised holds values other than 0 and 1"
    starts = shard["row_offsets"].tolist()
    finals = shard["final_offsets"].diff().tolist()
    teachers = shard["teacher_offsets"].diff().tolist() if "teacher_offsets" in shard else None
    for row, (first, last) in enumerate(pairwise(starts)):
        supervised = marks[first:last].bool()  # [s]
        if int(supervised.sum()) != entry.supervised[row]:
            return f"row {row} has {int(supervised.sum())} supervised tokens, the manifest says {entry.supervised[row]}"
        if int(needed_final_positions(supervised).sum()) != finals[row]:
            return f"row {row} has final states at {finals[row]} positions, which its mask does not ask for"
        if teachers is not None and int(predicting_positions(supervised).sum()) != teachers[row]:
            return f"row {row} has {teachers[row]} predictions, which its mask does not ask for"
    if teachers is not None and len(top1 := shard["target_top1"]):
        if not 0 <= int(top1.min()) <= int(top1.max()) < contract.vocab_size:
            return f"target_top1 outside of [0, {contract.vocab_size})"
    return None


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


def check_finite(path: Path, shard: dict[str, Tensor], row_ids: Sequence[str]) -> None:
    """Look for NaN and infinity in a shard's states, scales and predictions, at every position.

    Args:
        path: for the message.
        shard: its tensors.
        row_ids: names of its rows.

    Raises:
        FeatureError: names shard, tensor and rows, and counts them.
    """
    offsets = {"aux": "aux_offsets" if "aux_offsets" in shard else "row_offsets", "final": "final_offsets"}
    places = {f"{kind}_{part}": spans for kind, spans in offsets.items() for part in ("hidden", "scale")}
    for name, spans in (places | {"target_logsumexp": "teacher_offsets"}).items():
        if name not in shard or shard[name].dtype == torch.int8:
            continue
        bad: set[int] = set()
        for number, part in enumerate(shard[name].split(_POSITIONS)):
            at = (~_is_finite(part)).nonzero()[:, 0] + number * _POSITIONS
            bad.update((torch.searchsorted(shard[spans], at, right=True) - 1).tolist())
        if bad:
            rows = ", ".join(repr(row_ids[row]) for row in sorted(bad)[:_SHOWN])
            more = f" and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
            raise FeatureError(
                f"shard {path}: {name} holds NaN or infinity in {len(bad)} of {len(row_ids)} rows: {rows}{more}; "
                f"{REMEDY}"
            )


_SHOWN = 6
"""Rows that a message names."""
_POSITIONS = 4096
"""Positions looked at at a time."""


def _is_finite(states: Tensor) -> Tensor:
    """[p, ...] bool; float8_e4m3fn has no infinity, and one pattern of bits for NaN, with either sign."""
    if states.dtype == torch.float8_e4m3fn:
        return states.view(torch.uint8) & 0x7F != 0x7F
    return torch.isfinite(states)
