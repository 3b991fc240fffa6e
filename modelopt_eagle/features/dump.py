"""Fill a store with the features of a data set, by any back end; estimate it first."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from modelopt_eagle.data.packed import chosen_rows, row_lengths
from modelopt_eagle.errors import FeatureError
from modelopt_eagle.features.batch import FeatureContract, FeatureRow
from modelopt_eagle.features.compute import check_tokens, compute_features, compute_rows, finish_row, length_batches
from modelopt_eagle.features.pictures import has_images, refuse_images
from modelopt_eagle.features.store import SHARD_BYTES, StoreWriter, bytes_per_token, dataset_hash
from modelopt_eagle.features.store.manifest import is_store, read_manifests
from modelopt_eagle.features.store.sharing import PrefixIndex
from modelopt_eagle.target.shards import together


class BackEnd(Protocol):
    """What makes features: HF, vLLM or TensorRT-LLM.

    Attributes:
        contract: of the rows that it makes.
        tokenizer: of the target, with the chat template in effect.
        end_token_ids: what the target stops at.
    """

    contract: FeatureContract
    tokenizer: object
    end_token_ids: tuple[int, ...]

    def features(self, rows: Sequence) -> Iterator[tuple[int, FeatureRow]]:
        """(number of the row in ``rows``, its features), in any order, each row once."""
        ...


class TargetBackEnd:
    """Features by a target loaded with transformers.

    Args:
        target: the loaded target.
        aux_layer_ids: canonical ids; None for the default three.
        batch_tokens: padded tokens of one forward.
    """

    def __init__(self, target, aux_layer_ids: Sequence[int] | None = None, batch_tokens: int = 4096):
        self._target, self._batch_tokens = target, batch_tokens
        self.tokenizer, self.vision = target.tokenizer, target.vision
        self.end_token_ids = target.end_token_ids
        self.window = getattr(target.config, "max_position_embeddings", None)
        self.contract = FeatureContract.from_target(target, aux_layer_ids)

    def together(self) -> AbstractContextManager:
        """What the target's forward passes must run in, see :func:`~modelopt_eagle.target.shards.together`."""
        return together(self._target)

    def features(self, rows: Sequence) -> Iterator[tuple[int, FeatureRow]]:
        """See :class:`BackEnd`."""
        return compute_rows(self._target, rows, self.contract.aux_layer_ids, self._batch_tokens)

    def remaining(self, rows: Sequence, done: set[int]) -> Iterator[tuple[int, FeatureRow]]:
        """:meth:`features` without the rows of these numbers, each with the bits that it would have had with them."""
        return compute_rows(self._target, rows, self.contract.aux_layer_ids, self._batch_tokens, done)

    def check(self, rows: Sequence) -> None:
        """Stop before the first row if the target's logits cannot be rebuilt from its final state.

        Raises:
            TargetError: says where and by how much they differ.
        """
        ids = list(min(rows, key=lambda row: len(row.input_ids)).input_ids)
        if self.vision is not None and any(map(has_images, rows)):  # placeholders without their images are no text
            ids = [token for token in ids if token not in self.vision.image_token_ids]
        self._target.check_parity(torch.tensor([ids[:128]]))

    def tokens_per_second(self, rows: Sequence) -> float:
        """Rate of the target over a few rows of middling length, after one batch to warm up."""
        batches = length_batches(row_lengths(rows), self._batch_tokens)
        sample = [rows[i] for i in batches[len(batches) // 2]]
        compute_features(self._target, sample[:1], self.contract.aux_layer_ids)
        begun = time.perf_counter()
        compute_features(self._target, sample, self.contract.aux_layer_ids)
        return sum(len(row.input_ids) for row in sample) / (time.perf_counter() - begun)


class EngineBackEnd:
    """Features by an inference engine that hands out aux states and final states.

    Args:
        tables: ``TargetTables``: final norm and head of the same model, applied here, and its identity.
        aux_layer_ids: canonical ids, ascending.
        states: ``states(rows)`` yields (number of the row, aux [s, A·Ht], final [s, Ht]).
        final_is_normed: whether the engine's final states are post-norm.
    """

    def __init__(
        self,
        tables,
        aux_layer_ids: Sequence[int],
        states: Callable[[Sequence], Iterator],
        *,
        final_is_normed: bool,
    ):
        self._tables, self._states = tables, states
        self._norm = None if final_is_normed else tables.final_norm
        self.tokenizer = tables.tokenizer
        self.end_token_ids = tables.end_token_ids
        self.window = getattr(tables.config, "max_position_embeddings", None)
        contract = FeatureContract.from_identity(tables.identity(), aux_layer_ids)
        self.contract = replace(contract, end_token_ids=self.end_token_ids)

    def features(self, rows: Sequence) -> Iterator[tuple[int, FeatureRow]]:
        """See :class:`BackEnd`."""
        refuse_images(rows, "this back end")
        for number, aux, final in self._states(rows):
            _check_number(number, len(rows))
            yield number, finish_row(rows[number], aux, final, self._norm, self._tables.head)


@dataclass(frozen=True)
class Estimate:
    """What a dump will take.

    Attributes:
        rows, tokens: of this worker, still to be made.
        shared: tokens whose aux states another row of the same shard gives.
        bytes: on disk.
        free: bytes free where the store lies.
        seconds: of the target; None where the back end cannot be timed.
    """

    rows: int
    tokens: int
    shared: int
    bytes: int
    free: int
    seconds: float | None

    def lines(self) -> list[str]:
        """As text."""
        hours = "not measured by this back end" if self.seconds is None else _duration(self.seconds)
        lines = [
            f"rows    {self.rows:,} to make",
            f"tokens  {self.tokens:,}, {self.shared:,} of them in prefixes that are stored once",
            f"disk    {self.bytes / 2**30:,.3f} GiB, {self.free / 2**30:,.1f} GiB free",
            f"time    {hours}",
        ]
        if self.bytes > self.free:
            lines.append("warning: the disk is too small; use a smaller --dtype, fewer rows, or another folder")
        return lines


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:,.2f} h" if seconds >= 3600 else f"{seconds:,.0f} s"


def rows_to_make(rows: Sequence, done: set[int], worker: tuple[int, int]) -> list[int]:
    """Places of a worker's rows in the data set that are not stored yet: every n-th, beginning at i."""
    index, count = worker
    return [i for i in range(index, len(rows), count) if i not in done]


def shared_tokens(rows: Sequence, contract: FeatureContract, shard_bytes: int = SHARD_BYTES) -> int:
    """Tokens in prefixes that rows have in common with an earlier one of their shard, if they are written in order."""
    index, pending, shared = PrefixIndex(), 0.0, 0
    for row in rows:
        length = index.add(torch.as_tensor(row.input_ids, dtype=torch.int32))[1]
        tokens, supervised = len(row.input_ids), sum(row.supervised)
        shared += length
        pending += tokens * bytes_per_token(contract, supervised / max(tokens, 1), length / max(tokens, 1))
        if pending >= shard_bytes:
            index, pending = PrefixIndex(), 0.0
    return shared


def estimate(
    back_end: BackEnd,
    rows: Sequence,
    folder: Path,
    dtype: str,
    worker: tuple[int, int],
    shard_bytes: int = SHARD_BYTES,
) -> Estimate:
    """Bytes, time and disk of the rows that a dump still has to make.

    Args:
        back_end: what will make the rows; timed on a few if it can be.
        rows: the whole tokenised data set.
        folder, dtype, worker, shard_bytes: as for :func:`dump`.
    """
    done: set[int] = set()
    if is_store(folder):
        found = read_manifests(folder).values()
        done = {index for manifest in found for shard in manifest.shards for index in shard.indices}
    mine = chosen_rows(rows, rows_to_make(rows, done, worker))
    tokens = sum(len(row.input_ids) for row in mine)
    supervised = sum(sum(row.supervised) for row in mine)
    contract = replace(back_end.contract, dtype=dtype)
    shared = shared_tokens(mine, contract, shard_bytes)
    rate = back_end.tokens_per_second(mine) if mine and hasattr(back_end, "tokens_per_second") else None
    place = folder.resolve()
    while not place.exists():
        place = place.parent
    return Estimate(
        rows=len(mine),
        tokens=tokens,
        shared=shared,
        bytes=round(tokens * bytes_per_token(contract, supervised / max(tokens, 1), shared / max(tokens, 1))),
        free=shutil.disk_usage(place).free,
        seconds=tokens / rate if rate else None,
    )


def dump(
    back_end: BackEnd,
    rows: Sequence,
    folder: str | Path,
    *,
    dtype: str = "bfloat16",
    worker: tuple[int, int] = (0, 1),
    shard_bytes: int = SHARD_BYTES,
    begin: Callable[[int, int], None] | None = None,
    progress: Callable[[int], None] | None = None,
    parts: Iterable[Sequence[int]] | None = None,
) -> tuple[int, int]:
    """Make and store the rows of one worker that are not stored yet. Ctrl-C keeps every finished row.

    Args:
        back_end: what makes the rows.
        rows: the whole tokenised data set, alike for all workers.
        folder: the store.
        dtype: storage dtype.
        worker: (i, n): every n-th row, beginning at i.
        shard_bytes: size of a shard.
        begin: called once with (rows of this worker already stored, tokens still to be made).
        progress: called with the tokens of each finished row.
        parts: row numbers, part by part, alike for all workers; the next part is asked for when the one before is made.
            Rows that are in none are not made. ``None``: all rows, as one part.

    Returns:
        rows made now, rows of this worker that were there before.

    Raises:
        FeatureError: the store was begun with another contract, other data, or by a worker that still runs; the back
            end left rows out, or made one twice.
    """
    if not rows:
        raise FeatureError("no rows to make features of: the data set is empty")
    contract = replace(back_end.contract, dtype=dtype)
    with StoreWriter(
        folder,
        contract,
        dataset_hash=dataset_hash(rows),
        dataset_rows=len(rows),
        worker=worker,
        shard_bytes=shard_bytes,
    ) as writer:
        mine, missing = rows_to_make(rows, set(), worker), rows_to_make(rows, writer.done, worker)
        before = len(mine) - len(missing)
        if missing and hasattr(back_end, "check"):
            back_end.check(chosen_rows(rows, missing))
        if begin is not None:
            begin(before, sum(len(rows[i].input_ids) for i in missing))
        made = asked = 0
        own, left = set(mine), set(missing)
        for part in [mine] if parts is None else parts:
            here = [index for index in part if index in own]
            wanted = [index for index in here if index in left]
            asked += len(wanted)
            for index, row in _made(back_end, rows, here, wanted):
                check_tokens(rows[index], row)
                writer.add(index, row)
                made += 1
                if progress is not None:
                    progress(len(row))
        if made != asked:
            raise FeatureError(f"{asked} rows were asked for, {made} came back; run the same command again")
    return made, before


def _made(back_end: BackEnd, rows: Sequence, mine: list[int], missing: list[int]) -> Iterator[tuple[int, FeatureRow]]:
    """(place in the data set, its features) of the missing ones among a worker's own rows.

    A back end with ``remaining(rows, done)`` makes them with the bits of an undisturbed run; others batch what is
    missing as they like, which moves states by the rounding of their dtype.
    """
    if not missing:
        return
    if len(missing) < len(mine) and hasattr(back_end, "remaining"):
        left = set(missing)
        done = {number for number, index in enumerate(mine) if index not in left}
        places, made = mine, back_end.remaining(chosen_rows(rows, mine), done)
    else:
        places, made = missing, back_end.features(chosen_rows(rows, missing))
    for number, row in made:
        _check_number(number, len(places))
        yield places[number], row


def _check_number(number: int, count: int) -> None:
    """A back end speaks of the rows that it was given."""
    if not 0 <= number < count:
        raise FeatureError(f"the back end made row {number} of {count} that it was given: report this to its author")


def import_rows(source, folder: str | Path, dtype: str, progress: Callable[[], None] | None = None) -> int:
    """Write the rows of a source into a store; goes on where an earlier call stopped. Returns the rows written now.

    Rows come in the order of the data set, so that the turns of a conversation share their prefixes in one shard.

    Args:
        source: an ``OfflineSource`` of any reader.
        folder: the store.
        dtype: storage dtype.
        progress: called after every row.

    Raises:
        FeatureError: a bad row, or a store begun with another contract or data.
    """
    digest = hashlib.sha256()
    for number in range(len(source.lengths)):  # all ids first: a store never goes on with other data
        row = source.reader.row(number)
        digest.update(f"{row.row_id}\0{row.input_ids.tolist()}\0{row.supervised.tolist()}".encode())
    contract = replace(source.contract, dtype=dtype)
    made, count = 0, len(source.lengths)
    with StoreWriter(folder, contract, dataset_hash=digest.hexdigest(), dataset_rows=count) as writer:
        for number in range(count):
            if number not in writer.done:
                writer.add(number, source.row(number))
                made += 1
            if progress is not None:
                progress()
    return made
