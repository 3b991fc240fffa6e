"""Sums between two log lines: loss, accuracy of each rollout step, rate."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from modelopt_eagle.training.loss import LossOutput

T = TypeVar("T")


class Meter:
    """Adds up micro-batches on the device; nothing is read back before :meth:`take`.

    Args:
        decay: weight base of the rollout steps, for the total loss.
        accelerator: whose processes are added together.
    """

    def __init__(self, decay: float, accelerator):
        self.decay, self.accelerator = decay, accelerator
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self.steps = self.tokens = 0
        self._sums: Tensor | None = None
        self._drift: Tensor | None = None
        self._since, self._waited = time.monotonic(), 0.0

    def waiting(self, items: Iterable[T]) -> Iterator[T]:
        """The items as they come; the time until each is there counts as waiting."""
        iterator = iter(items)
        while True:
            begun = time.monotonic()
            try:
                item = next(iterator)
            except StopIteration:
                return
            finally:
                self._waited += time.monotonic() - begun
            yield item

    def add(self, output: LossOutput) -> None:
        """Add a micro-batch (``per_step`` is its share of the step's global mean)."""
        parts = (output.per_step, output.asked_counts, output.top1_hits)
        values = torch.stack([part.double() for part in parts])  # [3,K]
        self._sums = values if self._sums is None else self._sums + values
        if output.preservation is not None:
            drift = output.preservation.double()
            self._drift = drift if self._drift is None else self._drift + drift

    def take(self) -> dict:
        """Means since the last call, over all processes, and begin anew.

        Returns:
            ``loss`` (decayed sum over rollout steps), ``per_step [K]``, ``accuracy [K]`` (share of supervised
            positions whose draft is the target's choice; a token outside the draft vocabulary is a miss, also where the
            loss drops it), ``tokens_per_second``, ``seconds_per_step``, ``waiting`` (share of the time in which the
            next features were waited for, on the first process; features made in the step count); with adapters on the
            target ``preservation_kl``, nats a counted position.
        """
        sums, counts, hits = self.accelerator.reduce(self._sums, "sum").tolist()
        seconds = time.monotonic() - self._since
        per_step = [value / self.steps for value in sums]
        metrics = {
            "loss": sum(value * self.decay**k for k, value in enumerate(per_step)),
            "per_step": per_step,
            "accuracy": [hit / max(count, 1.0) for hit, count in zip(hits, counts, strict=True)],
            "tokens_per_second": self.tokens / max(seconds, 1e-9),
            "seconds_per_step": seconds / self.steps,
            "waiting": min(self._waited / max(seconds, 1e-9), 1.0),
        }
        if self._drift is not None:
            metrics["preservation_kl"] = float(self.accelerator.reduce(self._drift, "sum")) / self.steps
        self.reset()
        return metrics
