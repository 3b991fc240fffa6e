"""Which of a run's processes makes which row, agreed upon through files beside the store that they fill."""

from __future__ import annotations

import contextlib
import fcntl
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from modelopt_eagle.errors import FeatureError

MUTEX = ".claims-lock"


class Claims:
    """The claims of one process among several; files ``.claims-R-of-N`` hold the row numbers, int64 each.

    Claims last for one run: rows that a killed run had claimed and not stored are free again.

    Args:
        folder: of the store; all processes must see it.
        rank, world_size: this process, and how many there are.
        barrier: returns when all processes have called it.
    """

    def __init__(self, folder: Path, rank: int, world_size: int, barrier: Callable[[], None]):
        self._mutex = folder / MUTEX
        paths = [folder / f".claims-{n}-of-{world_size}" for n in range(world_size)]
        self._mine = paths[rank]
        self._others = {path: 0 for path in paths if path != self._mine}  # bytes read of each
        self._taken: set[int] = set()
        self._ours: set[int] = set()
        self._mine.write_bytes(b"")
        barrier()  # nobody reads what an earlier run has claimed

    def take(self, rows: Sequence[int]) -> set[int]:
        """Claim rows; returns those that this process is to make (also if it claimed them before)."""
        with self._locked():
            for path, start in self._others.items():
                with open(path, "rb") as file:
                    file.seek(start)
                    found = array("q", file.read())
                self._taken.update(found)
                self._others[path] = start + len(found) * found.itemsize
            new = [row for row in rows if row not in self._taken and row not in self._ours]
            with open(self._mine, "ab") as file:
                file.write(array("q", new).tobytes())
        self._ours.update(new)
        return self._ours.intersection(rows)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with open(self._mutex, "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def refuse_other_fillers(folder: Path, world_size: int) -> None:
    """A store is filled by one run at a time: look for workers of another count.

    Raises:
        FeatureError: one holds its lock, so it might make the rows that this run makes.
    """
    for path in folder.glob(".lock-*-of-*"):
        if path.name.endswith(f"-of-{world_size}"):
            continue  # the writer asks for its own
        with open(path, "a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise FeatureError(
                    f"another process already writes into {folder} ({path.name}); a store is filled by one run at a "
                    "time: wait for it, or use another folder"
                ) from error
