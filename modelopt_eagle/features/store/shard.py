"""One shard, mapped into memory: its tensors are views of the file and cost no copy."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch

from modelopt_eagle.errors import FeatureError
from modelopt_eagle.features.batch import FeatureContract
from modelopt_eagle.features.store.files import file_sha256
from modelopt_eagle.features.store.manifest import ShardEntry

_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}
_REMEDY = "delete this shard and its entry by `modelopt-eagle features verify DIR --drop-bad`, then run the dump again"


def map_safetensors(path: Path) -> tuple[dict[str, torch.Tensor], dict]:
    """Map a safetensors file; the pages are read when they are used, and the file handle is closed at once.

    Returns:
        its tensors, views of the file (private: writing to them leaves the file as it is), and its metadata.

    Raises:
        FeatureError: a file that is not safetensors, or is shorter or longer than its header says.
    """
    size = path.stat().st_size
    try:
        with open(path, "rb") as file:
            header_length = int.from_bytes(file.read(8), "little")
            if not 2 <= header_length <= min(size - 8, 100_000_000):
                raise ValueError(f"header length {header_length} in a file of {size} bytes")
            header = json.loads(file.read(header_length))
        meta = header.pop("__metadata__", {})
        start = 8 + header_length
        end = start + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if end != size:
            raise ValueError(f"{end} bytes expected from the header, {size} found")
        storage = torch.UntypedStorage.from_file(str(path), shared=False, nbytes=size)
        tensors = {}
        for name, entry in header.items():
            dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
            first, last = entry["data_offsets"]
            if last - first != dtype.itemsize * math.prod(shape):
                raise ValueError(f"tensor {name} of shape {shape} has {last - first} bytes")
            view = torch.empty(0, dtype=torch.uint8).set_(storage, start + first, (last - first,))
            if (start + first) % dtype.itemsize:
                view = view.clone()  # a foreign writer may leave tensors unaligned
            tensors[name] = view.view(dtype).view(shape)
        return tensors, meta
    except (ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise FeatureError(f"{path} is not a whole safetensors file: {error}; {_REMEDY}") from error


def check_size(folder: Path, entry: ShardEntry) -> None:
    """Find a shard that is absent or cut, without reading it.

    Raises:
        FeatureError: names the shard with both sizes.
    """
    path = folder / entry.file
    if not path.is_file():
        raise FeatureError(f"shard {path} is missing though the manifest names it; {_REMEDY}")
    if (size := path.stat().st_size) != entry.bytes:
        raise FeatureError(f"shard {path} is cut or altered: {entry.bytes:,} bytes expected, {size:,} found; {_REMEDY}")


def open_shard(folder: Path, entry: ShardEntry, contract: FeatureContract, checksum: bool) -> dict[str, torch.Tensor]:
    """Map a shard and check it against its manifest entry.

    Args:
        folder: the store.
        entry: what the manifest says of it.
        contract: the store's contract.
        checksum: read the whole file and compare its sha256.

    Raises:
        FeatureError: names the shard: cut, altered, of other rows or another contract, or not a number.
    """
    path = folder / entry.file
    check_size(folder, entry)
    if checksum and (found := file_sha256(path)) != entry.sha256:
        raise FeatureError(
            f"shard {path} was altered: sha256 {entry.sha256[:16]}… expected, {found[:16]}… found; {_REMEDY}"
        )
    shard, meta = map_safetensors(path)
    if meta.get("contract"):
        FeatureContract.from_dict(json.loads(meta["contract"])).require(contract, f"shard {path}", ignore=())
    lengths = shard["row_offsets"].diff().tolist() if "row_offsets" in shard else None
    if lengths != entry.tokens:
        raise FeatureError(f"shard {path} does not hold the rows that the manifest names; {_REMEDY}")
    check_prefixes(path, shard)
    check_finite(path, shard, whole=False)
    return shard


def check_prefixes(path: Path, shard: dict[str, torch.Tensor]) -> None:
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
        raise FeatureError(f"shard {path}: row {number} names a prefix that no earlier row has; {_REMEDY}")


def check_finite(path: Path, shard: dict[str, torch.Tensor], whole: bool) -> None:
    """Look for NaN and infinity in a shard's states and scales.

    Args:
        path: for the message.
        shard: its tensors.
        whole: look at every position, not only at the first and last of each row.

    Raises:
        FeatureError: names shard, tensor and row.
    """
    pairs = (("aux", "aux_offsets" if "aux_offsets" in shard else "row_offsets"), ("final", "final_offsets"))
    for kind, offsets_name in pairs:
        offsets = shard[offsets_name]
        for name in (f"{kind}_hidden", f"{kind}_scale"):
            if name not in shard or shard[name].dtype in (torch.int8,) or not len(shard[name]):
                continue
            if whole:
                positions = torch.arange(len(shard[name]))
            else:
                filled = offsets.diff() > 0
                positions = torch.cat([offsets[:-1][filled], offsets[1:][filled] - 1])
            for part in positions.split(4096):
                bad = ~torch.isfinite(shard[name][part].float()).all(-1)  # [p]
                if bad.any():
                    row = int(torch.searchsorted(offsets, part[bad][0], right=True)) - 1
                    raise FeatureError(f"shard {path}: {name} of row {row} holds NaN or infinity; {_REMEDY}")
