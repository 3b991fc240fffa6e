"""Conversations out of files: both schemas, roles mapped by name, every row accounted for."""

import contextlib
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from modelopt_eagle.common.strict_json import parse_json
from modelopt_eagle.data.files import SHIPPED, SourceRow, read_rows, rows_in_memory
from modelopt_eagle.data.layouts import marked_text, pair_of, renamed, token_row, with_messages
from modelopt_eagle.data.report import DataReport, RowRejected
from modelopt_eagle.data.roles import Message, messages_of, refuse_half_characters, row_id
from modelopt_eagle.data.tools import tools_of
from modelopt_eagle.data.turn_fields import unread_keys_of_a_row
from modelopt_eagle.errors import DataError
from modelopt_eagle.target.chat import check_arguments


@dataclass(frozen=True)
class Conversation:
    """Turns in order; the last one is an assistant's.

    Attributes:
        id: unique in its data set.
        messages: the turns.
        category: what the row says of itself, else ``"all"``.
        place: the file and line it came from.
        tools: descriptions of tools, which the template renders.
        template_arguments: variables of the template for this conversation alone, such as ``enable_thinking``; they
            win over those of the run.
        text: in place of messages, a text that is formatted already, and its answers, see
            :func:`~modelopt_eagle.data.layouts.marked_text`.
        tokens: in place of messages, ids and supervised flags that another tool made.
    """

    id: str
    messages: tuple[Message, ...]
    category: str = "all"
    place: str = ""
    tools: tuple[dict, ...] = ()
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    text: tuple[str, tuple[tuple[int, int, int], ...]] | None = None
    tokens: tuple[tuple[int, ...], tuple[bool, ...]] | None = None

    @property
    def prompted(self) -> list[int]:
        """Indices of the assistant turns that have a user turn before them: what a target could have written."""
        first_user = next((i for i, message in enumerate(self.messages) if message.role == "user"), len(self.messages))
        return [i for i, message in enumerate(self.messages) if message.role == "assistant" and i > first_user]

    @property
    def learned(self) -> list[int]:
        """Those of them that the data do not mark as not to be learned."""
        return [i for i in self.prompted if self.messages[i].learned is not False]


@dataclass
class ConversationSet:
    """Conversations kept, and the account of all that were read."""

    rows: list[Conversation]
    report: DataReport


def read_conversations(
    sources: str | Path | Sequence[str | Path],
    *,
    unknown_role: str = "fail",
    role_aliases: Mapping[str, str] | None = None,
    max_rows: int | None = None,
    columns: Mapping[str, str] | None = None,
    text_boundary: str | Sequence[str] | None = None,
) -> ConversationSet:
    """Read ``messages`` and ``conversations`` rows from files or hub data sets; ``"quickstart"`` is the shipped file.

    System turns are kept. An assistant turn before the first user turn is kept as context and not learned from. Turns
    after the last assistant turn are cut. Both are counted in the report's notes.

    Args:
        sources: one or several files or hub names, see :mod:`modelopt_eagle.data.files`.
        unknown_role: ``"fail"`` stops at a role that is not known, ``"drop"`` leaves the row out and counts it.
        role_aliases: further role names, such as ``{"my_model_v2": "assistant"}``.
        max_rows: read only this many rows.
        columns: our names of columns → those of the data, see :mod:`modelopt_eagle.data.layouts`.
        text_boundary: what stands before an answer in rows of ``text``, and what ends it.

    Returns:
        the conversations, and the account of all rows read.

    Raises:
        DataError: a file that cannot be read, an unknown role under ``fail``, or no row left.
    """
    return _collected(read_rows(sources, SHIPPED), unknown_role, role_aliases, max_rows, columns, text_boundary)


def conversations_of(
    rows: Iterable[Mapping | Sequence[Mapping]],
    *,
    name: str = "rows",
    unknown_role: str = "fail",
    role_aliases: Mapping[str, str] | None = None,
    max_rows: int | None = None,
    columns: Mapping[str, str] | None = None,
    text_boundary: str | Sequence[str] | None = None,
) -> ConversationSet:
    """The same for rows in memory: see :func:`~modelopt_eagle.data.files.rows_in_memory`.

    Args:
        rows: dictionaries as they would stand in a file, or lists of messages.
        name: what messages call them; places are ``rows[number]``.
        unknown_role, role_aliases, max_rows, columns, text_boundary: as for :func:`read_conversations`.

    Raises:
        DataError: as :func:`read_conversations`, or something that is no dictionary.
    """
    return _collected(rows_in_memory(rows, name), unknown_role, role_aliases, max_rows, columns, text_boundary)


def _collected(rows: Iterable[SourceRow], *options) -> ConversationSet:
    stream = ConversationStream(rows, *options)
    return ConversationSet(list(stream), stream.report)


