"""Ctrl-C while a command starts.

Libraries turn a Ctrl-C that meets them while they are imported into errors of their own (numpy: ``cannot load module
more than once per process``, or a recursion of 900 calls), and a module half imported cannot be tried again. Nothing
of a command's work is under way then, so the process ends on the spot. This file imports almost nothing itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TypeVar

INTERRUPTED = 130
"""Exit code after Ctrl-C."""

_IMPORT = "<frozen importlib._bootstrap>"
_Result = TypeVar("_Result")


def interruptible(action: Callable[[], _Result]) -> _Result:
    """Run an action; a Ctrl-C that meets an import in it ends the process with 130, elsewhere it raises as ever.

    Where Ctrl-C is ignored or somebody handles it, it stays so.

    Returns:
        what the action returned.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        return action()
    signal.signal(signal.SIGINT, _on_interrupt)
    try:
        return action()
    finally:
        if signal.getsignal(signal.SIGINT) is _on_interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C back: it is taken at the end of the block. Processes that are started in it never take one.

    For processes that this one stops itself; on a system without signal masks nothing is held back.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def say_interrupted() -> None:
    """Say so on standard error, as far as that is possible."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # being written to at this moment, or gone
            stream.flush()
    with contextlib.suppress(OSError):
        os.write(2, b"\ninterrupted\n")


def _on_interrupt(number: int, frame: FrameType | None) -> None:
    while frame is not None and frame.f_code is not interruptible.__code__:
        if frame.f_code.co_filename == _IMPORT:
            say_interrupted()
            os._exit(INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt
