"""Token rows packed end to end: five bytes a token in memory, or files that the system pages in.

A Python list of ids takes eight bytes a token, and 28 more for every number above 256: a billion tokens then fill 40 GB
in each process that trains. Here ids are int32 and flags one byte each, and in a folder they are read only where a row
is asked for.
"""

from __future__ import annotations

import contextlib
import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np

from modelopt_eagle.common.files import disk_trouble
from modelopt_eagle.data.encode import TokenizedRow
from modelopt_eagle.data.images import RowImages
from modelopt_eagle.errors import DataError

IDS, FLAGS, ABOUT = "ids.int32", "supervised.uint8", "rows.jsonl"
"""Files of a folder of rows: token ids end to end, their flags, and a line a row for everything else."""


@dataclass(frozen=True, slots=True)
class _About:
    """A row without its tokens."""

    id: str
    category: str
    prompt_length: int
    images: RowImages | None
    template_arguments: dict[str, Any]


class PackedRows(Sequence[TokenizedRow]):
    """Tokenised rows, made one by one as they are asked for.

    Args:
        ids: ``[T]`` int32, of all rows end to end.
        supervised: ``[T]`` uint8, 0 or 1.
        starts: ``[R + 1]`` int64: where each row begins, and the end of the last.
        about: what else a row is, R entries.
        numbers: rows to show, in this order; ``None``: all.
    """

    def __init__(self, ids, supervised, starts: np.ndarray, about: list[_About], numbers: np.ndarray | None = None):
        self._ids, self._supervised, self._starts, self._about, self._numbers = ids, supervised, starts, about, numbers

    def __len__(self) -> int:
        return len(self._about) if self._numbers is None else len(self._numbers)

    @overload
    def __getitem__(self, place: int) -> TokenizedRow: ...
    @overload
    def __getitem__(self, place: slice) -> PackedRows: ...
    def __getitem__(self, place):
        """A row with lists of its own, or, for a slice, some of the rows."""
        if isinstance(place, slice):
            return self.select(range(len(self))[place])
        number = range(len(self))[place]  # an IndexError past the end, and negative places from it
        number = number if self._numbers is None else int(self._numbers[number])
        about, start, end = self._about[number], int(self._starts[number]), int(self._starts[number + 1])
        ids, supervised = self._ids[start:end].tolist(), self._supervised[start:end].astype(bool).tolist()
        return TokenizedRow(
            about.id, about.category, ids, supervised, about.prompt_length, about.images, dict(about.template_arguments)
        )

    def __iter__(self) -> Iterator[TokenizedRow]:
        return (self[number] for number in range(len(self)))

    def __eq__(self, other: object) -> bool:
        """Whether another sequence holds the same rows."""
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(mine == its for mine, its in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        lengths = np.diff(self._starts)
        return (lengths if self._numbers is None else lengths[self._numbers]).tolist()

    @property
    def supervised_counts(self) -> list[int]:
        """Supervised tokens of each row."""
        if not len(self._about):
            return []
        counts = np.add.reduceat(self._supervised, self._starts[:-1], dtype=np.int64)  # no row is empty
        return (counts if self._numbers is None else counts[self._numbers]).tolist()

    def select(self, numbers: Iterable[int]) -> PackedRows:
        """Some of the rows, in the order given, without a copy of their tokens."""
        chosen = np.fromiter(numbers, dtype=np.int64)
        if self._numbers is not None:
            chosen = self._numbers[chosen]
        return PackedRows(self._ids, self._supervised, self._starts, self._about, chosen)

    @classmethod
    def load(cls, folder: Path) -> PackedRows:
        """The rows that :class:`RowPacker` wrote into a folder; their tokens stay on the disk.

        Raises:
            DataError: a file is missing, or they do not fit together.
        """
        about, lengths = [], array("q")
        try:
            with open(folder / ABOUT, encoding="utf-8") as lines:
                for line in lines:
                    values = json.loads(line)
                    lengths.append(values.pop("length"))
                    if values["images"] is not None:
                        values["images"] = RowImages(**values["images"] | {"paths": tuple(values["images"]["paths"])})
                    about.append(_About(**values))
            starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.frombuffer(lengths, np.int64))])
            ids = _mapped(folder / IDS, np.int32)
            supervised = _mapped(folder / FLAGS, np.uint8)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise DataError(f"{folder}: tokenised rows that cannot be read ({error}): start the run again") from error
        if not len(ids) == len(supervised) == starts[-1]:
            raise DataError(
                f"{folder}: {len(ids)} ids and {len(supervised)} flags for {starts[-1]} tokens: start the run again"
            )
        return cls(ids, supervised, starts, about)


