"""Rows out of files, folders and hub data sets, each with the place it came from (``file:line``).

What a file is follows from its first bytes, not from its name: JSON lines (blank ones ignored), a JSON array of
objects, either of them compressed by gzip or zstd, or parquet. Tables of text are known by their names (``.csv``,
``.tsv``). Patterns (``chats/*.jsonl``) stand for the files that they match, ascending. A folder is a data set that
``datasets`` saved, or a clone of one of the hub; a name ``owner/name`` is one of the hub.
"""

import csv
import difflib
import glob
import gzip
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from modelopt_eagle.common.package import require_extra
from modelopt_eagle.common.strict_json import parse_json
from modelopt_eagle.errors import DataError

ASSETS = Path(__file__).resolve().parent.parent / "assets"
"""Files that the package ships."""

SHIPPED = {"quickstart": ASSETS / "quickstart_conversations.jsonl"}
"""Short names of conversations that the package ships."""

IN_MEMORY = "in-memory"
"""What a recipe says in place of a file where the rows were given in Python."""

_HUB_NAME = re.compile(r"^[\w.-]+/[\w.-]+(:[\w.-]+){0,2}$")
_DESCRIPTIONS = ("dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json", "config.json")
"""Files that stand beside the rows of a data set."""
_FILE_ENDINGS = (".json", ".jsonl", ".txt", ".parquet", ".csv", ".tsv", ".gz", ".zst")
_NO_FILE = (
    "{source}: no such file; give an existing .jsonl, .json, .parquet or .csv file (also .gz, .zst), a folder of a "
    "data set, a pattern that matches some, or a hub data set as owner/name"
)
_GZIP, _ZSTD, _PARQUET = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1"


@dataclass(frozen=True)
class SourceRow:
    """One JSON object.

    Attributes:
        value: the object.
        place: where it stands, for messages.
        folder: what file names in it are relative to.
        source: number of the file or data set it came from, counted from 0.
    """

    value: dict
    place: str
    folder: Path | None = None
    source: int = 0


def read_rows(
    sources: str | Path | Sequence[str | Path], names: Mapping[str, str | Path] | None = None
) -> Iterator[SourceRow]:
    """Yield the objects of one or several files, folders or hub data sets, in order, without holding them all.

    Args:
        sources: paths, patterns, hub names (``owner/name``, ``owner/name:split``, ``owner/name:config:split``; a folder
            may be followed by ``:split`` as well), or keys of ``names``.
        names: short names, such as ``quickstart``, and what they stand for.

    Raises:
        DataError: a file is missing, empty, not UTF-8, damaged, or holds a line that is not a JSON object (the message
            has file and line).
    """
    if isinstance(sources, (str, Path)):
        sources = [sources]
    if not sources:
        raise DataError("no data file was given; name at least one .jsonl file (data.path in the recipe, --data here)")
    number = 0
    for source in sources:
        if source == IN_MEMORY:
            raise DataError(
                "the rows of this recipe were given in Python: name a file as data.train_path, or give data= again"
            )
        for found in _matching((names or {}).get(str(source), source)):
            yield from _numbered(_read_source(found), number)
            number += 1


def _read_source(source: str | Path) -> Iterator[SourceRow]:
    path = Path(source).expanduser()
    folder, _, split = str(source).rpartition(":")
    if path.is_file():
        return _read_file(path)
    if path.is_dir():
        return _read_folder(path, None)
    if folder and Path(folder).expanduser().is_dir():
        return _read_folder(Path(folder).expanduser(), split)
    if names_hub_set(str(source)):
        return _read_hub(str(source))
    raise DataError(_NO_FILE.format(source=source))


def _matching(source: str | Path) -> list[str | Path]:
    """The files that a pattern matches, ascending; the source itself if it is none."""
    text = str(Path(source).expanduser()) if isinstance(source, Path) else str(source)
    if not re.search(r"[*?\[]", text) or Path(text).expanduser().exists():
        return [source]
    found = sorted(path for path in glob.glob(str(Path(text).expanduser()), recursive=True) if Path(path).is_file())
    if not found:
        raise DataError(f"{source}: no file matches this pattern")
    return list(found)