class ConversationStream:
    """The conversations of some rows, one by one: none is held here. Can be gone through once.

    Args:
        rows: of files, or of memory.
        unknown_role, role_aliases, max_rows, columns, text_boundary: as for :func:`read_conversations`.

    Attributes:
        report: the account of the rows read so far.

    Raises:
        DataError: an option of no meaning; while it is gone through, as :func:`read_conversations`.
    """

    def __init__(
        self,
        rows: Iterable[SourceRow],
        unknown_role: str = "fail",
        role_aliases: Mapping[str, str] | None = None,
        max_rows: int | None = None,
        columns: Mapping[str, str] | None = None,
        text_boundary: str | Sequence[str] | None = None,
    ):
        if unknown_role not in ("fail", "drop"):
            raise DataError(f"unknown_role must be fail or drop, found {unknown_role!r}")
        for name, role in (role_aliases or {}).items():
            if role not in ("system", "user", "assistant"):
                raise DataError(f"the role alias {name}={role} must map to system, user or assistant")
        self.report = DataReport()
        self._rows = itertools.islice(rows, max_rows)
        self._unknown_role, self._aliases = unknown_role, role_aliases
        self._columns, self._text_boundary = columns, text_boundary

    def __iter__(self) -> Iterator[Conversation]:
        report, kept = self.report, 0
        seen: dict[str, tuple[int, bytes]] = {}  # id → number of its file, hash of the content
        for index, row in enumerate(self._rows):
            report.read += 1
            try:
                row = renamed(row, self._columns)
                made = _made_already(row, index, self._text_boundary)
                made = made or _conversation(row, index, self._aliases, report)
                conversation = _unique(made, row, seen, report)
            except RowRejected as error:
                if error.reason == "unknown_role" and self._unknown_role == "fail":
                    raise
                report.drop(error.reason, str(error))
                continue
            seen[conversation.id] = (row.source, _content(conversation))
            kept += 1
            yield conversation
        if not kept:
            raise DataError(f"no usable conversation among {report.read} rows: {report.reasons() or 'no rows'}")


def _content(conversation: Conversation) -> bytes:
    """Sixteen bytes that say what a conversation holds and is rendered with, its name apart."""
    given = sorted(conversation.template_arguments.items())
    content = repr((conversation.messages, conversation.tools, given, conversation.text, conversation.tokens))
    return hashlib.blake2b(content.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _unique(conversation: Conversation, row: SourceRow, seen: Mapping, report: DataReport) -> Conversation:
    """The conversation with an id that is not taken: ids of different files may both begin at 0.

    Raises:
        RowRejected: ``duplicate_id`` for an id that stands twice in one file, or the same conversation in two.
    """
    if conversation.id not in seen:
        return conversation
    source, content = seen[conversation.id]
    if source == row.source or content == _content(conversation):
        raise RowRejected("duplicate_id", f"{row.place}: the id {conversation.id!r} is taken by an earlier row")
    renamed = replace(conversation, id=f"{conversation.id}@{row.source + 1}")
    if renamed.id in seen:
        raise RowRejected("duplicate_id", f"{row.place}: the ids {conversation.id!r} and {renamed.id!r} are taken")
    report.note("ids_renamed", f"{row.place}: {conversation.id!r} is taken by another file, now {renamed.id!r}")
    return renamed


def _made_already(row: SourceRow, index: int, text_boundary: str | Sequence[str] | None) -> Conversation | None:
    """A row of token ids or of formatted text; ``None`` for one of messages."""
    tokens = token_row(row)
    turns = any(key in row.value for key in ("messages", "conversations", "prompt", "instruction"))
    text = (
        None
        if tokens is not None or turns
        else marked_text(row, [text_boundary] if isinstance(text_boundary, str) else text_boundary or ())
    )
    if tokens is None and text is None:
        return None
    name, category = row_id(row, index), str(row.value.get("category") or "all")
    refuse_half_characters(row.place, name, category, text[0] if text else "")
    return Conversation(name, (), category, row.place, text=text, tokens=tokens)


def _conversation(row: SourceRow, index: int, aliases: Mapping[str, str] | None, report: DataReport) -> Conversation:
    for key in unread_keys_of_a_row(row.value, pair=pair_of(row.value) is not None):
        report.note(f"unread_key_of_a_row_{key}", f"{row.place}: nothing reads `{key}` beside the turns, only in them")
    row = with_messages(row)
    messages = messages_of(row, aliases, report)
    last = max((i for i, message in enumerate(messages) if message.role == "assistant"), default=-1)
    conversation = Conversation(
        row_id(row, index),
        tuple(messages[: last + 1]),
        str(row.value.get("category") or "all"),
        row.place,
        tools_of(row.value, row.place),
        template_arguments_of(row),
    )
    refuse_half_characters(row.place, conversation.id, conversation.category)
    prompted = conversation.prompted
    if not prompted:
        raise RowRejected("no_assistant_turn", f"{row.place}: no assistant turn that answers a user")
    learned = conversation.learned
    if not learned:
        raise RowRejected("nothing_to_learn", f"{row.place}: every answer is marked as not to be learned")
    empty = next((i for i in learned if not _says_something(messages[i])), None)
    if empty is not None:
        raise RowRejected("empty_answer", f"{row.place}, turn {empty}: the assistant's text is empty")
    assistants = sum(message.role == "assistant" for message in conversation.messages)
    report.notes["leading_assistant_turns_not_learned"] += assistants - len(prompted)
    report.notes["answers_marked_as_not_learned"] += len(prompted) - len(learned)
    report.notes["trailing_turns_cut"] += len(messages) - last - 1
    report.notes += type(report.notes)()  # forget the zeros
    return conversation


def _says_something(message: Message) -> bool:
    """Whether there is something to learn in an answer; reasoning alone only where the answer was cut."""
    return bool(message.content.strip() or message.tool_calls or (message.cut and message.reasoning))


def template_arguments_of(row: SourceRow) -> dict[str, Any]:
    """The template's arguments that a row brings: ``chat_template_kwargs``, as servers take them.

    Raises:
        RowRejected: ``malformed_message`` for anything but an object of plain values.
    """
    arguments = row.value.get("chat_template_kwargs") or row.value.get("template_arguments") or {}
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):
            arguments = parse_json(arguments, finite=False)
    if not isinstance(arguments, Mapping):
        raise RowRejected(
            "malformed_message", f"{row.place}: `chat_template_kwargs` must be an object, found {arguments!r:.80}"
        )
    try:
        check_arguments(arguments, f"{row.place}: `chat_template_kwargs`")
    except DataError as error:
        raise RowRejected("malformed_message", str(error)) from error
    return dict(arguments)
