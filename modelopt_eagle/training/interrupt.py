"""Ctrl-C and SIGTERM: the first asks the loop to stop at the next step boundary, the second stops at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable


class StopRequest:
    """A context manager that turns signals into a flag.

    Args:
        say: prints a line for the user; called once, at the first signal.

    Attributes:
        asked: whether a signal has come.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, say: Callable[[str], None] = print):
        self.asked = False
        self._say = say
        self._before: dict = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # handlers can be set nowhere else
            self._before = {number: signal.signal(number, self._handle) for number in self.SIGNALS}
        return self

    def __exit__(self, *exception) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number, frame) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self._say("stopping at the next step and saving; once more to stop at once")