def check_sources(sources: str | Path | Sequence[str | Path]) -> None:
    """Refuse names that stand for nothing, without reading anything.

    Raises:
        DataError: no such file, and no name of a hub data set.
    """
    for source in [sources] if isinstance(sources, (str, Path)) else sources:
        if str(source) not in SHIPPED:
            for found in _matching(source):
                path, folder = Path(found).expanduser(), Path(str(found).rpartition(":")[0] or ".").expanduser()
                named = ":" in str(found) and folder.is_dir()
                if path.exists() or named:
                    continue
                if not names_hub_set(str(found)):
                    raise DataError(_NO_FILE.format(source=found))
                if meant := _meant(path):
                    raise DataError(f"{_NO_FILE.format(source=found)}; is {meant} meant?")


def _meant(path: Path) -> Path | None:
    """A file beside the one that is named as a data set of the hub could be, and is not there, of nearly its name."""
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return None
    close = difflib.get_close_matches(path.name, names, 1, 0.8)
    return path.parent / close[0] if close else None


def local_files(sources: str | Path | Sequence[str | Path]) -> list[Path]:
    """The files on this disk that sources name, those in named folders among them."""
    named = [sources] if isinstance(sources, (str, Path)) else sources
    files: list[Path] = []
    for source in named:
        for found in _matching(SHIPPED.get(str(source), source)):
            path = Path(found).expanduser()
            files += sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    return [path for path in files if path.is_file()]


def names_hub_set(source: str) -> bool:
    """Whether a text can be the name of a data set of the hub."""
    return bool(_HUB_NAME.match(source)) and not source.split(":")[0].endswith(_FILE_ENDINGS)


def _numbered(rows: Iterator[SourceRow], source: int) -> Iterator[SourceRow]:
    return (replace(row, source=source) for row in rows) if source else rows


def rows_in_memory(rows: Iterable[Mapping | Sequence[Mapping]], name: str = "rows") -> Iterator[SourceRow]:
    """Yield rows that a program holds, in order; file names in them are relative to the working folder.

    Args:
        rows: dictionaries as they would stand in a file, or lists of messages: a list, a generator, a
            ``datasets.Dataset``.
        name: what messages call them: ``rows[3]`` is the fourth.

    Raises:
        DataError: something that is no row.
    """
    if isinstance(rows, Mapping):  # one row, or a DatasetDict
        found = ", ".join(map(str, rows)) or "none"
        raise DataError(
            f"{name}: expected a list of rows, found a mapping with the keys {found}; give one split of a data set, "
            f"such as {name}['train'], or put a single row into a list"
        )
    if isinstance(rows, (str, bytes, Path)) or not isinstance(rows, Iterable):
        raise DataError(f"{name}: expected a list of rows, found {type(rows).__name__}")
    for index, value in enumerate(rows):
        place = f"{name}[{index}]"
        yield SourceRow(_row_in_memory(value, place), place)


def _row_in_memory(value: object, place: str) -> dict:
    if isinstance(value, Mapping):
        if value.keys() & {"role", "from"} and not value.keys() & {"messages", "conversations"}:
            raise DataError(f"{place} is a single message; expected conversations, each a list of messages")
        return dict(value)
    if isinstance(value, (list, tuple)) and value and all(isinstance(turn, Mapping) for turn in value):
        return {"messages": [dict(turn) for turn in value]}
    raise DataError(
        f"{place}: expected a dictionary as a row, found {type(value).__name__} (a list of messages will do)"
    )


def _read_file(path: Path) -> Iterator[SourceRow]:
    with open(path, "rb") as handle:
        magic = handle.read(4)
    if magic == _PARQUET:
        yield from _read_parquet(path)
    elif path.suffix.lower() in (".csv", ".tsv"):
        yield from _read_table(path, "\t" if path.suffix.lower() == ".tsv" else ",")
    else:
        yield from _read_json(path)


def _read_json(path: Path) -> Iterator[SourceRow]:
    with _unpacked(path) as handle:
        head, begun = b"", True
        while begun and not head:
            block = handle.read(4096)
            begun, head = bool(block), block.lstrip(b"\xef\xbb\xbf \t\r\n")
    if not head:
        raise DataError(f'{path} is empty; expected one JSON object a line, such as {{"messages": [...]}}')
    yield from _read_array(path) if head.startswith(b"[") else _read_lines(path)


