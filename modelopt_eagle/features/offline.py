"""Train from a store: rows are mapped from its shards, the next batches are prepared in the background."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from modelopt_eagle.common.dtypes import STATE_DTYPES
from modelopt_eagle.errors import FeatureError
from modelopt_eagle.features.batch import FeatureBatch, FeatureContract, FeatureRow, collate, predicting_positions
from modelopt_eagle.features.compute import teacher_predictions
from modelopt_eagle.features.prefetch import BufferPool, Prefetcher
from modelopt_eagle.features.source import PlannedSource
from modelopt_eagle.features.store import StoreReader
from modelopt_eagle.features.store.codec import served_dtype


class OfflineSource(PlannedSource):
    """Features read from a store, or from anything with ``contract, lengths, row(number)`` (see ``features.foreign``).

    The states of a batch are written into its tensors straight from the mapped shards, in the background; a reader
    takes part in this if it has the attribute ``fills`` (its ``row`` then takes the two places to fill).

    Args:
        path: folder of a store, or an open reader.
        expected: the contract that this run asks for; None skips the comparison.
        final_norm: the target's final norm, needed if the stored final states are pre-norm; the batches are post-norm.
        head: the target's head (post-norm states to logits), needed if the rows hold no ``target_top1``.
        dtype: dtype of the states in a batch; None: the stored one, float32 for fp8 and int8.
        prefetch: batches prepared ahead.
        verify: see :class:`~modelopt_eagle.features.store.StoreReader`.

    Raises:
        FeatureError: a damaged store, an empty one, one that does not fit ``expected``, or a missing norm or head.
    """

    def __init__(
        self,
        path,
        expected: FeatureContract | None = None,
        *,
        final_norm=None,
        head=None,
        dtype: torch.dtype | None = None,
        prefetch: int = 2,
        verify: str = "open",
    ):
        self.reader = StoreReader(path, verify) if isinstance(path, (str, Path)) else path
        where = str(getattr(self.reader, "folder", "the reader"))
        if not self.reader.lengths:
            raise FeatureError(f"{where} holds no finished row yet; let the dump write its first shard")
        stored = self.reader.contract
        if expected is not None:
            stored.require(expected, where, ignore=("dtype", "final_is_normed"))
        if not stored.final_is_normed and final_norm is None:
            raise FeatureError(
                f"{where}: final states are pre-norm, the loss needs post-norm ones; pass the target's final norm "
                "(final_norm=load_target_tables(target).final_norm)"
            )
        self._final_norm = None if stored.final_is_normed else final_norm
        self._head, self._dtype = head, dtype
        self.contract = replace(stored, final_is_normed=True)
        self.lengths = list(self.reader.lengths)
        self._prefetcher = Prefetcher(max(1, prefetch))
        self._pool = BufferPool(2 * (max(1, prefetch) + 3))  # two tensors a batch: waiting, in the making, in use

    @property
    def wait_seconds(self) -> float:
        """Seconds that the trainer has waited for batches so far."""
        return self._prefetcher.waited

    def supervised_counts(self) -> list[int] | None:
        return getattr(self.reader, "supervised", None)

    def row(self, number: int) -> FeatureRow:
        """One row with post-norm final states and the target's predictions."""
        return self._fill([number])[0][0]

    def _fill(self, numbers: Sequence[int]) -> tuple[list[FeatureRow], Tensor, Tensor]:
        """Rows, and their aux states [N, A·Ht] and final states [N, Ht] packed; the rows hold views of these."""
        contract, total = self.contract, sum(self.lengths[number] for number in numbers)
        dtype = self._dtype or served_dtype(contract.dtype)
        aux = self._pool.empty((total, len(contract.aux_layer_ids) * contract.hidden_size), dtype)  # [N,A·Ht]
        final = self._pool.empty((total, contract.hidden_size), dtype)  # [N,Ht]
        rows, at = [], 0
        for number in numbers:
            places = [packed[at : at + self.lengths[number]] for packed in (aux, final)]
            rows.append(self._finished(self._read(number, *places)))
            at += self.lengths[number]
        return rows, aux, final

    def _read(self, number: int, aux_out: Tensor, final_out: Tensor) -> FeatureRow:
        """A row as it is stored, its states in the two places."""
        if getattr(self.reader, "fills", False):
            return self.reader.row(number, aux_out, final_out)
        row = self.reader.row(number)
        row.validate(self.contract)  # before shapes are broadcast
        row.check_finite(str(getattr(self.reader, "folder", "the reader")), "make this row again")
        return replace(row, aux_hidden=aux_out.copy_(row.aux_hidden), final_hidden=final_out.copy_(row.final_hidden))

    def _finished(self, row: FeatureRow) -> FeatureRow:
        """The row after the final norm where it is stored before it, and with the target's predictions."""
        if self._final_norm is not None:
            row.final_hidden.copy_(self._apply(self._final_norm, row.final_hidden))
        if row.target_top1 is not None:
            return row
        if self._head is None:
            raise FeatureError(
                f"row {row.row_id!r} holds no target_top1; pass the target's head "
                "(head=load_target_tables(target).head)"
            )
        top1 = head_argmax(self._head, row.final_hidden, predicting_positions(row.supervised))
        return replace(row, target_top1=top1)

    def load(self, indices: Sequence[int]) -> FeatureBatch:
        rows, aux, final = self._fill(indices)
        return collate(rows, self.contract, aux, final)

    def _make_batches(self, plan: list[list[int]]) -> Iterator[FeatureBatch | None]:
        return self._prefetcher.run(plan, lambda indices: self.load(indices) if indices else None)

    def check_teacher(self, head, sample_rows: int = 8, final_norm=None) -> float:
        """Rebuild the target's argmax from the stored final states and compare it with the stored one.

        Args:
            head: the target's head, post-norm states to logits.
            sample_rows: rows looked at, spread over the store.
            final_norm: the target's final norm, to tell in the message whether the norm flag is wrong.

        Returns:
            share of predicting positions that agree (1.0 when no row holds ``target_top1``: nothing to compare).

        Raises:
            FeatureError: they disagree; says which part of the contract is broken.
        """
        numbers = sorted({i * len(self.lengths) // sample_rows for i in range(min(sample_rows, len(self.lengths)))})
        rows = [self.row(i) for i in numbers]
        rows = [row for row in rows if row.target_top1 is not None and (row.target_top1 >= 0).any()]
        if not rows:
            return 1.0

        def compare(norm) -> tuple[float, float]:
            """Share of equal argmax, and median relative difference of the log-sum-exp (0 where none is stored)."""
            equal, difference = [], [torch.zeros(1)]
            for row in rows:
                at = row.target_top1 >= 0  # [s]
                states = row.final_hidden[at] if norm is None else self._apply(norm, row.final_hidden[at])  # [n,Ht]
                top1, normaliser = teacher_predictions(head, states)
                equal.append(top1 == row.target_top1[at])
                if row.target_logsumexp is not None:
                    stored = row.target_logsumexp[at]
                    difference.append((normaliser - stored).abs() / stored.abs().clamp_min(1.0))
            return torch.cat(equal).float().mean().item(), torch.cat(difference).median().item()

        kind = self.contract.dtype
        allowed = STATE_DTYPES[kind]
        share, difference = compare(None)
        if share >= allowed.top1 and difference <= allowed.logsumexp:
            return share
        reason = "final_hidden, the target's head or its vocabulary are not those of this target (model or revision)"
        if final_norm is not None:
            normed_share, normed_difference = compare(final_norm)
            if normed_share >= allowed.top1 and normed_difference <= allowed.logsumexp:
                reason = "final_is_normed: the stored final states are pre-norm though the contract says post-norm"
        raise FeatureError(
            f"teacher parity broken: the target's argmax is rebuilt at {share:.1%} of the sampled positions (at least "
            f"{allowed.top1:.0%} expected for {kind}), its log-sum-exp differs by {difference:.1%} (at most "
            f"{allowed.logsumexp:.0%}). Broken part of the contract: {reason}"
        )

    @staticmethod
    @torch.no_grad()
    def _apply(norm, states: Tensor) -> Tensor:
        weight = next(norm.parameters())
        return norm(states.to(weight.device, weight.dtype)).to(states)


@torch.no_grad()
def head_argmax(head, final_hidden: Tensor, at: Tensor) -> Tensor:
    """Argmax of the full-vocabulary logits at some positions, in chunks.

    Args:
        head: post-norm states to logits; ``head.weight`` is [V, Ht].
        final_hidden: [s, Ht] post-norm.
        at: [s] bool.

    Returns:
        [s] int64, -1 where ``at`` is False.
    """
    top1 = torch.full((len(final_hidden),), -1, dtype=torch.long)  # [s]
    top1[at] = teacher_predictions(head, final_hidden[at])[0]
    return top1
