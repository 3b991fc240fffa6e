"""The minutes of a whole run (``training.run_budget_minutes``), shared out between features, training and measuring.

Features of the rows are made in parts, each drawn from all over the data, until their share of the time is used. So a
slow machine trains on fewer rows and not longer than promised. What counts is kept in ``budget.json`` of the output
folder, so that a run that was stopped goes on with what is left:

* features on the disk: the time that former starts spent on them counts;
* features in memory: they are gone with the process, and so is their time;
* once they are made, the rows and the seconds of training are settled; every later start finds the same ones.

The clock starts when the target is loaded: downloads and imports are not in the budget.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from modelopt_eagle.common.files import write_whole
from modelopt_eagle.recipe import Recipe

FEATURES_UNTIL, TRAINING_UNTIL = 0.4, 0.75
"""Shares of the budget after which no more features are made, and training ends; what is left is for measuring."""
TRAINING_LEAST = 0.1
"""Share of the budget that training gets at least, however long what stands before it took."""
PART_TOKENS = 16384
"""Tokens after which it is asked whether there is time for more."""

RECORD, LEFT_OUT = "budget.json", "rows_not_taken.txt"
"""Files of the output folder: what is settled, and the ids of the rows that were not taken."""


@dataclass
class Record:
    """What a run keeps of its budget.

    Attributes:
        minutes: ``training.run_budget_minutes``.
        data: hash of all rows that could be taken.
        feature_seconds: spent until the last part was made, over all starts, with what stood before them.
        making_seconds: those of them in which features were made.
        rows: how many are made, of the order in which they are drawn.
        settled: whether no more will be.
        before_training: seconds spent when training began.
        training_seconds: what it gets; ``None`` before it began.
    """

    minutes: float
    data: str
    feature_seconds: float = 0.0
    making_seconds: float = 0.0
    rows: int = 0
    settled: bool = False
    before_training: float = 0.0
    training_seconds: float | None = None


def read_record(folder: Path) -> Record | None:
    """The record in an output folder; ``None`` where there is none, or none that can be read: then it is made anew."""
    try:
        found = Record(**json.loads((folder / RECORD).read_text(encoding="utf-8")))
        numbers = (
            found.minutes,
            found.feature_seconds,
            found.making_seconds,
            found.rows,
            found.before_training,
            found.training_seconds or 0,
        )
        return found if all(isinstance(n, (int, float)) and n >= 0 for n in numbers) else None
    except (OSError, ValueError, TypeError):
        return None


def training_until(recipe: Recipe) -> float:
    """Share of the budget after which training ends: all of it where nothing is measured behind it."""
    return TRAINING_UNTIL if recipe.validation.mode != "none" else 1.0


class RunBudget:
    """The budget of one start of a run.

    Args:
        recipe: with ``training.run_budget_minutes``.
        accelerator: of the run; the first process decides for all, and keeps the record.

    Attributes:
        total: seconds of the whole run.
        left_out: rows that were not taken, their tokens, and how many rows and tokens there were; ``None`` before
            :meth:`parts` has ended, and where features are no stage of their own.
    """

    def __init__(self, recipe: Recipe, accelerator: Any):
        minutes = recipe.training.run_budget_minutes
        self.recipe, self.total = recipe, minutes * 60.0
        self.folder = Path(recipe.training.output_dir)
        self._accelerator = accelerator
        self._main, self._processes = accelerator.is_main_process, accelerator.num_processes
        self._begun = time.monotonic()
        self._before = 0.0  # seconds of former starts
        self._record = Record(minutes, "")
        self.left_out: tuple[int, int, int, int] | None = None

    def spent(self) -> float:
        """Seconds since the target was loaded, and those of former starts that count."""
        return self._before + time.monotonic() - self._begun

    def parts(self, lengths: Sequence[int], data: str) -> Iterator[list[int]]:
        """Row numbers in parts, as long as there is time; the first always. Each number comes in one part at most.

        A row that is not in any part is not to be trained on. Take the next part when the features of the one before
        are made.

        Args:
            lengths: tokens of each row.
            data: hash of the rows; a record of other rows is not gone on with.
        """
        known = self._agreed(read_record(self.folder) if self._main else None)
        again = known is not None and known.data == data and known.minutes == self._record.minutes
        record = self._record = known if again else Record(self._record.minutes, data)
        settled, on_disk = record.settled, self.recipe.data.cache_features == "disk"
        parts = split_parts(lengths, self.recipe.training.seed, rows=record.rows if settled else None)
        if on_disk:
            self._before = record.feature_seconds
        elif not settled:
            record.rows, record.feature_seconds, record.making_seconds = 0, 0.0, 0.0
        begun, tokens, taken, stored = time.monotonic(), 0, 0, record.rows
        made_before = record.making_seconds
        for part in parts:
            size = sum(lengths[row] for row in part)
            if not settled and taken > stored:  # a part that a former start was in the middle of is finished
                rate = (time.monotonic() - begun) / max(tokens, 1)
                if not self._agreed(self.spent() + rate * size <= FEATURES_UNTIL * self.total):
                    break
            yield part
            tokens, taken = tokens + size, taken + len(part)
            if not settled:
                record.feature_seconds, record.rows = self.spent(), max(taken, record.rows)
                record.making_seconds = made_before + time.monotonic() - begun
                self._write()
        whole = sum(lengths)
        self.left_out = (len(lengths) - taken, whole - tokens, len(lengths), whole)
        if not settled:
            record.settled, record.rows = True, taken
            self._write()

    def training_seconds(self) -> float:
        """What training gets: the first time that this is asked, what is left; later the same again."""
        record = self._record
        if record.training_seconds is None and not record.data:  # no stage of features: an earlier start may know
            known = self._agreed(read_record(self.folder) if self._main else None)
            if known is not None and not known.data and known.minutes == record.minutes:
                record = self._record = known
        if record.training_seconds is None:
            record.before_training = self._agreed(self.spent())
            left = training_until(self.recipe) * self.total - record.before_training
            record.training_seconds = max(left, TRAINING_LEAST * self.total)
            self._write()
        limit = self.recipe.training.time_budget_minutes
        return record.training_seconds if limit is None else min(record.training_seconds, 60.0 * limit)

    def line(self) -> str:
        """What the head of a run says of its time."""
        record, seconds = self._record, self.training_seconds()
        behind = max(0.0, self.total - record.before_training - seconds)
        made = f" ({record.making_seconds / 60:.1f} of them made features)" if record.making_seconds else ""
        text = (
            f"budget: {self.total / 60:.1f} minutes: {record.before_training / 60:.1f} went by before training{made}, "
            f"it gets at most {seconds / 60:.1f}, and {behind / 60:.1f} are left to measure in"
        )
        if record.before_training > training_until(self.recipe) * self.total:
            text += "; warning: they will not be kept, as what stands before training took too long"
        return text

    def left_out_line(self) -> str | None:
        """What the head of a run says of the rows that were not taken, if there are any."""
        if self.left_out is None or not self.left_out[0]:
            return None
        rows, tokens, all_rows, all_tokens = self.left_out
        return (
            f"budget: {rows} of {all_rows} rows ({tokens} of {all_tokens} tokens) are not taken: features have "
            f"{FEATURES_UNTIL:.0%} of training.run_budget_minutes; their ids: {self.folder / LEFT_OUT}"
        )

    def write_left_out(self, ids: Sequence[str]) -> None:
        """Keep the ids of the rows that were not taken, a line each; without any, no file."""
        if not self._main:
            return
        if ids:
            write_whole(self.folder / LEFT_OUT, "".join(f"{json.dumps(name)[1:-1]}\n" for name in ids))
        else:
            (self.folder / LEFT_OUT).unlink(missing_ok=True)

    def _write(self) -> None:
        if self._main:
            write_whole(self.folder / RECORD, json.dumps(asdict(self._record), indent=1) + "\n")

    def _agreed(self, value: Any) -> Any:
        """The first process's value, on all of them."""
        if self._processes == 1:
            return value
        from accelerate.utils import broadcast_object_list

        return broadcast_object_list([value])[0]


