"""Train from running feature servers: nothing touches the disk."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait

import torch

from modelopt_eagle.data.packed import chosen_rows, row_lengths, supervised_counts
from modelopt_eagle.errors import StreamError
from modelopt_eagle.features.batch import FeatureBatch, FeatureContract, FeatureRow, collate
from modelopt_eagle.features.compute import finish_row
from modelopt_eagle.features.pictures import refuse_images
from modelopt_eagle.features.prefetch import Prefetcher
from modelopt_eagle.features.source import PlannedSource, rows_of
from modelopt_eagle.features.stream.plausible import FIRST_ROWS, Plausibility
from modelopt_eagle.features.stream.pool import ServerPool
from modelopt_eagle.features.stream.workers import Workers
from modelopt_eagle.target.identity import same_revision

_LOOK = 0.1
"""Seconds between looks at whether a call was broken off."""
_COMPARED = ("model", "revision", "aux_layer_ids", "tokenizer_hash", "hidden_size")


class StreamedSource(PlannedSource):
    """Features made by servers while training.

    The order of rows is planned here, as for every source, so a trainer that was killed goes on at the exact row; a
    server keeps nothing that matters. At most ``prefetch + 2`` batches are in memory.

    Args:
        urls: servers started by ``modelopt-eagle serve-features``.
        dataset: a ``TokenizedDataset`` or a list of tokenised rows, tokenised here with the target's own template.
        tables: ``TargetTables`` (or a ``Target``) of the same model: its final norm, head and identity.
        aux_layer_ids: canonical ids that this run asks for.
        token: the servers' shared token; None if they listen on loopback without one.
        prefetch: batches asked for ahead.
        in_flight: rows asked for at a time, over all servers.
        transport, timeout, patience: see :class:`~modelopt_eagle.features.stream.pool.ServerPool`.

    Raises:
        StreamError: no server answers, or one serves another model, revision, tokenizer or other layers; or its states
            are not those of the text (looked at for its first rows, and every so many rows later).
    """

    def __init__(
        self,
        urls: Sequence[str],
        dataset,
        tables,
        aux_layer_ids: Sequence[int],
        *,
        token: str | None = None,
        prefetch: int = 2,
        in_flight: int = 16,
        transport: str = "auto",
        timeout: float = 120.0,
        patience: float = 600.0,
    ):
        self.rows = rows_of(dataset)
        refuse_images(self.rows, "a feature server")
        self.lengths = row_lengths(self.rows)
        self.contract = FeatureContract.from_identity(tables.identity(), aux_layer_ids)
        self._final_norm, self._head = tables.final_norm, tables.head
        self._prefetcher = Prefetcher(max(1, prefetch))
        self._workers = Workers(max(1, in_flight), "feature-stream")
        self._calls: set[threading.Event] = set()  # of the calls under way; set, they end
        self._calls_lock = threading.Lock()
        self._pool = ServerPool(
            urls, self._check, token=token, transport=transport, timeout=timeout, patience=patience,
            token_bytes=4 * self.contract.hidden_size * (len(self.contract.aux_layer_ids) + 1),
        )  # fmt: skip
        self._plausible = Plausibility(tables.embedding_weight, tables.final_norm, tables.head)
        shortest = sorted(range(len(self.rows)), key=self.lengths.__getitem__)[:FIRST_ROWS]
        self.fetch_rows(chosen_rows(self.rows, shortest[:1]))  # refuse a wrong server at once
        self.fetch_rows(chosen_rows(self.rows, shortest[1:]))

    @property
    def wait_seconds(self) -> float:
        """Seconds that the trainer has waited for batches so far."""
        return self._prefetcher.waited

    def _check(self, url: str, identity: dict) -> None:
        """Refuse a server of another contract (the chat template is applied here, so it is not the server's)."""
        wrong = []
        for name in _COMPARED:
            wanted = getattr(self.contract, name)
            found = identity.get(name)
            found = tuple(found) if isinstance(found, list) else found
            if not (same_revision(found, wanted) if name == "revision" else found == wanted):
                wrong.append(f"{name}: the server has {found!r}, this run has {wanted!r}")
        if wrong:
            raise StreamError(
                f"{url} does not serve what this run needs:\n  " + "\n  ".join(wrong) + "\nstart it by "
                "`modelopt-eagle serve-features` with the recipe's target and layers"
            )

    def fetch_rows(self, rows: Sequence) -> list[FeatureRow]:
        """Features of any tokenised rows, in their order; ``make`` of a ``HybridSource``.

        Raises:
            StreamError: a row could not be had, at once and whatever becomes of the others; or :meth:`cancel`.
        """
        stop = threading.Event()
        with self._calls_lock:
            self._calls.add(stop)
        futures = [self._workers.submit(self._fetch, row, stop) for row in rows]
        try:
            pending = set(futures)
            while pending:
                done, pending = wait(pending, _LOOK, FIRST_EXCEPTION)
                for future in done:
                    future.result()  # raises what its thread has met
                if stop.is_set():
                    raise StreamError("the fetching of features was broken off")
            return [future.result() for future in futures]
        finally:
            stop.set()
            for future in futures:
                future.cancel()
            with self._calls_lock:
                self._calls.discard(stop)

    def cancel(self) -> None:
        """Break off the calls under way, from another thread; later ones are served as before."""
        with self._calls_lock:
            for stop in self._calls:
                stop.set()

    def _fetch(self, row, stop: threading.Event) -> FeatureRow:
        message = self._pool.fetch(row.id, row.input_ids, stop)
        if tuple(message.aux_layer_ids) != self.contract.aux_layer_ids:
            raise StreamError(f"row {row.id!r}: states of layers {message.aux_layer_ids} came back")
        if (width := message.states.shape[-1]) != self.contract.hidden_size:
            raise StreamError(
                f"row {row.id!r}: states of width {self.contract.hidden_size} expected, of width {width} found"
            )
        ids = torch.as_tensor(row.input_ids)  # [s]
        self._plausible.look(message.server, message.where, row.id, ids, message.states, message.final_is_normed)
        aux = message.states[:, :-1].flatten(1)  # [s,A·Ht]
        norm = None if message.final_is_normed else self._final_norm
        return finish_row(row, aux, message.states[:, -1], norm, self._head)

    def supervised_counts(self) -> list[int]:
        return supervised_counts(self.rows)

    def load(self, indices: Sequence[int]) -> FeatureBatch:
        return collate(self.fetch_rows([self.rows[i] for i in indices]), self.contract)

    def _make_batches(self, plan: list[list[int]]) -> Iterator[FeatureBatch | None]:
        return self._prefetcher.run(plan, lambda indices: self.load(indices) if indices else None, self.cancel)
