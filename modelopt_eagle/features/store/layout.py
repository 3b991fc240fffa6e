"""Whether the tensors of a shard are what :mod:`~modelopt_eagle.features.store.codec` writes: kinds, sizes, offsets.

A checksum tells that a file is as it was written, not who wrote it. What passes here can be read without surprises.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from modelopt_eagle.features.batch import FeatureContract, needed_final_positions, predicting_positions
from modelopt_eagle.features.store.codec import STORAGE_DTYPES
from modelopt_eagle.features.store.manifest import ShardEntry

_SCALED = ("float8_e4m3", "int8")


def layout_fault(shard: dict[str, Tensor], contract: FeatureContract, entry: ShardEntry) -> str | None:
    """What is wrong with a shard's tensors, or ``None``.

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
