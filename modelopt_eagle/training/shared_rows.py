"""Data tokenised once for all processes of a run: one writes the rows into the output folder, the others read them."""

from __future__ import annotations

import json
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from modelopt_eagle.common.files import write_whole
from modelopt_eagle.data import DataReport, TokenizedDataset
from modelopt_eagle.data.packed import PackedRows
from modelopt_eagle.errors import DataError

PREFIX = ".tokens-"
"""A folder of rows in the output folder; it is there while a run reads its data, and what is left of it is swept."""
_POLL = 0.2  # seconds between looks for the rows of the first process

Make = Callable[[Path | None], TokenizedDataset]


class RowsOfARun:
    """Where the processes of a run keep the tokens of its data.

    Every process asks for the same data sets in the same order. The rows lie on the disk and are paged in as they are
    read; their names are gone once every process has them open, so nothing is left behind.

    Args:
        folder: the run's output folder; ``None`` keeps rows in memory, in each process its own.
        accelerator: of the run; ``None`` where there is one process.
    """

    def __init__(self, folder: Path | None = None, accelerator: Any = None):
        self._folder, self._accelerator = folder, accelerator

    def read(self, make: Make) -> TokenizedDataset:
        """A data set, made by the first process.

        The others wait for as long as it takes: they look for its files and hold no collective operation open, whose
        time would run out. Where they cannot see its folder, each makes the rows itself.

        Args:
            make: makes the data set in a folder, or in memory.

        Raises:
            DataError: what the first process raised, on every process.
        """
        if self._folder is None:
            return make(None)
        if self._accelerator is None or self._accelerator.num_processes == 1:
            with _folder(self._folder / f"{PREFIX}{uuid.uuid4().hex}") as place:
                return make(place)
        place = self._folder / f"{PREFIX}{self._agreed()}"
        seen = (place / "begun").is_file()
        self._accelerator.wait_for_everyone()  # all have looked before anything is removed
        if self._accelerator.is_main_process:
            try:
                dataset = make(place)
                _tell(place, report=vars(dataset.report), template_hash=dataset.template_hash)
            except BaseException as error:
                _tell_failure(place, error)
                raise
        else:
            dataset = _await(place) if seen else make(None)
        self._accelerator.wait_for_everyone()
        if self._accelerator.is_main_process:
            shutil.rmtree(place, ignore_errors=True)
        return dataset

    def _agreed(self) -> str:
        """A name that the first process makes, with its folder, and the others learn."""
        from accelerate.utils import broadcast_object_list

        name = [uuid.uuid4().hex]
        if self._accelerator.is_main_process:
            place = self._folder / f"{PREFIX}{name[0]}"
            place.mkdir(parents=True)
            write_whole(place / "begun", "")
        return broadcast_object_list(name)[0]


@contextmanager
def _folder(place: Path) -> Iterator[Path]:
    """A folder that is gone afterwards; open files in it stay readable."""
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _tell(place: Path, **values: Any) -> None:
    write_whole(place / "told", json.dumps(values))


def _tell_failure(place: Path, error: BaseException) -> None:
    try:
        _tell(place, failed=f"{type(error).__name__}: {error}")
    except OSError:
        shutil.rmtree(place, ignore_errors=True)  # that it is gone is an answer, too


def _await(place: Path) -> TokenizedDataset:
    """The data set of the first process, once it says that it is whole.

    Raises:
        DataError: that process failed, or removed the folder.
    """
    while not (place / "told").is_file():
        if not place.is_dir():
            raise DataError(f"{place} is gone: the process that read the data has ended; its error stands above")
        time.sleep(_POLL)
    told = json.loads((place / "told").read_text(encoding="utf-8"))
    if "failed" in told:
        raise DataError(f"the first process could not read the data: {told['failed']}")
    report = told["report"]
    counted = {name: Counter(report[name]) for name in ("dropped", "notes")}
    return TokenizedDataset(PackedRows.load(place), DataReport(**report | counted), told["template_hash"])
