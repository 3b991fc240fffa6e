"""How rows lie in a shard: which tensors there are, and how states are made smaller.

A shard is one safetensors file of R rows with T tokens in all. Rows lie one after the other in every tensor:

================== ============================ =============================================================
tensor             shape, dtype                 is
================== ============================ =============================================================
row_offsets        [R+1] int64                  row r holds tokens ``row_offsets[r] : row_offsets[r+1]``
input_ids          [T] int32                    token ids
supervised         [T] uint8                    1 where the draft is trained to predict this token
aux_hidden         [U, A·Ht] storage dtype      auxiliary states side by side, in the contract's layer order
aux_scale          [U, A] float32               fp8 and int8 only: the state of layer a is ``aux_hidden * aux_scale``
aux_offsets        [R+1] int64                  as row_offsets, for the two tensors above
prefix_row         [R] int64                    an earlier row of the shard that begins with the same tokens, or -1
prefix_length      [R] int64                    how many of the row's aux states are that row's; its own span follows
final_offsets      [R+1] int64                  as row_offsets, for the two tensors below
final_hidden       [F, Ht] storage dtype        final states at the positions of ``needed_final_positions``
final_scale        [F, 1] float32               fp8 and int8 only
teacher_offsets    [R+1] int64                  as row_offsets, for the two tensors below
target_top1        [P] int32                    the target's argmax at predicting positions
target_logsumexp   [P] float32                  log-sum-exp of the target's logits there
================== ============================ =============================================================

``aux_offsets``, ``prefix_row`` and ``prefix_length`` are absent where no row shares a prefix: then U is T, and
``row_offsets`` hold for the aux states too (so it always is in format version 1).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from modelopt_eagle.common.dtypes import STATE_DTYPES
from modelopt_eagle.errors import FeatureError
from modelopt_eagle.features.batch import FeatureContract, FeatureRow, needed_final_positions, predicting_positions
from modelopt_eagle.features.store.sharing import segments

STORAGE_DTYPES = {name: kind.torch for name, kind in STATE_DTYPES.items() if kind.stored}
_LARGEST = {"float8_e4m3": 448.0, "int8": 127.0}
AUX_TENSORS = ("aux_hidden", "aux_scale")


def check_dtype(name: str) -> torch.dtype:
    """The torch dtype of a storage dtype's name.

    Raises:
        FeatureError: a name that the store does not know.
    """
    if name not in STORAGE_DTYPES:
        raise FeatureError(f"storage dtype {name!r} is not known; choose one of {', '.join(STORAGE_DTYPES)}")
    return STORAGE_DTYPES[name]


def shrink(states: Tensor, groups: int, name: str) -> tuple[Tensor, Tensor | None]:
    """Cast states for storage; fp8 and int8 get one scale for each position and group of columns.

    Args:
        states: [n, groups*width] floating.
        groups: layers side by side in the columns; each has its own scale, for layers differ in size by orders.
        name: storage dtype.

    Returns:
        [n, groups*width] in the storage dtype, and scales [n, groups] float32 (None for float32 and bfloat16).
    """
    dtype = check_dtype(name)
    if name not in _LARGEST:
        return states.to(dtype), None
    grouped = states.float().unflatten(-1, (groups, -1))  # [n,groups,width]
    scale = grouped.abs().amax(-1).clamp_min(1e-30) / _LARGEST[name]  # [n,groups]
    scaled = grouped / scale.unsqueeze(-1)  # [n,groups,width]
    if name == "int8":
        scaled = scaled.round()
    return scaled.clamp(-_LARGEST[name], _LARGEST[name]).flatten(-2).to(dtype), scale


def served_dtype(name: str) -> torch.dtype:
    """The dtype in which states of a storage dtype are handed out: float32 for those with scales, else as stored."""
    return torch.float32 if name in _LARGEST else check_dtype(name)


def restore(stored: Tensor, scale: Tensor | None) -> Tensor:
    """States as floating point: the stored ones as they are, or float32 times their scales.

    Args:
        stored: [n, groups*width] in the storage dtype.
        scale: [n, groups] float32 or None.
    """
    if scale is None:
        return stored
    return restore_into(torch.empty(stored.shape, dtype=torch.float32), stored, scale)


CACHE_BYTES = 256 * 2**10
"""States with scales are widened in pieces of so many bytes, which stay in the processor's cache between passes."""


