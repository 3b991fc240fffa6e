"""Files in shared memory that carry states from a server to a trainer of the same host.

Who fetched a file deletes it. What nobody fetched is deleted by the server after :data:`SEGMENT_LIFE`; after a kill of
the server by Python's resource tracker, a process that outlives it; and if that was killed too, by the next server or
trainer of this host: a file's name says which process of which process namespace has written it.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections import deque
from multiprocessing import resource_tracker
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
SEGMENT_PREFIX = "modelopt-eagle-"
SEGMENT_LIFE = 300.0
"""Seconds after which a file in shared memory is taken to be left by a trainer that was killed."""

_NAME = re.compile(re.escape(SEGMENT_PREFIX) + r"(\d+)-(\d+)-[0-9a-f]{32}")


class Segments:
    """The files that one server has handed out; used by one thread."""

    def __init__(self):
        self._handed_out: deque[tuple[float, Path]] = deque()  # with the time at which they are deleted

    def write(self, payload: bytes) -> str:
        """Put ``payload`` into a new file; returns its name.

        Raises:
            OSError: no room, or shared memory cannot be written.
        """
        name = f"{SEGMENT_PREFIX}{_namespace()}-{os.getpid()}-{secrets.token_hex(16)}"
        path = SHARED_MEMORY / name
        resource_tracker.register(f"/{name}", "shared_memory")
        self._handed_out.append((time.monotonic() + SEGMENT_LIFE, path))
        try:
            with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
                file.write(payload)
        except OSError:
            self._handed_out.pop()
            _delete(path)
            raise
        return name

    def delete_old(self, now: float) -> None:
        """Delete what nobody has fetched in time, and forget what was fetched."""
        while self._handed_out and (self._handed_out[0][0] <= now or not self._handed_out[0][1].exists()):
            _delete(self._handed_out.popleft()[1])

    def delete_all(self) -> None:
        """The server ends."""
        self.delete_old(float("inf"))


def _delete(path: Path) -> None:
    path.unlink(missing_ok=True)
    resource_tracker.unregister(f"/{path.name}", "shared_memory")


def _namespace() -> int:
    """Number of this process's namespace of process ids: in another one, the same id is another process."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def delete_left_segments() -> None:
    """Delete what processes that were killed left in shared memory: by their writer, or else by their age."""
    for path in SHARED_MEMORY.glob(f"{SEGMENT_PREFIX}*"):
        try:
            if _writer_is_gone(path.name) or time.time() - path.lstat().st_mtime > SEGMENT_LIFE:
                path.unlink()
        except OSError:  # another server was faster, or it is another user's
            continue


def _writer_is_gone(name: str) -> bool:
    """Whether a file was written by a process of our namespace that does not exist any more."""
    found = _NAME.fullmatch(name)
    if found is None or not int(found[1]) or int(found[1]) != _namespace():
        return False
    try:
        os.kill(int(found[2]), 0)
    except ProcessLookupError:
        return True
    except OSError:  # another user's
        return False
    return False
