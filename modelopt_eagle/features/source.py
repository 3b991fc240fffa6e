"""Where the trainer's batches come from: one interface for features made, held in memory, stored or streamed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from modelopt_eagle.common.dtypes import dtype_name
from modelopt_eagle.data.encode import TokenizedRow
from modelopt_eagle.data.packed import chosen_rows, row_lengths, supervised_counts
from modelopt_eagle.errors import FeatureError
from modelopt_eagle.features.batch import (
    FeatureBatch,
    FeatureContract,
    FeatureRow,
    collate,
    needed_final_positions,
    tokens_of,
)
from modelopt_eagle.features.compute import compute_features, compute_rows
from modelopt_eagle.target.like import RunningTarget
from modelopt_eagle.target.shards import together


@runtime_checkable
class FeatureSource(Protocol):
    """What the trainer reads from.

    ``batches`` is a pure function of its arguments: a run that stops after n steps goes on with ``start=n`` and sees
    what an undisturbed run would have seen.
    """

    contract: FeatureContract
    lengths: list[int]

    def batches(
        self,
        epoch: int,
        *,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        start: int = 0,
        shuffle: bool = True,
        max_tokens: int | None = None,
        window: int = 1,
        without: Collection[int] = (),
    ) -> Iterator[FeatureBatch | None]:
        """Batches of one epoch for one rank; None where the rank has nothing in a step.

        Args:
            epoch: number of the pass over the data, 0-based.
            batch_size: rows of a batch.
            seed: seed of the order.
            rank, world_size: the share of this process; all ranks get the same number of steps.
            start: steps to leave out at the front.
            shuffle: False keeps the order of the rows in every epoch.
            max_tokens: tokens of a batch, which ``batch_size`` then does not count.
            window: batches of an optimiser step, over which ``max_tokens`` levels the work of the ranks.
            without: row numbers that the epoch has had already, when there were more processes or fewer.
        """
        ...


class PlannedSource(ABC):
    """A source that can load any set of rows by number; the order comes from ``data.plan_batches``."""

    contract: FeatureContract
    lengths: list[int]

    @abstractmethod
    def load(self, indices: Sequence[int]) -> FeatureBatch:
        """The rows of these numbers, packed in the given order."""

    def supervised_counts(self) -> list[int] | None:
        """Supervised tokens of each row; ``None`` where that is not known without its features."""
        return None

    def plan(self, epoch: int, *, start: int = 0, **options) -> list[list[int]]:
        """Row numbers of each remaining batch of the epoch; ``options`` are those of ``data.plan_batches``."""
        from modelopt_eagle.data import plan_batches

        if options.get("max_tokens") is not None:
            options["supervised"] = self.supervised_counts()
        return plan_batches(self.lengths, epoch=epoch, **options)[start:]

    def batches(
        self,
        epoch: int,
        *,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        start: int = 0,
        shuffle: bool = True,
        max_tokens: int | None = None,
        window: int = 1,
        without: Collection[int] = (),
    ) -> Iterator[FeatureBatch | None]:
        """See :class:`FeatureSource`."""
        plan = self.plan(
            epoch,
            batch_size=batch_size,
            seed=seed,
            rank=rank,
            world_size=world_size,
            start=start,
            shuffle=shuffle,
            max_tokens=max_tokens,
            window=window,
            without=without,
        )
        yield from self._make_batches(plan)

    def _make_batches(self, plan: list[list[int]]) -> Iterator[FeatureBatch | None]:
        """Batches of planned row numbers; sources that prepare ahead override this."""
        for indices in plan:
            yield self.load(indices) if indices else None


class SelectedSource(PlannedSource):
    """Some rows of another source, so that a set can be split without copying.

    Args:
        source: where the rows come from; its way of preparing batches ahead is used.
        numbers: its row numbers, in the order in which this source counts them.
    """

    def __init__(self, source: PlannedSource, numbers: Sequence[int]):
        self._source, self._numbers = source, list(numbers)
        self.contract = source.contract
        self.lengths = [source.lengths[number] for number in self._numbers]

    def load(self, indices: Sequence[int]) -> FeatureBatch:
        return self._source.load([self._numbers[i] for i in indices])

    def supervised_counts(self) -> list[int] | None:
        counts = self._source.supervised_counts()
        return None if counts is None else [counts[number] for number in self._numbers]

    def _make_batches(self, plan: list[list[int]]) -> Iterator[FeatureBatch | None]:
        return self._source._make_batches([[self._numbers[i] for i in indices] for indices in plan])


def rows_of(dataset) -> Sequence[TokenizedRow]:
    """The rows of a ``TokenizedDataset`` or list; FeatureError if there are none."""
    rows = getattr(dataset, "rows", dataset)
    rows = rows if isinstance(rows, Sequence) else list(rows)
    if not rows:
        raise FeatureError("no rows to make features from: the data set is empty")
    return rows


class OnlineSource(PlannedSource):
    """Features made in the step by the frozen target.

    Args:
        target: a loaded target.
        dataset: a ``TokenizedDataset`` or a list of tokenised rows.
        aux_layer_ids: canonical ids; the target's default if None.
    """

    def __init__(self, target: RunningTarget, dataset, aux_layer_ids: Sequence[int] | None = None):
        self.target = target
        self.rows = rows_of(dataset)
        self.lengths = row_lengths(self.rows)
        self.contract = FeatureContract.from_target(target, aux_layer_ids, dtype=dtype_name(target.dtype))

    def supervised_counts(self) -> list[int]:
        return supervised_counts(self.rows)

    def load(self, indices: Sequence[int]) -> FeatureBatch:
        rows = [self.rows[i] for i in indices]
        batch = collate(compute_features(self.target, rows, self.contract.aux_layer_ids), self.contract)
        return batch if batch.input_ids.device.type == "cpu" else replace(batch, host=tokens_of(rows))

    def _make_batches(self, plan: list[list[int]]) -> Iterator[FeatureBatch | None]:
        for indices in plan:
            with together(self.target):
                batch = self.load(indices) if indices else None
            yield batch


class MemorySource(PlannedSource):
    """Features made once and kept in memory for many epochs.

    Final states are kept only where a loss convention reads them (:func:`needed_final_positions`) and are zero
    elsewhere.

    Args:
        contract: how ``rows`` were made.
        rows: features in the order of the data set.
        dtype: ``torch.float32`` or ``torch.bfloat16``, in which states are held (and served).
    """

    def __init__(self, contract: FeatureContract, rows: Sequence[FeatureRow], dtype: torch.dtype = torch.float32):
        if not rows:
            raise FeatureError("no rows to hold: at least one is needed")
        for row in rows:
            row.check_finite("the rows given", "make this row again")
        self.contract = replace(contract, dtype=dtype_name(dtype))
        self._rows = [_hold(row, dtype) for row in rows]
        self.lengths = [len(row) for row in rows]

    @classmethod
    def from_target(
        cls,
        target: RunningTarget,
        dataset,
        aux_layer_ids: Sequence[int] | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        batch_tokens: int = 4096,
        progress: Callable[[int, int], None] | None = None,
        parts: Iterable[Sequence[int]] | None = None,
    ) -> MemorySource:
        """Run the target once over the data set.

        Args:
            target, dataset, aux_layer_ids: as for :class:`OnlineSource`.
            dtype: in which states are held.
            batch_tokens: padded tokens of one forward.
            progress: called with (tokens done, tokens in all) after every row.
            parts: row numbers, part by part; the next part is asked for when the one before is made. Rows that are in
                none are not made and not held. ``None``: all rows, as one part.

        Returns:
            a source that holds the rows, in the order of the data set.
        """
        rows = rows_of(dataset)
        contract = FeatureContract.from_target(target, aux_layer_ids)
        lengths = row_lengths(rows)
        total, done = sum(lengths), 0
        source = cls.__new__(cls)
        source.contract = replace(contract, dtype=dtype_name(dtype))
        held = {}
        for part in [range(len(rows))] if parts is None else parts:
            for number, row in compute_rows(target, chosen_rows(rows, part), contract.aux_layer_ids, batch_tokens):
                held[part[number]] = _hold(row, dtype)  # at once: only one forward's full states are in memory
                done += len(row)
                if progress is not None:
                    progress(done, total)
        source._rows = [held[index] for index in sorted(held)]
        source.lengths = [lengths[index] for index in sorted(held)]
        return source

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that the states take."""
        return sum(kept.nbytes + row.aux_hidden.nbytes for row, kept in self._rows)

    def supervised_counts(self) -> list[int]:
        return [int(row.supervised.sum()) for row, _ in self._rows]

    def load(self, indices: Sequence[int]) -> FeatureBatch:
        return collate([_serve(*self._rows[i]) for i in indices], self.contract)


def _hold(row: FeatureRow, dtype: torch.dtype) -> tuple[FeatureRow, Tensor]:
    """A row on the CPU in ``dtype`` without its final states, and the needed ones [n,Ht]."""
    kept = row.final_hidden[needed_final_positions(row.supervised)].to("cpu", dtype)  # [n,Ht]

    def cpu(tensor):
        return None if tensor is None else tensor.cpu()

    held = replace(
        row,
        input_ids=row.input_ids.cpu(),
        supervised=row.supervised.cpu(),
        aux_hidden=row.aux_hidden.to("cpu", dtype),
        final_hidden=kept[:0],
        target_top1=cpu(row.target_top1),
        target_logsumexp=cpu(row.target_logsumexp),
    )
    return held, kept


def _serve(row: FeatureRow, kept: Tensor) -> FeatureRow:
    """The row with its final states [s,Ht], zero where none was kept."""
    final = kept.new_zeros(len(row), kept.shape[1])  # [s,Ht]
    final[needed_final_positions(row.supervised)] = kept
    return replace(row, final_hidden=final)