def restore_into(out: Tensor, stored: Tensor, scale: Tensor | None) -> Tensor:
    """Write states into ``out`` [n, groups*width] of any floating dtype, which is returned; see :func:`restore`."""
    if scale is None:
        return out.copy_(stored)
    rows = max(1, CACHE_BYTES // (4 * max(1, stored.shape[1])))
    parts = (tensor.split(rows) for tensor in (out, stored, scale))
    for place, part, factor in zip(*parts, strict=True):
        wide = place if out.dtype == torch.float32 else torch.empty(place.shape, dtype=torch.float32)
        if stored.dtype == torch.float8_e4m3fn:
            widen_e4m3(wide, part)
        else:
            wide.copy_(part)
        wide.unflatten(-1, (scale.shape[-1], -1)).mul_(factor.unsqueeze(-1))  # [r,groups,width]
        if wide is not place:
            place.copy_(wide)
    return out


def widen_e4m3(out: Tensor, stored: Tensor) -> Tensor:
    """Finite float8_e4m3fn as float32, exactly, several times faster than ``stored.float()`` on a CPU.

    Exponent and mantissa are moved to their places in a float32, whose exponent counts from 127 in place of 7: the
    value is too small by 2^120. Subnormal numbers come out right as well.

    Args:
        out: [n, m] float32, contiguous in its rows; returned.
        stored: [n, m] float8_e4m3fn.
    """
    bits = out.view(torch.int32)
    bits.copy_(stored.view(torch.int8))  # s eeee mmm, the sign extended
    bits.bitwise_left_shift_(20).bitwise_and_(-0x78100000)  # sign, and eeee mmm below exponent bit 27
    return out.mul_(2.0**120)


def encode_row(row: FeatureRow, contract: FeatureContract) -> dict[str, Tensor]:
    """The tensors of one row on the CPU, as a shard holds them.

    Raises:
        FeatureError: shapes that break the contract, or a state that is not finite.
    """
    row.validate(contract)
    supervised = row.supervised.cpu()
    final = row.final_hidden.cpu()[needed_final_positions(supervised)]  # [f,Ht]
    row.check_finite("what was made for a store", "such a row is not stored")
    aux, aux_scale = shrink(row.aux_hidden.cpu(), len(contract.aux_layer_ids), contract.dtype)
    final, final_scale = shrink(final, 1, contract.dtype)
    tensors = {
        "input_ids": row.input_ids.cpu().int(),
        "supervised": supervised.to(torch.uint8),
        "aux_hidden": aux,
        "aux_scale": aux_scale,
        "final_hidden": final,
        "final_scale": final_scale,
    }
    predicting = predicting_positions(supervised)
    for name, dtype in (("target_top1", torch.int32), ("target_logsumexp", torch.float32)):
        value = getattr(row, name)
        tensors[name] = None if value is None else value.cpu()[predicting].to(dtype)  # [p]
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def row_bytes(tensors: dict[str, Tensor]) -> int:
    """Bytes that an encoded row adds to a shard."""
    return sum(tensor.nbytes for tensor in tensors.values())


def drop_prefix(encoded: dict[str, Tensor], row: int, length: int) -> dict[str, Tensor]:
    """An encoded row without its first aux states, which are those of an earlier row of the shard."""
    own = {name: encoded[name][length:] for name in AUX_TENSORS if name in encoded}
    return {**encoded, **own, "prefix": torch.tensor([row, length])}


def join_rows(rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of a shard from its encoded rows, which must all hold the same kinds of tensors."""
    kinds = {name for name in rows[0] if name != "prefix"}
    if any(set(row) - {"prefix"} != kinds for row in rows):
        raise FeatureError("rows with and without the target's predictions cannot share a shard")

    def offsets(name):
        lengths = torch.tensor([0] + [len(row[name]) for row in rows])
        return lengths.cumsum(0)  # [R+1]

    shard = {name: torch.cat([row[name] for row in rows]).contiguous() for name in sorted(kinds)}
    shard["row_offsets"] = offsets("input_ids")
    shard["final_offsets"] = offsets("final_hidden")
    if "target_top1" in kinds:
        shard["teacher_offsets"] = offsets("target_top1")
    if any("prefix" in row for row in rows):
        none = torch.tensor([-1, 0])
        prefix = torch.stack([row.get("prefix", none) for row in rows])  # [R,2]
        shard["prefix_row"], shard["prefix_length"] = prefix[:, 0].contiguous(), prefix[:, 1].contiguous()
        shard["aux_offsets"] = offsets("aux_hidden")
    return shard


def _span(shard: dict[str, Tensor], offsets: str, number: int) -> slice:
    return slice(*shard[offsets][number : number + 2].tolist())


def aux_parts(shard: dict[str, Tensor], number: int, length: int) -> list[slice]:
    """Spans of ``aux_hidden`` that hold the first ``length`` aux states of a row, in order."""
    if "aux_offsets" not in shard:
        start = int(shard["row_offsets"][number])
        return [slice(start, start + length)]
    parts = []
    for row, first, last in segments(shard["prefix_row"], shard["prefix_length"], number, length):
        at = int(shard["aux_offsets"][row]) - int(shard["prefix_length"][row])
        parts.append(slice(at + first, at + last))
    return parts


def read_aux(shard: dict[str, Tensor], number: int, length: int, out: Tensor | None = None) -> Tensor:
    """The first aux states [length, A·Ht] of a row, written into ``out`` if it is given.

    Without ``out`` those of a float32 or bfloat16 row that lie in one piece are a view of the shard.
    """
    stored, scale = shard["aux_hidden"], shard.get("aux_scale")
    parts = aux_parts(shard, number, length)
    if out is None and scale is None and len(parts) == 1:
        return stored[parts[0]]
    if out is None:
        out = torch.empty(length, stored.shape[1], dtype=stored.dtype if scale is None else torch.float32)
    at = 0
    for part in parts:
        size = part.stop - part.start
        restore_into(out[at : at + size], stored[part], None if scale is None else scale[part])
        at += size
    return out


def read_final(shard: dict[str, Tensor], number: int, supervised: Tensor, out: Tensor | None = None) -> Tensor:
    """Final states [s, Ht] of a row, zero where none is stored, written into ``out`` if it is given.

    Args:
        supervised: [s] bool of the row.
    """
    span = _span(shard, "final_offsets", number)
    kept = shard["final_hidden"][span]  # [f,Ht]
    scale = shard["final_scale"][span] if "final_scale" in shard else None
    if out is None:
        dtype = kept.dtype if scale is None else torch.float32
        out = torch.empty(len(supervised), kept.shape[1], dtype=dtype)
    taken, at = 0, 0
    for first, last in runs(needed_final_positions(supervised)):  # a run an answer
        size = last - first
        out[at:first] = 0
        restore_into(out[first:last], kept[taken : taken + size], None if scale is None else scale[taken:][:size])
        taken, at = taken + size, last
    out[at:] = 0
    return out


def runs(flags: Tensor) -> list[tuple[int, int]]:
    """(first, one past the last) of each run of True in [s] bool."""
    places = flags.nonzero().flatten().tolist()
    edges = [i for i in range(1, len(places)) if places[i] != places[i - 1] + 1]
    return [(places[a], places[b - 1] + 1) for a, b in zip([0, *edges], [*edges, len(places)], strict=True) if b > a]


def decode_row(
    shard: dict[str, Tensor],
    number: int,
    row_id: str,
    category: str,
    aux_out: Tensor | None = None,
    final_out: Tensor | None = None,
) -> FeatureRow:
    """Row ``number`` of a shard's tensors.

    Args:
        aux_out, final_out: [s, A·Ht] and [s, Ht] of any floating dtype, to be filled with the states; without them
            aux states are views of the shard where they can be.
    """
    at = _span(shard, "row_offsets", number)
    supervised = shard["supervised"][at].bool()  # [s]
    predicting = predicting_positions(supervised)

    def spread(name, empty, dtype):
        if name not in shard:
            return None
        whole = torch.full((len(supervised),), empty, dtype=dtype)  # [s]
        return whole.masked_scatter_(predicting, shard[name][_span(shard, "teacher_offsets", number)].to(dtype))

    return FeatureRow(
        row_id=row_id,
        category=category,
        input_ids=shard["input_ids"][at].long(),
        supervised=supervised,
        aux_hidden=read_aux(shard, number, len(supervised), aux_out),  # [s,A·Ht]
        final_hidden=read_final(shard, number, supervised, final_out),  # [s,Ht]
        target_top1=spread("target_top1", -1, torch.long),
        target_logsumexp=spread("target_logsumexp", 0.0, torch.float32),
    )


def aux_bytes(contract: FeatureContract) -> int:
    """Bytes that the aux states of one token take."""
    scale = 4 if contract.dtype in _LARGEST else 0
    return len(contract.aux_layer_ids) * (contract.hidden_size * check_dtype(contract.dtype).itemsize + scale)


def bytes_per_token(contract: FeatureContract, supervised_share: float, shared_share: float = 0.0) -> float:
    """Expected bytes of a token in a store.

    Args:
        contract: gives dtype, width and number of layers.
        supervised_share: supervised tokens over all tokens.
        shared_share: tokens that take their aux states from another row, over all tokens.
    """
    item = check_dtype(contract.dtype).itemsize
    scale = 4 if contract.dtype in _LARGEST else 0
    per_token = 4 + 1 + (1 - shared_share) * aux_bytes(contract)
    per_supervised = contract.hidden_size * item + scale + 8
    return per_token + supervised_share * per_supervised