class _unpacked:
    """A file's bytes, unpacked; what a damaged archive raises becomes a :class:`DataError` with its name."""

    def __init__(self, path: Path):
        self.path = path

    def __enter__(self) -> "_unpacked":
        with open(self.path, "rb") as handle:
            magic = handle.read(4)
        if magic[:2] == _GZIP:
            self._handle: Any = gzip.open(self.path, "rb")
        elif magic == _ZSTD:
            self._handle = io.BufferedReader(_ZstdFrames(self.path))
        else:
            self._handle = open(self.path, "rb")
        return self

    def __exit__(self, *exception) -> None:
        self._handle.close()

    def read(self, size: int = -1) -> bytes:
        """Up to ``size`` bytes."""
        return self._guarded(lambda: self._handle.read(size))

    def lines(self) -> Iterator[bytes]:
        """Line by line."""
        while line := self._guarded(self._handle.readline):
            yield line

    def _guarded(self, action) -> bytes:
        try:
            return action()
        except Exception as error:  # gzip and zstandard raise kinds of their own
            raise DataError(f"{self.path}: damaged or cut off ({type(error).__name__}: {error})") from error


class _ZstdFrames(io.RawIOBase):
    """The bytes in a file's zstd frames. Unlike ``zstandard.open``, an end within a frame is an error, as in gzip."""

    def __init__(self, path: Path):
        self._zstd = require_extra("zstandard", "data").ZstdDecompressor()
        self._file = open(path, "rb")  # noqa: SIM115 - close() closes it
        self._frame: Any = None
        self._unpacked = memoryview(b"")

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer) -> int:
        """Fill a buffer as far as the next packed bytes go; returns how far, 0 at the end."""
        while not self._unpacked:
            packed = self._frame.unused_data if self._frame is not None and self._frame.eof else b""
            packed = packed or self._file.read(1024)  # at most some 32 MB when unpacked
            if not packed:
                if self._frame is not None and not self._frame.eof:
                    raise EOFError("the file ends before its last frame does")
                return 0
            if self._frame is None or self._frame.eof:
                self._frame = self._zstd.decompressobj()
            self._unpacked = memoryview(self._frame.decompress(packed))
        size = min(len(buffer), len(self._unpacked))
        buffer[:size], self._unpacked = self._unpacked[:size], self._unpacked[size:]
        return size


def _read_lines(path: Path) -> Iterator[SourceRow]:
    with _unpacked(path) as handle:
        for number, raw in enumerate(handle.lines(), start=1):
            place = f"{path}:{number}"
            if number == 1:
                raw = raw.removeprefix(b"\xef\xbb\xbf")
            if raw.strip():
                yield SourceRow(_object(_decode(raw, place), place), place, path.parent)


def _read_array(path: Path) -> Iterator[SourceRow]:
    with _unpacked(path) as handle:
        text = _decode(handle.read().removeprefix(b"\xef\xbb\xbf"), str(path))
    try:
        values = parse_json(text, finite=False)
    except ValueError as error:
        line = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise DataError(
            f"{path}{line}: broken JSON array ({_fault(error)}); mend that line, or write one object a line (.jsonl)"
        ) from error
    if not values:
        raise DataError(f"{path} holds an empty array; expected conversation objects")
    for index, value in enumerate(values):
        place = f"{path}[{index}]"
        if not isinstance(value, dict):
            raise DataError(f"{place}: expected a JSON object, found {type(value).__name__}")
        yield SourceRow(value, place, path.parent)


def _read_table(path: Path, delimiter: str) -> Iterator[SourceRow]:
    """Rows of a table whose first line names the columns; every value is text."""
    with _unpacked(path) as handle:
        text = _decode(handle.read().removeprefix(b"\xef\xbb\xbf"), str(path))
    csv.field_size_limit(2**31 - 1)  # texts are long
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        if not reader.fieldnames:
            raise DataError(f"{path} is empty; expected a first line with the names of the columns")
        for row in reader:
            place = f"{path}:{reader.line_num}"
            if None in row or None in row.values():
                raise DataError(f"{place}: another number of values than the first line names columns")
            yield SourceRow(dict(row), place, path.parent)
    except csv.Error as error:
        raise DataError(f"{path}:{reader.line_num}: no table of text ({error})") from error


def _read_parquet(path: Path) -> Iterator[SourceRow]:
    parquet, index = require_extra("pyarrow.parquet", "data"), 0
    try:
        with closing(parquet.ParquetFile(path)) as file:
            for batch in file.iter_batches(batch_size=256):
                for value in batch.to_pylist():
                    yield SourceRow(_without_nothing(value), f"{path}[{index}]", path.parent)
                    index += 1
    except DataError:
        raise
    except Exception as error:  # pyarrow raises kinds of its own
        raise DataError(f"{path}: damaged, or no parquet file ({type(error).__name__}: {error})") from error
    if not index:
        raise DataError(f"{path} holds no rows")


