"""Rows that hold a conversation otherwise than as a list of messages: pairs of columns, text with a mark, token ids.

Which one a row is, its keys say; ``columns`` renames them first. A list of messages wins over everything else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from modelopt_eagle.common.strict_json import parse_json
from modelopt_eagle.data.files import SourceRow
from modelopt_eagle.data.report import RowRejected
from modelopt_eagle.data.turn_fields import REASONING_KEYS
from modelopt_eagle.errors import DataError

COLUMNS = (
    "messages", "conversations", "prompt", "completion", "input", "system", "text", "input_ids", "loss_mask", "id",
    "category", "tools", "chat_template_kwargs", "finish_reason", "reasoning",
)  # fmt: skip
"""Names that ``data.columns`` may give to columns of a data set."""

_PAIRS = (
    ("prompt", "completion"), ("prompt", "response"), ("instruction", "output"), ("instruction", "response"),
    ("question", "answer"), ("query", "response"), ("input", "output"),
)  # fmt: skip
_TURN_KEYS = ("messages", "conversations")
_MASKS = ("loss_mask", "assistant_masks", "assistant_mask", "completion_mask", "supervised")


def renamed(row: SourceRow, columns: Mapping[str, str] | None) -> SourceRow:
    """The row with its columns under our names.

    Args:
        columns: our name → the column's, such as ``{"prompt": "question", "completion": "best_answer"}``.

    Raises:
        DataError: a name that is not ours.
        RowRejected: ``no_messages`` for a column that the row lacks.
    """
    if not columns:
        return row
    if unknown := [name for name in columns if name not in COLUMNS]:
        raise DataError(f"data.columns: {unknown[0]!r} is none of {', '.join(COLUMNS)}")
    value = {key: item for key, item in row.value.items() if key not in columns}
    for ours, theirs in columns.items():
        if theirs not in row.value:
            found = ", ".join(sorted(map(str, row.value)))
            raise RowRejected("no_messages", f"{row.place}: no column {theirs!r} (data.columns), found {found}")
        value[ours] = row.value[theirs]
    return replace(row, value=value)


def with_messages(row: SourceRow) -> SourceRow:
    """The row with its turns as ``messages``: JSON text parsed, a pair of columns put together; else as it is.

    Raises:
        RowRejected: ``malformed_message``, ``non_text_content``.
    """
    value = row.value
    for key in _TURN_KEYS:
        turns = value.get(key)
        if isinstance(turns, str) and turns.lstrip().startswith("["):
            try:
                return replace(row, value=value | {key: parse_json(turns, finite=False)})
            except ValueError as error:
                raise RowRejected("malformed_message", f"{row.place}: `{key}` is broken JSON ({error})") from error
        if turns:
            return row
    pair = pair_of(value)
    if pair is None:
        return row
    asked, answered = (value[key] for key in pair)
    if pair[0] == "instruction" and isinstance(asked, str) and value.get("input"):
        if not isinstance(value["input"], str):
            raise RowRejected(
                "non_text_content", f"{row.place}: `input` must be a text, found {type(value['input']).__name__}"
            )
        asked = f"{asked}\n\n{value['input']}"
    messages = [*_turns(asked, "user", row.place, pair[0]), *_turns(answered, "assistant", row.place, pair[1])]
    if messages[-1].get("role") == "assistant":
        messages[-1] = messages[-1] | {key: value[key] for key in REASONING_KEYS if value.get(key)}
    return replace(row, value=value | {"messages": messages})


def pair_of(value: Mapping) -> tuple[str, str] | None:
    """The columns of a row that are a question and its answer; ``None`` for a row of messages, or of neither."""
    if any(value.get(key) for key in _TURN_KEYS):
        return None
    return next((pair for pair in _PAIRS if all(value.get(key) not in (None, "", []) for key in pair)), None)


def _turns(value: Any, role: str, place: str, key: str) -> list[dict]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, list) and all(isinstance(turn, Mapping) for turn in value):
        return [dict(turn) for turn in value]
    raise RowRejected(
        "non_text_content", f"{place}: `{key}` must be a text or a list of messages, found {type(value).__name__}"
    )


def marked_text(row: SourceRow, marks: Sequence[str]) -> tuple[str, tuple[tuple[int, int, int], ...]] | None:
    """A preformatted text and where its answers stand; ``None`` if the row holds no ``text``.

    Args:
        marks: what stands before an answer, and what ends it, if anything does. Without an end, the answer is all that
            follows, and its beginning must stand in the text once.

    Returns:
        the text, and ``(start, end of the answer, end of the mark behind it)`` of each answer, in characters.

    Raises:
        RowRejected: ``no_messages`` without marks, ``text_boundary`` where they are not found.
    """
    text = row.value.get("text")
    if not isinstance(text, str) or not text.strip():
        return None
    if not marks:
        raise RowRejected(
            "no_messages",
            f"{row.place}: `text` is formatted already; say with data.text_boundary what stands before an answer in it",
        )
    begin, end = marks[0], marks[1] if len(marks) > 1 else None
    spans, position = [], 0
    while (found := text.find(begin, position)) >= 0:
        start = found + len(begin)
        stop = text.find(end, start) if end is not None else len(text)
        if stop < 0:  # cut off before its end
            spans.append((start, len(text), len(text)))
            break
        position = stop + len(end or "")
        spans.append((start, stop, position))
        if end is None and text.count(begin) > 1:
            raise RowRejected(
                "text_boundary",
                f"{row.place}: {begin!r} stands {text.count(begin)} times in the text: say what ends an answer, too "
                "(data.text_boundary: [before, behind])",
            )
    if not spans:
        raise RowRejected("text_boundary", f"{row.place}: {begin!r} (data.text_boundary) does not stand in the text")
    return text, tuple(spans)


def token_row(row: SourceRow) -> tuple[tuple[int, ...], tuple[bool, ...]] | None:
    """The ids and flags of a row that is tokenised already; ``None`` if it holds no ``input_ids``.

    Raises:
        RowRejected: ``malformed_message`` for ids that are none, or no mask of their length.
    """
    ids = row.value.get("input_ids")
    if ids is None or any(row.value.get(key) for key in _TURN_KEYS):
        return None
    if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
        raise RowRejected("malformed_message", f"{row.place}: `input_ids` must be a non-empty list of token ids")
    key = next((key for key in _MASKS if row.value.get(key) is not None), None)
    labels = row.value.get("labels")
    if key is not None:
        mask = row.value[key]
    elif isinstance(labels, list):
        wrong = [i for i, label in zip(ids, labels, strict=False) if label not in (-100, i)]
        if wrong:
            raise RowRejected("malformed_message", f"{row.place}: `labels` hold other ids than `input_ids`: shifted?")
        mask = [label != -100 for label in labels]
    else:
        raise RowRejected("malformed_message", f"{row.place}: `input_ids` need a `loss_mask` (or `labels`) beside them")
    if not isinstance(mask, list) or len(mask) != len(ids) or not all(flag in (0, 1, True, False) for flag in mask):
        raise RowRejected("malformed_message", f"{row.place}: the mask must have a 0 or 1 for each of {len(ids)} ids")
    return tuple(ids), tuple(bool(flag) for flag in mask)
