"""Features of a target with adapters: without them from a source, with them and a gradient in the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from modelopt_eagle.features.batch import FeatureBatch, collate
from modelopt_eagle.features.compute import compute_features
from modelopt_eagle.features.source import PlannedSource


@dataclass
class AdaptableBatch(FeatureBatch):
    """Features of the unadapted target, together with the tokenised rows that they were made from.

    Attributes:
        rows: in packing order.
    """

    rows: list = field(default_factory=list)


class UnadaptedSource(PlannedSource):
    """An online source whose target runs without its adapters.

    Until the adapters begin to learn these are the features to train on; afterwards their final states are what the
    adapted target is held against.

    Args:
        source: an ``OnlineSource``.
        adapter: the :class:`~modelopt_eagle.target.lora.TargetAdapter` of its target.
    """

    def __init__(self, source, adapter):
        self._source, self._adapter = source, adapter
        self.contract, self.lengths = source.contract, source.lengths

    def supervised_counts(self) -> list[int] | None:
        return self._source.supervised_counts()

    def load(self, indices: Sequence[int]) -> AdaptableBatch:
        with self._adapter.disabled():
            batch = self._source.load(indices)
        values = {part.name: getattr(batch, part.name) for part in fields(FeatureBatch)}
        return AdaptableBatch(**values, rows=[self._source.rows[i] for i in indices])


def adapted_batch(adapter, batch: AdaptableBatch, recompute: bool = False) -> FeatureBatch:
    """The same rows by the target with its adapters, with a graph that reaches them.

    The rows are laid out as the source lays them out, so that adapters which change nothing give equal states.

    Args:
        adapter: of the target.
        batch: from :class:`UnadaptedSource`.
        recompute: compute the insides of the adapted layers again in the backward pass instead of keeping them.
    """
    if recompute:
        with adapter.recomputed():
            return adapted_batch(adapter, batch)
    rows = compute_features(adapter.target, batch.rows, batch.contract.aux_layer_ids, gradient=True)
    return collate(rows, batch.contract)
