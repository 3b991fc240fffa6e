"""What people see of the work: lines through the package's logger, and one progress bar.

The library speaks with :func:`say` and :func:`warn`, which go through ``logging.getLogger("modelopt_eagle")``: a
program that imports it decides with ``logging`` what becomes of them. Commands work inside :func:`shown`, which prints
the lines on ``stderr`` as they are and draws bars if that is a terminal.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator
from typing import TextIO

from tqdm import tqdm

from modelopt_eagle.common.text import visible

LOGGER = logging.getLogger("modelopt_eagle")


def say(line: str) -> None:
    """Tell the user something that is as it should be."""
    LOGGER.info("%s", line)


def warn(line: str) -> None:
    """Tell the user something to be looked at; shown with ``warning:`` before it."""
    LOGGER.warning("%s", line)


class LineHandler(logging.Handler):
    """Prints lines as they are, above the bars if there are any.

    Args:
        stream: where to; default ``sys.stderr``, whatever that is at the moment.
    """

    def __init__(self, stream: TextIO | None = None):
        super().__init__(logging.INFO)
        self._stream = stream

    @property
    def stream(self) -> TextIO:
        """Where lines go."""
        return sys.stderr if self._stream is None else self._stream

    def emit(self, record: logging.LogRecord) -> None:
        """Print the record's message."""
        try:
            line = visible(record.getMessage(), lines=True)
            tqdm.write(f"warning: {line}" if record.levelno >= logging.WARNING else line, file=self.stream)
            self.stream.flush()
        except Exception:  # as every handler of logging does: a broken pipe must not end a training
            self.handleError(record)


def line_handler() -> LineHandler | None:
    """The handler of the :func:`shown` that this runs in, or ``None`` outside of one."""
    return next((handler for handler in LOGGER.handlers if isinstance(handler, LineHandler)), None)


@contextlib.contextmanager
def shown(visible: bool = True, stream: TextIO | None = None) -> Iterator[None]:
    """Print what the package says while this is open; the innermost of several adds nothing.

    Args:
        visible: false does nothing at all (a quiet caller, all processes but the first).
        stream: where to; default ``sys.stderr``.
    """
    if not visible or line_handler() is not None:
        yield
        return
    handler, level = LineHandler(stream), LOGGER.level
    LOGGER.addHandler(handler)
    if not LOGGER.isEnabledFor(logging.INFO):
        LOGGER.setLevel(logging.INFO)
    try:
        yield
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(level)


def clock(seconds: float) -> str:
    """``h:mm:ss``, or ``m:ss`` below an hour."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


def terminal_bar(total: float, label: str, layout: str) -> tqdm | None:
    """A bar on the terminal that lines are shown on; ``None`` where there is none (a log file, a quiet library).

    Args:
        total: what counts as whole.
        label: what is being done.
        layout: tqdm's ``bar_format``.
    """
    handler = line_handler()
    if handler is None or handler.level > logging.INFO or not handler.stream.isatty():
        return None
    return tqdm(total=total, desc=label, file=handler.stream, bar_format=layout, dynamic_ncols=True)


class ProgressBar:
    """How far something is: a bar on a terminal, elsewhere a line every few seconds.

    Args:
        total: number of units.
        label: what is being done.
        unit: name of a unit, for the rate.
        log_every: seconds between lines where there is no terminal.

    Attributes:
        total: number of units.
        done: units done.
    """

    LAYOUT = "{desc} |{bar:24}| {n:.0f}/{total:.0f} {postfix}"

    def __init__(self, total: int, label: str, unit: str = "rows", log_every: float = 10.0):
        self.total, self.label, self.unit = total, label, unit
        self.done = 0
        self._start = self._last = time.monotonic()
        self._log_every = log_every
        self._bar = terminal_bar(total, label, self.LAYOUT)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def resize(self, total: int) -> None:
        """Another number of units, as soon as it is known."""
        self.total = total
        if self._bar is not None:
            self._bar.total = total

    def advance(self, count: int = 1, note: str = "") -> None:
        """Count ``count`` more units as done; ``note`` is shown behind the remaining time."""
        self.reach(self.done + count, note)

    def reach(self, done: int, note: str = "") -> None:
        """Count ``done`` units as done in all."""
        before, self.done = self.done, done
        whole = done >= self.total > before
        if self._bar is not None:
            self._bar.set_postfix_str(self._pace(note), refresh=False)
            self._bar.update(done - before)
        elif whole or time.monotonic() - self._last >= self._log_every:
            self._last = time.monotonic()
            say(f"{self.label} {done}/{self.total} {self._pace(note)}".rstrip())
        if whole:
            self.close()

    def close(self) -> None:
        """Leave the bar as it stands; later lines come below it."""
        if self._bar is not None:
            self._bar.close()

    def _pace(self, note: str) -> str:
        rate = self.done / max(time.monotonic() - self._start, 1e-9)
        left = max(self.total - self.done, 0) / max(rate, 1e-9)
        return f"{rate:.2f} {self.unit}/s, {clock(left)} left {note}".rstrip()
