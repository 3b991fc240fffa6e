"""Rows of JSON out of files and hub data sets, each with the place it came from (``file:line``).

Formats: ``.jsonl`` (one object a line, blank lines ignored), a JSON array of objects, and hub data sets named
``owner/name`` or ``owner/name:split`` (extra ``data``). Which of the two file formats it is follows from the first
character, not from the file's ending.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from modelopt_eagle.common.package import require_extra
from modelopt_eagle.errors import DataError

ASSETS = Path(__file__).resolve().parent.parent / "assets"
"""Files that the package ships."""

SHIPPED = {"quickstart": ASSETS / "quickstart_conversations.jsonl"}
"""Short names of conversations that the package ships."""

IN_MEMORY = "in-memory"
"""What a recipe says in place of a file where the rows were given in Python."""

_HUB_NAME = re.compile(r"^[\w.-]+/[\w.-]+(:[\w.-]+)?$")
_NO_FILE = "{source}: no such file; give an existing .jsonl or .json file, or a hub data set as owner/name"
_FILE_ENDINGS = (".json", ".jsonl", ".txt", ".parquet", ".csv")


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
    """Yield the objects of one or several files or hub data sets, in order.

    Args:
        sources: paths, hub names, or keys of ``names``.
        names: short names, such as ``quickstart``, and what they stand for.

    Raises:
        DataError: a file is missing, empty, not UTF-8, or holds a line that is not a JSON object (the message has file
            and line).
    """
    if isinstance(sources, (str, Path)):
        sources = [sources]
    if not sources:
        raise DataError("no data file was given; name at least one .jsonl file (data.path in the recipe, --data here)")
    for number, source in enumerate(sources):
        if source == IN_MEMORY:
            raise DataError(
                "the rows of this recipe were given in Python: name a file as data.train_path, or give data= again"
            )
        source = (names or {}).get(str(source), source)
        path = Path(source).expanduser()
        if path.is_dir():
            raise DataError(f"{source} is a folder; a .jsonl or .json file was expected (several files may be listed)")
        if path.is_file():
            yield from _numbered(_read_file(path), number)
        elif _names_hub_set(str(source)):
            yield from _numbered(_read_hub(str(source)), number)
        else:
            raise DataError(_NO_FILE.format(source=source))


def check_sources(sources: str | Path | Sequence[str | Path]) -> None:
    """Refuse names that stand for nothing, without reading anything.

    Raises:
        DataError: no such file, and no name of a hub data set.
    """
    for source in [sources] if isinstance(sources, (str, Path)) else sources:
        if str(source) in SHIPPED:
            continue
        path = Path(source).expanduser()
        if not path.exists() and not _names_hub_set(str(source)):
            raise DataError(_NO_FILE.format(source=source))


def local_files(sources: str | Path | Sequence[str | Path]) -> list[Path]:
    """The files on this disk that sources name."""
    named = [sources] if isinstance(sources, (str, Path)) else sources
    paths = [Path(SHIPPED.get(str(source), source)).expanduser() for source in named]
    return [path for path in paths if path.is_file()]


def _names_hub_set(source: str) -> bool:
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
        head = handle.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n")
    if not head and not path.read_bytes().strip(b"\xef\xbb\xbf \t\r\n"):
        raise DataError(f'{path} is empty; expected one JSON object a line, such as {{"messages": [...]}}')
    yield from _read_array(path) if head.startswith(b"[") else _read_lines(path)


def _read_lines(path: Path) -> Iterator[SourceRow]:
    with open(path, "rb") as handle:
        for number, raw in enumerate(handle, start=1):
            place = f"{path}:{number}"
            if number == 1:
                raw = raw.removeprefix(b"\xef\xbb\xbf")
            if raw.strip():
                yield SourceRow(_object(_decode(raw, place), place), place, path.parent)


def _read_array(path: Path) -> Iterator[SourceRow]:
    text = _decode(path.read_bytes().removeprefix(b"\xef\xbb\xbf"), str(path))
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}:{error.lineno}: broken JSON array ({error.msg}, column {error.colno}); "
            "mend that line, or write one object a line (.jsonl)"
        ) from error
    if not values:
        raise DataError(f"{path} holds an empty array; expected conversation objects")
    for index, value in enumerate(values):
        place = f"{path}[{index}]"
        if not isinstance(value, dict):
            raise DataError(f"{place}: expected a JSON object, found {type(value).__name__}")
        yield SourceRow(value, place, path.parent)


def _read_hub(name: str) -> Iterator[SourceRow]:
    datasets = require_extra("datasets", "data")
    repository, _, split = name.partition(":")
    try:
        rows = datasets.load_dataset(repository, split=split or "train")
    except Exception as error:  # the library raises many kinds: network, missing split, unknown name
        raise DataError(
            f"{name} is no local file, and as a hub data set it could not be loaded ({type(error).__name__}: {error}); "
            "check the name, name a split as owner/name:split, or give a local .jsonl file"
        ) from error
    for index, value in enumerate(rows):
        yield SourceRow(dict(value), f"{name}[{index}]")


def _decode(raw: bytes, place: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{place}: not UTF-8 text ({error.reason} at byte {error.start}); convert the file to UTF-8"
        ) from error


def _object(text: str, place: str) -> dict:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{place}: broken JSON ({error.msg}, column {error.colno}); mend or remove the line") from error
    if not isinstance(value, dict):
        raise DataError(f"{place}: expected a JSON object on each line, found {type(value).__name__}")
    return value