def split_parts(
    lengths: Sequence[int], seed: int, tokens: int | None = None, rows: int | None = None
) -> list[list[int]]:
    """Row numbers in parts of about so many tokens, each drawn from all over the data; ascending in each.

    Args:
        lengths: tokens of each row.
        seed: of the draw.
        tokens: of a part; default ``PART_TOKENS``.
        rows: only the first so many that are drawn, whatever the size of the parts.
    """
    order, most = list(range(len(lengths))), tokens or PART_TOKENS
    random.Random(seed).shuffle(order)
    parts: list[list[int]] = []
    filled = most
    for row in order[:rows]:
        if filled + lengths[row] > most and filled:
            parts.append([])
            filled = 0
        parts[-1].append(row)
        filled += lengths[row]
    return [sorted(part) for part in parts]


def measuring_seconds(recipe: Recipe, trained: float) -> float | None:
    """Seconds left to measure in, ``None`` without a budget; at least half of the share that is meant for it.

    Args:
        recipe: of the run.
        trained: seconds of its training, over all starts.
    """
    minutes = recipe.training.run_budget_minutes
    if minutes is None:
        return None
    total, record = 60.0 * minutes, read_record(Path(recipe.training.output_dir))
    share = (1.0 - TRAINING_UNTIL) * total
    left = share if record is None else total - record.before_training - trained
    return max(left, share / 2)