def _read_folder(path: Path, split: str | None) -> Iterator[SourceRow]:
    """A data set in a folder: saved by ``save_to_disk``, or with data files as a clone of one of the hub has."""
    datasets = require_extra("datasets", "data")
    saved = any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))
    files = [p for p in path.rglob("*") if p.is_file() and p.name.endswith((*_FILE_ENDINGS, ".arrow"))]
    if not saved and not files:
        raise DataError(f"{path} is a folder without data files; a .jsonl or .json file was expected, or a data set")
    kinds = {} if saved else _by_kind(files)
    if len(kinds) > 1:  # the library would read one of them and leave the others out without a word
        named = "; ".join(f"{kind}: {', '.join(names[:3])}" for kind, names in sorted(kinds.items()))
        raise DataError(f"{path} holds data files of several kinds ({named}): name those that are meant, one by one")
    try:
        found = datasets.load_from_disk(str(path)) if saved else datasets.load_dataset(str(path))
    except Exception as error:  # the library raises many kinds
        raise DataError(f"{path}: no data set that `datasets` reads ({type(error).__name__}: {error})") from error
    yield from _rows_of(_split_of(found, split, str(path)), str(path), path)


def _by_kind(files: Iterable[Path]) -> dict[str, list[str]]:
    """Names of the files that hold rows, by the reader that they need; texts and descriptions of a set apart."""
    kinds: dict[str, list[str]] = {}
    for file in sorted(files):
        endings = [ending for ending in file.suffixes if ending not in (".gz", ".zst")]
        kind = endings[-1].removesuffix("l") if endings else ""
        if kind not in ("", ".txt") and file.name not in _DESCRIPTIONS:
            kinds.setdefault(kind, []).append(file.name)
    return kinds


def _split_of(found: Any, split: str | None, name: str):
    """One split of what was loaded.

    Raises:
        DataError: a split that is not there, or several and none named.
    """
    if not isinstance(found, Mapping):
        if split is not None:
            raise DataError(f"{name} has no splits: leave :{split} out")
        return found
    wanted = split or ("train" if "train" in found or len(found) != 1 else next(iter(found)))
    if wanted not in found:
        raise DataError(f"{name} has the splits {', '.join(map(str, found))}: name one as {name}:SPLIT")
    return found[wanted]


def _read_hub(name: str) -> Iterator[SourceRow]:
    datasets = require_extra("datasets", "data")
    repository, *named = name.split(":")
    split = named[-1] if named else "train"
    try:
        rows = (
            datasets.load_dataset(repository, named[0], split=split)
            if len(named) == 2
            else datasets.load_dataset(repository, split=split)
        )
    except Exception as error:  # the library raises many kinds: network, missing split, unknown name
        raise DataError(
            f"{name} is no local file, and as a hub data set it could not be loaded ({type(error).__name__}: {error}); "
            "check the name, name a split as owner/name:split (a configuration: owner/name:config:split), or give a "
            "local .jsonl file"
        ) from error
    yield from _rows_of(rows, name, None)


def _rows_of(rows: Iterable[Mapping], name: str, folder: Path | None) -> Iterator[SourceRow]:
    for index, value in enumerate(rows):
        yield SourceRow(_without_nothing(dict(value)), f"{name}[{index}]", folder)


def _without_nothing(value):
    """A value of a typed table without the keys that other rows of it have, and this one holds nothing under."""
    if isinstance(value, dict):
        return {key: _without_nothing(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nothing(item) for item in value]
    return value


def _decode(raw: bytes, place: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{place}: not UTF-8 text ({error.reason} at byte {error.start}); convert the file to UTF-8"
        ) from error


def _fault(error: ValueError) -> str:
    """What is wrong with a JSON text, and in which column if that is known."""
    return f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)


def _object(text: str, place: str) -> dict:
    try:
        value = parse_json(text, finite=False)
    except ValueError as error:
        raise DataError(f"{place}: broken JSON ({_fault(error)}); mend or remove the line") from error
    if not isinstance(value, dict):
        raise DataError(f"{place}: expected a JSON object on each line, found {type(value).__name__}")
    return value
