"""The optimiser steps of a run: how large its batches are, where each epoch ends, and where it stands."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from typing import Any

from modelopt_eagle.data import plan_batches
from modelopt_eagle.recipe import Recipe, TrainingSection


def batch_options(training: TrainingSection, window: int = 1) -> dict[str, int]:
    """Keyword arguments by which :func:`~modelopt_eagle.data.plan_batches` is told the size of a batch.

    Args:
        training: of the recipe.
        window: micro-batches of an optimiser step.
    """
    options = {"batch_size": training.batch_size}
    if training.max_tokens_per_batch is not None:
        options["max_tokens"] = training.max_tokens_per_batch
        if window > 1:
            options["window"] = window
    return options


@dataclass(frozen=True)
class Course:
    """The optimiser steps of a run, unless time ends it sooner.

    Attributes:
        ends: ``[epochs]`` steps that are done after each epoch; batches of tokens make some epochs a step longer.
        total: steps in all.
    """

    ends: list[int]
    total: int

    def place(self, step: int) -> tuple[int, int, int]:
        """``(epoch, steps done in it, steps left in it)`` where so many steps are done."""
        epoch = bisect.bisect_right(self.ends, step)
        return epoch, step - self._begin(epoch), min(self.ends[epoch], self.total) - step

    def _begin(self, epoch: int) -> int:
        return self.ends[epoch - 1] if epoch else 0

    def epochs(self, step: int) -> float:
        """Epochs that are done after so many steps."""
        epoch = bisect.bisect_left(self.ends, step)
        begun = self._begin(epoch)
        return epoch + (step - begun) / (self.ends[epoch] - begun)


def plan_course(recipe: Recipe, source: Any, world_size: int) -> Course:
    """Steps of a run on a source.

    The last window of an epoch may hold fewer micro-batches; it is normalised by what it holds.

    Args:
        source: with ``lengths``, and with ``supervised_counts()`` where batches of tokens weigh them.
        world_size: shares of the data.
    """
    settings, data = recipe.training, recipe.data
    size = settings.gradient_accumulation_steps
    options: dict[str, Any] = {"seed": settings.seed, "world_size": world_size, "shuffle": data.shuffle}
    options |= batch_options(settings, size)
    by_tokens = settings.max_tokens_per_batch is not None
    if by_tokens:
        options["supervised"] = source.supervised_counts()
    ends: list[int] = []
    for epoch in range(settings.epochs):
        if by_tokens or not ends:
            steps = math.ceil(len(plan_batches(source.lengths, epoch=epoch, **options)) / size)
        ends.append((ends[-1] if ends else 0) + steps)
        if settings.max_steps is not None and ends[-1] >= settings.max_steps:
            break
    total = ends[-1]
    return Course(ends, total if settings.max_steps is None else min(total, settings.max_steps))