def _mapped(path: Path, dtype) -> np.ndarray:
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.zeros(0, dtype)


def row_lengths(rows: Sequence[TokenizedRow]) -> list[int]:
    """Tokens of each row, packed or not."""
    return rows.lengths if isinstance(rows, PackedRows) else [len(row.input_ids) for row in rows]


def supervised_counts(rows: Sequence[TokenizedRow]) -> list[int]:
    """Supervised tokens of each row, packed or not."""
    return rows.supervised_counts if isinstance(rows, PackedRows) else [sum(row.supervised) for row in rows]


def chosen_rows(rows: Sequence[TokenizedRow], numbers: Sequence[int]) -> Sequence[TokenizedRow]:
    """Some of the rows, in the order given; packed ones stay packed."""
    return rows.select(numbers) if isinstance(rows, PackedRows) else [rows[number] for number in numbers]


class RowPacker:
    """Packs rows as they come.

    Args:
        folder: made, and its files written, so that no more than a row is held in memory besides what
            :class:`PackedRows` keeps of each; ``None`` keeps the tokens in memory.
    """

    def __init__(self, folder: Path | None = None):
        self._folder = folder
        self._about: list[_About] = []
        self._starts = array("q", [0])
        self._ids, self._flags = array("i"), bytearray()
        self._files: list[Any] = []  # of IDS, FLAGS, ABOUT
        self._open = contextlib.ExitStack()
        if folder is not None:
            with self._told():
                folder.mkdir(parents=True, exist_ok=True)
                for name in (IDS, FLAGS, ABOUT):
                    self._files.append(self._open.enter_context(open(folder / name, "wb")))  # noqa: SIM115 - close()

    def add(self, row: TokenizedRow) -> None:
        """Pack a row behind the others.

        Raises:
            DataError: the folder cannot be written, as where the disk is full.
        """
        about = _About(row.id, row.category, row.prompt_length, row.images, row.template_arguments)
        ids, flags = array("i", row.input_ids), bytes(row.supervised)
        self._starts.append(self._starts[-1] + len(ids))
        if not self._files:
            self._about.append(about)
            self._ids += ids
            self._flags += flags
            return
        with self._told():
            self._files[0].write(ids.tobytes())
            self._files[1].write(flags)
            self._files[2].write(json.dumps(asdict(about) | {"length": len(ids)}).encode() + b"\n")

    def close(self) -> None:
        """Let the files go; nothing can be added any more.

        Raises:
            DataError: what was still to be written cannot be.
        """
        with self._told():
            self._open.close()

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DataError(f"{self._folder}: tokenised rows cannot be kept there: {disk_trouble(error)}") from error

    def finish(self) -> PackedRows:
        """The rows; nothing can be added any more."""
        self.close()
        if self._folder is not None:
            return PackedRows.load(self._folder)
        ids = np.frombuffer(self._ids, np.int32) if self._ids else np.zeros(0, np.int32)
        flags = np.frombuffer(self._flags, np.uint8) if self._flags else np.zeros(0, np.uint8)
        return PackedRows(ids, flags, np.frombuffer(self._starts, np.int64), self._about)
