"""How rows lie in a shard: which tensors there are, and how states are made smaller.

A shard is one safetensors file of R rows with T tokens in all. Rows lie one after the other in every tensor:

================== ============================ =============================================================
tensor             shape, dtype                 is
================== ============================ =============================================================
row_offsets        [R+1] int64                  row r holds tokens ``row_offsets[r] : row_offsets[r+1]``
input_ids          [T] int32                    token ids
supervised         [T] uint8                    1 where the draft is trained to predict this token
aux_hidden         [T, A*Ht] storage dtype      auxiliary states side by side, in the contract's layer order
aux_scale          [T, A] float32               fp8 and int8 only: the state of layer a is ``aux_hidden * aux_scale``
final_offsets      [R+1] int64                  as row_offsets, for the two tensors below
final_hidden       [F, Ht] storage dtype        final states at the positions of ``needed_final_positions``
final_scale        [F, 1] float32               fp8 and int8 only
teacher_offsets    [R+1] int64                  as row_offsets, for the two tensors below
target_top1        [P] int32                    the target's argmax at predicting positions
target_logsumexp   [P] float32                  log-sum-exp of the target's logits there
================== ============================ =============================================================
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from modelopt_eagle.errors import FeatureError
from modelopt_eagle.features.batch import FeatureContract, FeatureRow, needed_final_positions, predicting_positions

STORAGE_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float8_e4m3": torch.float8_e4m3fn,
    "int8": torch.int8,
}
_LARGEST = {"float8_e4m3": 448.0, "int8": 127.0}


def check_dtype(name: str) -> torch.dtype:
    """The torch dtype of a storage dtype's name.

    Raises:
        FeatureError: a name that the store does not know.
    """
    if name not in STORAGE_DTYPES:
        raise FeatureError(f"storage dtype {name!r} is not known; choose one of {', '.join(STORAGE_DTYPES)}")
    return STORAGE_DTYPES[name]


def shrink(states: torch.Tensor, groups: int, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
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


def restore(stored: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """States as floating point: the stored ones as they are, or float32 times their scales.

    Args:
        stored: [n, groups*width] in the storage dtype.
        scale: [n, groups] float32 or None.
    """
    if scale is None:
        return stored
    grouped = stored.float().unflatten(-1, (scale.shape[-1], -1))  # [n,groups,width]
    return (grouped * scale.unsqueeze(-1)).flatten(-2)


def encode_row(row: FeatureRow, contract: FeatureContract) -> dict[str, torch.Tensor]:
    """The tensors of one row on the CPU, as a shard holds them.

    Raises:
        FeatureError: shapes that break the contract, or a state that is not finite.
    """
    row.validate(contract)
    supervised = row.supervised.cpu()
    final = row.final_hidden.cpu()[needed_final_positions(supervised)]  # [f,Ht]
    for name, states in (("aux_hidden", row.aux_hidden), ("final_hidden", final)):
        if not torch.isfinite(states).all():
            raise FeatureError(f"row {row.row_id!r}: {name} holds NaN or infinity; such a row is not stored")
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


def row_bytes(tensors: dict[str, torch.Tensor]) -> int:
    """Bytes that an encoded row adds to a shard."""
    return sum(tensor.nbytes for tensor in tensors.values())


def join_rows(rows: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The tensors of a shard from its encoded rows, which must all hold the same kinds of tensors."""
    kinds = set(rows[0])
    if any(set(row) != kinds for row in rows):
        raise FeatureError("rows with and without the target's predictions cannot share a shard")

    def offsets(name):
        lengths = torch.tensor([0] + [len(row[name]) for row in rows])
        return lengths.cumsum(0)  # [R+1]

    shard = {name: torch.cat([row[name] for row in rows]).contiguous() for name in sorted(kinds)}
    shard["row_offsets"] = offsets("input_ids")
    shard["final_offsets"] = offsets("final_hidden")
    if "target_top1" in kinds:
        shard["teacher_offsets"] = offsets("target_top1")
    return shard


def decode_row(shard: dict[str, torch.Tensor], number: int, row_id: str, category: str) -> FeatureRow:
    """Row ``number`` of a shard's tensors; aux states of float32 and bfloat16 shards are views, not copies."""

    def cut(name, offsets):
        if name not in shard:
            return None
        start, stop = shard[offsets][number : number + 2].tolist()
        return shard[name][start:stop]

    supervised = cut("supervised", "row_offsets").bool()  # [s]
    kept = restore(cut("final_hidden", "final_offsets"), cut("final_scale", "final_offsets"))  # [f,Ht]
    final = kept.new_zeros(len(supervised), kept.shape[-1])  # [s,Ht]
    final[needed_final_positions(supervised)] = kept
    predicting = predicting_positions(supervised)

    def spread(name, empty, dtype):
        values = cut(name, "teacher_offsets")
        if values is None:
            return None
        whole = torch.full((len(supervised),), empty, dtype=dtype)  # [s]
        whole[predicting] = values.to(dtype)
        return whole

    return FeatureRow(
        row_id=row_id,
        category=category,
        input_ids=cut("input_ids", "row_offsets").long(),
        supervised=supervised,
        aux_hidden=restore(cut("aux_hidden", "row_offsets"), cut("aux_scale", "row_offsets")),  # [s,A*Ht]
        final_hidden=final,
        target_top1=spread("target_top1", -1, torch.long),
        target_logsumexp=spread("target_logsumexp", 0.0, torch.float32),
    )


def bytes_per_token(contract: FeatureContract, supervised_share: float) -> float:
    """Expected bytes of a token in a store.

    Args:
        contract: gives dtype, width and number of layers.
        supervised_share: supervised tokens over all tokens.
    """
    item = check_dtype(contract.dtype).itemsize
    scale = 4 if contract.dtype in _LARGEST else 0
    layers = len(contract.aux_layer_ids)
    per_token = 4 + 1 + layers * (contract.hidden_size * item + scale)
    per_supervised = contract.hidden_size * item + scale + 8
    return per_token + supervised_share * per_supervised
