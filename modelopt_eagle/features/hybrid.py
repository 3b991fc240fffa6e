"""A store that is filled while training: a row it lacks is made once, stored, and read from then on."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from modelopt_eagle.common.files import file_lock
from modelopt_eagle.data.packed import chosen_rows, row_lengths, supervised_counts
from modelopt_eagle.errors import FeatureError
from modelopt_eagle.features.batch import FeatureBatch, FeatureContract, FeatureRow, collate
from modelopt_eagle.features.compute import check_tokens
from modelopt_eagle.features.prefetch import Prefetcher
from modelopt_eagle.features.source import PlannedSource, rows_of
from modelopt_eagle.features.store import SHARD_BYTES, StoreReader, StoreWriter, dataset_hash
from modelopt_eagle.features.store.codec import decode_row, encode_row, join_rows
from modelopt_eagle.features.store.files import refuse_other_workers

MUTEX = ".claims-lock"
WAIT_FOR_OTHERS = 60.0
"""Seconds to wait for a row that another process has made and is about to store, before it is made here again."""


class Claims:
    """The claims of one process among several; files ``.claims-R-of-N`` hold the row numbers, int64 each.

    Claims last for one run: rows that a killed run had claimed and not stored are free again.

    Args:
        folder: of the store; all processes must see it.
        rank, world_size: this process, and how many there are.
        barrier: returns when all processes have called it.
    """

    def __init__(self, folder: Path, rank: int, world_size: int, barrier: Callable[[], None]):
        self._mutex = folder / MUTEX
        paths = [folder / f".claims-{n}-of-{world_size}" for n in range(world_size)]
        self._mine = paths[rank]
        self._others = {path: 0 for path in paths if path != self._mine}  # bytes read of each
        self._taken: set[int] = set()
        self._ours: set[int] = set()
        self._mine.unlink(missing_ok=True)  # a link under this name is not written through
        self._mine.write_bytes(b"")
        barrier()  # nobody reads what an earlier run has claimed

    def take(self, rows: Sequence[int]) -> set[int]:
        """Claim rows; returns those that this process is to make (also if it claimed them before)."""
        with file_lock(self._mutex):
            for path, start in self._others.items():
                with open(path, "rb") as file:
                    file.seek(start)
                    found = array("q", file.read())
                self._taken.update(found)
                self._others[path] = start + len(found) * found.itemsize
            new = [row for row in rows if row not in self._taken and row not in self._ours]
            with open(self._mine, "ab") as file:
                file.write(array("q", new).tobytes())
        self._ours.update(new)
        return self._ours.intersection(rows)


class HybridSource(PlannedSource):
    """Rows of a data set, read from a store where it has them.

    Several processes of one run fill a store together: each makes the missing rows of its own batches and writes them
    into its own shards (as ``--shard rank/world_size``). Which process makes a row is agreed through files in the
    folder (:class:`Claims`), so that none is made or stored twice. A process writes
    what it has at the end of an epoch and after each direct :meth:`load`; one that needs such a row waits for that.

    Args:
        folder: the store; need not exist for ``generate``. It must be of this data set.
        dataset: a ``TokenizedDataset`` or a list of tokenised rows.
        contract: what this run asks for; its ``dtype`` is the storage dtype of a new store.
        on_missing: a row that the store lacks: ``"fail"`` stops at once, ``"skip"`` leaves it out (see ``skipped``),
            ``"generate"`` makes it by ``make``, stores it, and serves it as the store will (so that a run gives the
            same numbers whether a row was there or not).
        make: features of some tokenised rows, in their order: ``compute_features`` with a target, or
            ``lambda rows: [...]`` over a server. Needed for ``generate``.
        prefetch: batches prepared ahead.
        shard_bytes: size of the shards written.
        rank, world_size: this process, and how many fill the store together.
        barrier: returns when all processes have called it; needed for several.
        cancel: breaks off a ``make`` under way in another thread; called when an epoch is left before its end.

    Attributes:
        found: rows that the store held at open.
        skipped: rows left out.
        generated: rows made and stored by this process so far.
        repeated: rows made again without storing them, as their maker did not store them in time.
        rows: the tokenised rows that are served, in the order of ``lengths``.

    Raises:
        FeatureError: rows are missing and ``on_missing`` is ``fail``; the store is damaged, or of other data or another
            contract; another run fills it.
    """

    def __init__(
        self,
        folder: str | Path,
        dataset,
        contract: FeatureContract,
        *,
        on_missing: str = "fail",
        make: Callable[[Sequence], Sequence[FeatureRow]] | None = None,
        prefetch: int = 2,
        shard_bytes: int = SHARD_BYTES,
        rank: int = 0,
        world_size: int = 1,
        barrier: Callable[[], None] | None = None,
        cancel: Callable[[], None] | None = None,
    ):
        if on_missing not in ("fail", "skip", "generate"):
            raise FeatureError(f"on_missing={on_missing!r} is not known; choose fail, skip or generate")
        if on_missing == "generate" and make is None:
            raise FeatureError("on_missing: generate needs a target or a feature server to make rows with")
        self._rows, self._make, self._cancel, self._folder = rows_of(dataset), make, cancel, Path(folder)
        self._data = dataset_hash(self._rows)
        self._fresh: dict[int, FeatureRow] = {}  # made, and not yet in a shard
        self._lock = threading.Lock()
        self._writer: StoreWriter | None = None
        self._claims: Claims | None = None
        self.generated = self.repeated = 0
        begun = self._folder.is_dir() and any(self._folder.glob("manifest*.json"))
        if on_missing == "generate":
            if world_size > 1 and barrier is None:
                raise FeatureError(f"{world_size} processes fill a store together only with a barrier between them")
            refuse_other_workers(self._folder, world_size)
            stored = StoreReader(self._folder).contract.dtype if begun else contract.dtype
            self._writer = StoreWriter(
                self._folder,
                replace(contract, dtype=stored),
                dataset_hash=self._data,
                dataset_rows=len(self._rows),
                worker=(rank, world_size),
                shard_bytes=shard_bytes,
            )
            if world_size > 1:
                self._claims = Claims(self._folder, rank, world_size, barrier)
        self._reader = StoreReader(self._folder)
        self.contract = self._reader.contract
        self.contract.require(contract, str(folder))
        if self._reader.dataset_hash != self._data:
            raise FeatureError(f"{folder} was made from other data than this run's; use another folder, or dump again")
        if self._reader.indices and self._reader.indices[-1] >= len(self._rows):
            raise FeatureError(f"{folder} names the row {self._reader.indices[-1]} of a data set of {len(self._rows)}")
        self._find_stored()
        self.found = len(self._stored)
        missing = len(self._rows) - len(self._stored)
        if missing and on_missing == "fail":
            raise FeatureError(
                f"{folder} lacks {missing} of {len(self._rows)} rows; run the dump again, or set data.on_missing to "
                "generate or skip"
            )
        self._served = sorted(self._stored) if on_missing == "skip" else list(range(len(self._rows)))
        self.skipped = len(self._rows) - len(self._served)
        if not self._served:
            raise FeatureError(f"{folder} holds no row of this data set, and on_missing is skip: nothing to train on")
        self.rows = chosen_rows(self._rows, self._served)
        self.lengths = row_lengths(self.rows)
        self._prefetcher = Prefetcher(max(1, prefetch))

    def _find_stored(self) -> None:
        self._stored = {index: number for number, index in enumerate(self._reader.indices)}

    def supervised_counts(self) -> list[int]:
        return supervised_counts(self.rows)

    def load(self, indices: Sequence[int]) -> FeatureBatch:
        batch = self._load(indices)
        if self._claims is not None:
            self.flush()  # rows asked for out of the epoch's order may be wanted by the other processes too
        return batch

    def _load(self, indices: Sequence[int]) -> FeatureBatch:
        with self._lock:
            wanted = [self._served[number] for number in indices]
            missing = self._missing(wanted)
            ours = missing if self._claims is None else self._claims.take(missing)
            if mine := [index for index in missing if index in ours]:
                self._generate(mine)
            again = self._wait_for_others(wanted) if len(mine) < len(missing) else {}
            made = self._fresh | again
            rows = [made[index] if index in made else self._reader.row(self._stored[index]) for index in wanted]
        return collate(rows, self.contract)

    def _missing(self, wanted: Sequence[int]) -> list[int]:
        """Rows that neither the store nor this process has, each once."""
        return [index for index in dict.fromkeys(wanted) if index not in self._stored and index not in self._fresh]

    def _generate(self, missing: list[int]) -> None:
        """Make rows, hand them to the writer, and keep them until they are in a shard."""
        for index, row in self._made(missing):
            self._fresh[index] = self._writer.add_and_read(index, row)
        self.generated += len(missing)
        if not self._writer.pending:
            self._take_in()

    def _wait_for_others(self, wanted: Sequence[int]) -> dict[int, FeatureRow]:
        """Take in rows that other processes store; those that do not come in time, made here and not stored."""
        until = time.monotonic() + WAIT_FOR_OTHERS
        while True:
            self._take_in()
            missing = self._missing(wanted)
            if not missing:
                return {}
            if time.monotonic() > until:
                break
            time.sleep(0.05)
        self.repeated += len(missing)
        return {index: self._as_stored(row) for index, row in self._made(missing)}

    def _made(self, missing: list[int]) -> Iterator[tuple[int, FeatureRow]]:
        """(place in the data set, row) of rows made now, which must be those asked for, in their order."""
        made = list(self._make([self._rows[index] for index in missing]))
        if len(made) != len(missing):
            raise FeatureError(
                f"{len(missing)} rows were asked for, {len(made)} came back: whatever makes them must answer each"
            )
        for index, row in zip(missing, made, strict=True):
            check_tokens(self._rows[index], row)
            yield index, row

    def _as_stored(self, row: FeatureRow) -> FeatureRow:
        """The row with the rounding of the store's dtype."""
        return decode_row(join_rows([encode_row(row, self.contract)]), 0, row.row_id, row.category)

    def _take_in(self) -> None:
        """Read from the store what has been written by now."""
        self._reader.refresh()
        self._find_stored()
        self._fresh = {index: row for index, row in self._fresh.items() if index not in self._stored}

    def _make_batches(self, plan: list[list[int]]) -> Iterator[FeatureBatch | None]:
        try:
            yield from self._prefetcher.run(
                plan, lambda indices: self._load(indices) if indices else None, self._cancel
            )
        finally:
            self.flush()  # also when the epoch is broken off

    def flush(self) -> None:
        """Write the rows made so far."""
        with self._lock:
            if self._writer is not None and self._writer.pending:
                self._writer.flush()
                self._take_in()

    def close(self) -> None:
        """Write what is still in memory; a process that is killed before loses those rows only."""
        with self._lock:
            if self._writer is not None:
                self._writer.close()
                self._writer = None
                self._take_in()

    def __enter__(self) -> HybridSource:
        return self

    def __exit__(self, *exception) -> None:
        self.close()
