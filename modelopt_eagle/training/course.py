"""The optimiser steps of a run: how large its batches are, where each epoch ends, and where it stands."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
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
class Stretch:
    """A part of a run that other processes made than the ones of now.

    Attributes:
        processes: shares of the data.
        window: micro-batches of a step in each.
        until: steps of the run that were done at its end.
    """

    processes: int
    window: int
    until: int


@dataclass(frozen=True)
class Course:
    """The optimiser steps of a run, or of what is left of it, unless time ends it sooner.

    Attributes:
        ends: steps that are done after each epoch, from ``epoch`` on; batches of tokens make some a step longer.
        total: steps in all.
        epoch, step: where it begins.
        without: row numbers that this first epoch has had before.
        had: share of the first epoch that was done before.
    """

    ends: list[int]
    total: int
    epoch: int = 0
    step: int = 0
    without: frozenset[int] = frozenset()
    had: float = 0.0

    def place(self, step: int) -> tuple[int, int, int]:
        """``(epoch, steps of this course done in it, steps left in it)`` where so many steps are done."""
        index = bisect.bisect_right(self.ends, step)
        return self.epoch + index, step - self._begin(index), min(self.ends[index], self.total) - step

    def _begin(self, index: int) -> int:
        return self.ends[index - 1] if index else self.step

    def epochs(self, step: int) -> float:
        """Epochs that are done after so many steps."""
        index = bisect.bisect_left(self.ends, step)
        begun, had = self._begin(index), 0.0 if index else self.had
        return self.epoch + index + had + (1 - had) * (step - begun) / (self.ends[index] - begun)

    def left_out(self, epoch: int) -> frozenset[int]:
        """Rows of an epoch that were read before this course began."""
        return self.without if epoch == self.epoch else frozenset()


def plan_course(recipe: Recipe, source: Any, world_size: int, before: Sequence[Stretch] = ()) -> Course:
    """Steps of a run on a source.

    The last window of an epoch may hold fewer micro-batches; it is normalised by what it holds. After stretches of
    other numbers of processes the rows that an epoch has not had yet are dealt to those of now, in their order.

    Args:
        source: with ``lengths``, and with ``supervised_counts()`` where batches of tokens weigh them.
        world_size: shares of the data.
        before: how the steps done so far were made, where that differs from now.

    Returns:
        what is left, as it is made now.
    """
    course = _course_from(recipe, source, world_size if not before else before[0].processes,
                          before[0].window if before else recipe.training.gradient_accumulation_steps)  # fmt: skip
    for number, part in enumerate(before):
        epoch, done, _ = course.place(part.until)
        had = course.left_out(epoch)
        options = plan_options(recipe, source, part.processes, part.window) | {"without": had}
        for rank in range(part.processes):
            batches = plan_batches(source.lengths, epoch=epoch, rank=rank, **options)
            had = had.union(*batches[: done * part.window])
        after = before[number + 1] if number + 1 < len(before) else None
        shares = world_size if after is None else after.processes
        window = recipe.training.gradient_accumulation_steps if after is None else after.window
        course = _course_from(recipe, source, shares, window, epoch, part.until, had)
    return course


def plan_options(recipe: Recipe, source: Any, world_size: int, window: int) -> dict[str, Any]:
    """Keyword arguments of :func:`~modelopt_eagle.data.plan_batches` beside lengths, epoch and rank."""
    settings = recipe.training
    options: dict[str, Any] = {"seed": settings.seed, "world_size": world_size, "shuffle": recipe.data.shuffle}
    options |= batch_options(settings, window)
    if settings.max_tokens_per_batch is not None:
        options["supervised"] = source.supervised_counts()
    return options


def _course_from(
    recipe: Recipe, source: Any, world_size: int, window: int, epoch: int = 0, step: int = 0, without=frozenset()
) -> Course:
    """The steps from a place in the data on, made by so many processes in windows of so many micro-batches."""
    settings, options = recipe.training, plan_options(recipe, source, world_size, window)
    by_tokens = settings.max_tokens_per_batch is not None
    ends: list[int] = []
    steps: int | None = None
    for number in range(epoch, settings.epochs):
        part = without if number == epoch else frozenset()
        if by_tokens or part or steps is None:
            planned = plan_batches(source.lengths, epoch=number, without=part, **options)
            found = math.ceil(len(planned) / window)
            steps = None if part else found
        else:
            found = steps
        ends.append((ends[-1] if ends else step) + found)
        if settings.max_steps is not None and ends[-1] >= settings.max_steps:
            break
    total = ends[-1] if settings.max_steps is None else min(ends[-1], settings.max_steps)
    return Course(ends, total, epoch, step, without, len(without) / len(source.lengths))
