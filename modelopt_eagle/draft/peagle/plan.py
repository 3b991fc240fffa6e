"""Which predictions of a batch a P-EAGLE head learns: all of depth 0, and ever fewer anchors at the depths behind it.

Every depth costs a row of the head, so published runs draw the anchors of depth d among those of depth d-1, in all
``max(keep^d, floor)`` of them (conditional drop token sampling, P-EAGLE, section 3). One random order of the anchors
does it: depth d takes the first of them, so the sets are nested and each is uniform.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from modelopt_eagle.draft.counting import counted_predictions
from modelopt_eagle.draft.predictions import BatchView, Predictions


@dataclass(frozen=True)
class ParallelSettings:
    """What training reads of a recipe.

    Attributes:
        depth: K, drafted tokens trained.
        keep: share of the anchors of one depth that the next one takes.
        floor: least share of all anchors at any depth.
        convention: which positions count.
    """

    depth: int
    keep: float
    floor: float
    convention: str = "served"

    def shares(self) -> list[float]:
        """``[K]`` share of the anchors at each depth."""
        return [max(self.keep**depth, self.floor) for depth in range(self.depth)]


def plan_parallel(view: BatchView, settings: ParallelSettings, generator: torch.Generator | None = None) -> Predictions:
    """The predictions of a batch that are learned in this step, by depth and then by anchor.

    Args:
        view: of the batch.
        settings: see :class:`ParallelSettings`.
        generator: source of the order of the anchors; the same one gives the same plan.
    """
    every = counted_predictions(view, settings.depth, settings.convention)
    anchors, place = every.anchor.unique(return_inverse=True)  # [r], [n]
    count, device = len(anchors), anchors.device
    order = torch.rand(count, generator=generator, device=device).argsort()  # [r]
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(count, device=device))  # [r]
    taken = torch.tensor([math.ceil(share * count) for share in settings.shares()], device=device)  # [K]
    return every.select(rank[place] < taken[every.depth])
