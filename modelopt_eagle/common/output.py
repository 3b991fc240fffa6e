"""Standard output and error of a command: their end does not end the work.

A reader that goes away (``... | head``, a ``tee`` that dies), a full disk behind ``>`` or a terminal that is gone make
Python's own streams raise wherever something is printed: in the middle of a training, or after everything was saved.
Commands print through streams that remember the first such failure and drop what follows. Standard output holds no
control characters but newlines and tabs: what a data set or a folder's name brings is shown as escapes.
"""

from __future__ import annotations

import errno
import io
import os
import select
import sys

from modelopt_eagle.common.text import visible


class _Outliving(io.RawIOBase):
    """A descriptor to write to whose failures are kept, not raised."""

    def __init__(self, descriptor: int):
        super().__init__()
        self._descriptor = descriptor
        self.failure: OSError | None = None

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, content) -> int:
        """All of ``content``, or as much as goes; the rest counts as written."""
        left = memoryview(content).cast("B")
        size = len(left)
        while len(left) and self.failure is None:
            try:
                left = left[os.write(self._descriptor, left) :]
            except BlockingIOError:  # somebody made the other end non-blocking
                select.select([], [self._descriptor], [])
            except OSError as error:
                self.failure = error
        return size


def guard_output() -> None:
    """Let ``sys.stdout`` and ``sys.stderr`` outlive their ends; again, it does nothing.

    Descriptors 0 to 2 that are closed are opened on nothing, so that no file of ours gets their numbers, into which
    libraries print. A stream that somebody has replaced is left alone. Characters that the terminal's encoding lacks
    are printed as escapes.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream, first = getattr(sys, name), getattr(sys, f"__{name}__")
        if stream is not first or isinstance(getattr(getattr(stream, "buffer", None), "raw", None), _Outliving):
            continue
        raw = _Outliving(number)
        by_line = name == "stderr" or raw.isatty()
        encoding = getattr(stream, "encoding", None) or "utf-8"
        if stream is not None:
            flush(stream)
        kind = _Visible if name == "stdout" else _Guarded  # bars are drawn on the other one
        guarded = kind(io.BufferedWriter(raw), encoding=encoding, errors="backslashreplace", line_buffering=by_line)
        setattr(sys, name, guarded)


class _Guarded(io.TextIOWrapper):
    """Says of itself what Python's own streams do."""

    @property
    def mode(self) -> str:
        return "w"


class _Visible(_Guarded):
    """A stream of text without control characters of others."""

    def write(self, text: str) -> int:
        super().write(visible(text, lines=True))
        return len(text)


def print_coloured(text: str) -> None:
    """Print a line with our own colours on standard output; what others wrote in it was made visible before."""
    if isinstance(sys.stdout, _Visible):
        _Guarded.write(sys.stdout, text + "\n")
    else:
        sys.stdout.write(text + "\n")


def flush(stream) -> OSError | None:
    """Flush a stream; returns the failure, if there is one."""
    try:
        stream.flush()
    except OSError as error:
        return error
    except ValueError:  # closed
        return None
    return None


def finish_output() -> OSError | None:
    """Flush both streams at the end of a command.

    Returns:
        why the output is not whole, or None: also where its reader has left before the end, which is no fault.
    """
    failures = []
    for stream in (sys.stderr, sys.stdout):
        failure = None if stream is None else flush(stream)
        raw = getattr(getattr(stream, "buffer", None), "raw", None)
        failures.append(raw.failure if isinstance(raw, _Outliving) else failure)
    lost = failures[1]
    return None if lost is None or lost.errno == errno.EPIPE else lost
