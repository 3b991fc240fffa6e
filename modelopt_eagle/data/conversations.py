"""Conversations out of files: both schemas, roles mapped by name, every row accounted for."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from modelopt_eagle.data.files import ASSETS, SourceRow, read_rows, rows_in_memory
from modelopt_eagle.data.report import DataReport, RowRejected
from modelopt_eagle.data.roles import Message, messages_of, refuse_half_characters, refuse_what_is_not_rendered, row_id
from modelopt_eagle.errors import DataError

_NAMES: dict[str, str | Path] = {"quickstart": ASSETS / "quickstart_conversations.jsonl"}


@dataclass(frozen=True)
class Conversation:
    """Turns in order; the last one is an assistant's. ``place`` is the file and line it came from."""

    id: str
    messages: tuple[Message, ...]
    category: str = "all"
    place: str = ""

    @property
    def prompted(self) -> list[int]:
        """Indices of the assistant turns that have a user turn before them: the ones to learn from."""
        first_user = next((i for i, message in enumerate(self.messages) if message.role == "user"), len(self.messages))
        return [i for i, message in enumerate(self.messages) if message.role == "assistant" and i > first_user]


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
) -> ConversationSet:
    """Read ``messages`` and ``conversations`` rows from files or hub data sets; ``"quickstart"`` is the shipped file.

    System turns are kept. An assistant turn before the first user turn is kept as context and not learned from. Turns
    after the last assistant turn are cut. Both are counted in the report's notes.

    Args:
        sources: one or several files or hub names, see :mod:`modelopt_eagle.data.files`.
        unknown_role: ``"fail"`` stops at a role that is not known, ``"drop"`` leaves the row out and counts it.
        role_aliases: further role names, such as ``{"my_model_v2": "assistant"}``.
        max_rows: read only this many rows.

    Raises:
        DataError: a file that cannot be read, an unknown role under ``fail``, or no row left.
    """
    return _collect(read_rows(sources, _NAMES), unknown_role, role_aliases, max_rows)


def conversations_of(
    rows: Iterable[Mapping | Sequence[Mapping]],
    *,
    name: str = "rows",
    unknown_role: str = "fail",
    role_aliases: Mapping[str, str] | None = None,
    max_rows: int | None = None,
) -> ConversationSet:
    """The same for rows in memory: see :func:`~modelopt_eagle.data.files.rows_in_memory`.

    Args:
        rows: dictionaries as they would stand in a file, or lists of messages.
        name: what messages call them; places are ``rows[number]``.
        unknown_role, role_aliases, max_rows: as for :func:`read_conversations`.

    Raises:
        DataError: as :func:`read_conversations`, or something that is no dictionary.
    """
    return _collect(rows_in_memory(rows, name), unknown_role, role_aliases, max_rows)


def _collect(
    rows: Iterable[SourceRow], unknown_role: str, role_aliases: Mapping[str, str] | None, max_rows: int | None
) -> ConversationSet:
    if unknown_role not in ("fail", "drop"):
        raise DataError(f"unknown_role must be fail or drop, found {unknown_role!r}")
    for name, role in (role_aliases or {}).items():
        if role not in ("system", "user", "assistant"):
            raise DataError(f"the role alias {name}={role} must map to system, user or assistant")
    report, kept, seen = DataReport(), [], set()
    for index, row in enumerate(rows):
        if max_rows is not None and index >= max_rows:
            break
        report.read += 1
        try:
            conversation = _conversation(row, index, role_aliases, report)
            if conversation.id in seen:
                raise RowRejected("duplicate_id", f"{row.place}: the id {conversation.id!r} is taken by an earlier row")
        except RowRejected as error:
            if error.reason == "unknown_role" and unknown_role == "fail":
                raise
            report.drop(error.reason, str(error))
            continue
        seen.add(conversation.id)
        kept.append(conversation)
    if not kept:
        reasons = "; ".join(report.examples.values()) or "no rows"
        raise DataError(f"no usable conversation among {report.read} rows: {reasons}")
    return ConversationSet(kept, report)


def _conversation(row: SourceRow, index: int, aliases: Mapping[str, str] | None, report: DataReport) -> Conversation:
    messages = messages_of(row, aliases)
    refuse_what_is_not_rendered(row)
    last = max((i for i, message in enumerate(messages) if message.role == "assistant"), default=-1)
    conversation = Conversation(
        row_id(row, index), tuple(messages[: last + 1]), str(row.value.get("category") or "all"), row.place
    )
    refuse_half_characters(row.place, conversation.id, conversation.category)
    prompted = conversation.prompted
    if not prompted:
        raise RowRejected("no_assistant_turn", f"{row.place}: no assistant turn that answers a user")
    empty = next((i for i in prompted if not messages[i].content.strip()), None)
    if empty is not None:
        raise RowRejected("empty_answer", f"{row.place}, turn {empty}: the assistant's text is empty")
    assistants = sum(message.role == "assistant" for message in conversation.messages)
    report.notes["leading_assistant_turns_not_learned"] += assistants - len(prompted)
    report.notes["trailing_turns_cut"] += len(messages) - last - 1
    report.notes += type(report.notes)()  # forget the zeros
    return conversation
