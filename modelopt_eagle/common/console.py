"""A progress bar that needs no package: one line rewritten on a terminal, one line every few seconds in a log."""

import sys
import time


class ProgressBar:
    """Shows done/total, rate and remaining time on ``stderr``.

    Args:
        total: number of units.
        label: what is being done.
        unit: name of a unit, for the rate.
        log_every: seconds between lines where ``stderr`` is no terminal.
    """

    def __init__(self, total: int, label: str, unit: str = "rows", log_every: float = 10.0):
        self.total, self.label, self.unit = total, label, unit
        self.done = 0
        self._start = time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._every = 0.2 if self._terminal else log_every
        self._last = self._start

    def advance(self, count: int = 1, note: str = "") -> None:
        """Count ``count`` more units as done; ``note`` is shown behind the remaining time."""
        self.done += count
        now = time.monotonic()
        if now - self._last >= self._every or self.done >= self.total:
            self._last = now
            self._write(now, note)

    def _write(self, now: float, note: str) -> None:
        rate = self.done / max(now - self._start, 1e-9)
        left = (self.total - self.done) / max(rate, 1e-9)
        filled = 24 * self.done // max(self.total, 1)
        line = (
            f"{self.label} [{'#' * filled}{'.' * (24 - filled)}] {self.done}/{self.total} "
            f"{rate:.2f} {self.unit}/s, {int(left) // 60}:{int(left) % 60:02d} left {note}"
        )
        end = "\n" if not self._terminal or self.done >= self.total else ""
        sys.stderr.write(("\r\x1b[K" if self._terminal else "") + line + end)
        sys.stderr.flush()
