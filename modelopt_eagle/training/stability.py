"""Watching every step: numbers that are not finite are found before they are applied, outliers are named with rows."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from modelopt_eagle.errors import TrainingError

OUTLIER = 10.0
"""A gradient norm so many times the median of the last ones is said, with the rows of the step."""
REMEMBERED, FEWEST = 100, 20
"""Norms that the median is taken of, and how many there must be."""
MOST_IN_A_ROW = 10
"""Steps that may be left out one after the other; after that the weights themselves are in doubt."""
ROWS_SHOWN = 6


class StepWatch:
    """Looks at loss and gradient norms of a step before the optimiser does.

    Args:
        policy: ``stop``: numbers that are not finite end the run; ``skip``: they are left out.
        accelerator: whose processes agree.
        say: prints a line.
        advice: what mends such numbers, for the error.

    Attributes:
        rows: ids of the rows of the step looked at last, of all processes: those whose loss is not finite, else all.
    """

    def __init__(self, policy: str, accelerator: Any, say: Callable[[str], None], advice: Callable[[], str]):
        self.policy, self.accelerator, self.say, self.advice = policy, accelerator, say, advice
        self.rows: list[str] = []
        self._norms: deque[float] = deque(maxlen=REMEMBERED)
        self._in_a_row = 0

    def sound(self, index: int, window: Sequence[Any], losses: Sequence[Tensor], norms: Sequence[Tensor]) -> bool:
        """Whether a step may be applied; all processes answer alike.

        Args:
            index: of the step.
            window: its micro-batches, ``None`` where this process has none.
            losses: scalar of each micro-batch.
            norms: scalars, gradient norms over all processes.

        Raises:
            TrainingError: it may not, and the policy is to stop, or it was so for ten steps in a row.
        """
        values = torch.stack([value.detach().float() for value in (*losses, *norms)])  # [m]
        bad = (~torch.isfinite(values)).sum()
        shared = torch.stack((bad.float(), values[len(losses)]))  # [2]
        if self.accelerator.num_processes > 1:  # the norm too: what follows from it, all do alike
            shared = self.accelerator.reduce(shared, "sum") / torch.tensor([1, self.accelerator.num_processes]).to(
                shared
            )
        found, norm = shared.tolist()  # read back once a step
        if not found:
            self._in_a_row = 0
            self._look_for_outlier(index, window, norm)
            return True
        ids = [[] if batch is None else list(batch.row_ids) for batch in window]
        own = [part for part, value in zip(ids, losses, strict=True) if not bool(torch.isfinite(value))]
        named = self._everywhere([row for part in own for row in part])
        self.rows = named or self._everywhere([row for part in ids for row in part])
        what = "loss" if named else "gradient"
        line = f"step {index + 1}: the {what} is not finite; rows {shown(self.rows)}"
        self._in_a_row += 1
        if self.policy == "stop" or self._in_a_row >= MOST_IN_A_ROW:
            many = f" ({self._in_a_row} steps in a row)" if self._in_a_row > 1 else ""
            raise TrainingError(f"{line}{many}: {self.advice()}, or set training.nonfinite: skip for single bad rows")
        self.say(f"{line}: left out")
        return False

    def _look_for_outlier(self, index: int, window: Sequence[Any], norm: float) -> None:
        if len(self._norms) >= FEWEST and norm > OUTLIER * statistics.median(self._norms):
            rows = self._everywhere([row for batch in window if batch is not None for row in batch.row_ids])
            self.say(
                f"step {index + 1}: the gradient norm is {norm:.3g}, {norm / statistics.median(self._norms):.0f} times "
                f"the usual one; rows {shown(rows)}"
            )
        self._norms.append(norm)

    def _everywhere(self, rows: list[str]) -> list[str]:
        """The rows of all processes; all of them call this."""
        if self.accelerator.num_processes == 1:
            return rows
        from accelerate.utils import gather_object

        return list(gather_object(rows))


def shown(rows: Sequence[str]) -> str:
    """Some row ids as text, each once."""
    rows = list(dict.fromkeys(rows))  # processes that share a batch name it each
    more = f" and {len(rows) - ROWS_SHOWN} more" if len(rows) > ROWS_SHOWN else ""
    return ", ".join(map(repr, rows[:ROWS_SHOWN])) + more if rows else "none"
