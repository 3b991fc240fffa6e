"""The learning rate as a function of how far the run is, by its steps or by its time, whichever is further."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, then linear, cosine or constant.

    Attributes:
        kind: ``linear``, ``cosine`` or ``constant``.
        total_steps: optimiser steps of the whole run.
        warmup_ratio: share of the run that warms up.
        min_ratio: factor at the end (not read by ``constant``).
        budget_seconds: time after which the run ends; ``None``: steps alone decide.
    """

    kind: str
    total_steps: int
    warmup_ratio: float = 0.0
    min_ratio: float = 0.0
    budget_seconds: float | None = None

    def progress(self, step: int, elapsed: float) -> float:
        """Share of the run that is done in the middle of a step, in [0, 1].

        Args:
            step: optimiser steps done.
            elapsed: seconds spent training, before interruptions included.
        """
        share = (step + 0.5) / self.total_steps
        if self.budget_seconds is not None:
            share = max(share, elapsed / self.budget_seconds)
        return min(1.0, share)

    def factor(self, step: int, elapsed: float) -> float:
        """Factor on the peak learning rate for the step that comes next."""
        progress = self.progress(step, elapsed)
        if progress < self.warmup_ratio:
            return progress / self.warmup_ratio
        if self.kind == "constant":
            return 1.0
        done = (progress - self.warmup_ratio) / max(1e-12, 1.0 - self.warmup_ratio)  # 0 after the warm-up, 1 at the end
        course = 1.0 - done if self.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.min_ratio + (1.0 - self.min_ratio) * course

    def remaining_seconds(self, step: int, elapsed: float, seconds_per_step: float) -> float:
        """Seconds until the steps or the time are used up."""
        by_steps = (self.total_steps - step) * seconds_per_step
        return by_steps if self.budget_seconds is None else max(0.0, min(by_steps, self.budget_seconds - elapsed))
