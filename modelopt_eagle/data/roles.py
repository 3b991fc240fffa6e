"""Messages out of a row in either schema, with the roles mapped by name.

``messages`` rows have ``role`` and ``content``, ``conversations`` rows ``from`` and ``value``. Which one a row uses is
found per row.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from modelopt_eagle.data.files import SourceRow
from modelopt_eagle.data.images import Image, fill_in, parts_of
from modelopt_eagle.data.report import DataReport, RowRejected
from modelopt_eagle.data.tools import check_plain, tool_call, tool_calls_of
from modelopt_eagle.data.turn_fields import finish_reason, is_learned, reasoning_of, unread_keys

ROLE_ALIASES: dict[str, str] = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user", "prompter": "user",
    "assistant": "assistant", "gpt": "assistant", "model": "assistant", "bot": "assistant", "chatgpt": "assistant",
}  # fmt: skip
"""Role names that are understood without being told, lower case."""

RESULT_ROLES = frozenset({"tool", "function", "function_response", "observation", "ipython", "tool_response"})
"""Role names of a tool's result, lower case."""

CALL_ROLES = frozenset({"function_call", "tool_call"})
"""Role names of a turn whose text is a call, as JSON."""

TOOL_ROLES = RESULT_ROLES | CALL_ROLES
ID_KEYS = ("id", "question_id", "prompt_id", "conversation_id")
"""Keys under which a row says what it is called."""

_MESSAGE_KEYS = ("messages", "conversations")


@dataclass(frozen=True)
class Message:
    """One turn.

    Attributes:
        role: system, user, assistant or tool.
        content: its text; of a turn with images, all its texts.
        finish_reason: ``"length"`` for an answer that was cut before the target ended it.
        parts: texts and images in their order, of a turn with images; else empty.
        reasoning: what the assistant wrote before its content, where the data keep it apart.
        tool_calls: calls of the assistant, in the form of :mod:`modelopt_eagle.data.tools`.
        tool_call_id, name: of a tool's result, which call it answers and by which tool.
        learned: whether the data say that this answer is to be learned; ``None``: they say nothing.
        token_ids: what the target wrote for this answer, its end token included; ``None`` if only the text is known.
    """

    role: str
    content: str
    finish_reason: str | None = None
    parts: tuple[str | Image, ...] = ()
    reasoning: str | None = None
    tool_calls: tuple[dict, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    learned: bool | None = None
    token_ids: tuple[int, ...] | None = None

    @property
    def cut(self) -> bool:
        """Whether the answer was cut before the target ended it."""
        return self.finish_reason == "length"

    @property
    def images(self) -> tuple[Image, ...]:
        """Its images, in order."""
        return tuple(part for part in self.parts if isinstance(part, Image))


def messages_of(
    row: SourceRow, aliases: Mapping[str, str] | None = None, report: DataReport | None = None
) -> list[Message]:
    """The turns of a row, in order, roles mapped to system, user, assistant or tool.

    Args:
        row: a ``messages`` or ``conversations`` row; a text under ``system`` or ``system_prompt`` becomes the
            first turn.
        aliases: more role names, such as ``{"my_model_v2": "assistant"}``; they win over ``ROLE_ALIASES``.
        report: takes the names of keys that are not read.

    Raises:
        RowRejected: reasons ``no_messages``, ``malformed_message``, ``tool_role``, ``unknown_role``,
            ``separate_reasoning``, ``non_text_content``, and the ``image_…`` ones of :mod:`modelopt_eagle.data.images`.
    """
    value, place = row.value, row.place
    turns_key = next((key for key in _MESSAGE_KEYS if value.get(key)), None)
    if turns_key is None:
        found = ", ".join(sorted(map(str, value))) or "nothing"
        raise RowRejected(
            "no_messages", f"{place}: expected a non-empty `messages` or `conversations` list, found the keys {found}"
        )
    turns = value[turns_key]
    if not isinstance(turns, list):
        raise RowRejected("malformed_message", f"{place}: `{turns_key}` must be a list, found {type(turns).__name__}")
    report = DataReport() if report is None else report
    messages = [_message(turn, f"{place}, turn {i}", aliases or {}, row.folder, report) for i, turn in enumerate(turns)]
    _check_tool_turns(messages, place)
    messages = _with_row_images(messages, row)
    messages = _system_turns(value, place) + messages
    ended, unknown = finish_reason(value)
    if unknown is not None:
        report.note("unknown_finish_reason", f"{place}: {unknown!r} is not known, taken as the end of a whole answer")
    if ended == "length" and messages[-1].role == "assistant" and messages[-1].finish_reason is None:
        messages[-1] = replace(messages[-1], finish_reason="length")
    for message in messages:
        calls = [json.dumps(call, ensure_ascii=False) for call in message.tool_calls]
        refuse_half_characters(place, message.content, message.reasoning or "", message.name or "", *calls)
    return messages[1:] if messages[:1] == messages[1:2] and messages[0].role == "system" else messages


def _system_turns(value: Mapping, place: str) -> list[Message]:
    """The texts that stand under ``system`` and ``system_prompt`` of a row, as turns.

    Raises:
        RowRejected: ``malformed_message`` for anything but a text.
    """
    texts = []
    for key in ("system", "system_prompt"):
        text = value.get(key)
        if text is not None and not isinstance(text, str):
            raise RowRejected("malformed_message", f"{place}: `{key}` must be text, found {type(text).__name__}")
        if text is not None and text.strip() and text not in texts:
            texts.append(text)
    return [Message("system", text) for text in texts]


def _check_tool_turns(messages: Sequence[Message], place: str) -> None:
    """Refuse results that answer no call.

    Raises:
        RowRejected: ``tool_role``.
    """
    called = False
    for index, message in enumerate(messages):
        called = called or bool(message.tool_calls)
        if message.role == "tool" and not called:
            raise RowRejected(
                "tool_role", f"{place}, turn {index}: the result of a tool use that no turn before it asked for"
            )


def refuse_half_characters(place: str, *texts: str) -> None:
    """Refuse texts that no tokenizer and no file takes: JSON can hold half of a surrogate pair, such as ``\\ud83d``.

    Raises:
        RowRejected: reason ``non_text_content``.
    """
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = text[error.start].encode("unicode_escape").decode()
            raise RowRejected(
                "non_text_content",
                f"{place}: {half} is one half of a surrogate pair and no character (a text that was cut inside one?): "
                "remove it",
            ) from error


def row_id(row: SourceRow, index: int) -> str:
    """The row's own id (``id``, ``question_id``, ``prompt_id``, ``conversation_id``), or one made of its number."""
    return str(next((row.value[key] for key in ID_KEYS if row.value.get(key) is not None), f"row-{index:06d}"))


def _with_row_images(messages: list[Message], row: SourceRow) -> list[Message]:
    """The messages with the row's own ``image`` or ``images`` in their places; images in answers are refused."""
    if any(message.images for message in messages) or row.value.get("image") or row.value.get("images"):
        first_user = next((i for i, message in enumerate(messages) if message.role == "user"), len(messages))
        turns = [message.parts or (message.content,) for message in messages]
        turns = fill_in(turns, row.value, row.folder, row.place, first_user)
        messages = [_with_parts(message, parts) for message, parts in zip(messages, turns, strict=True)]
    for index, message in enumerate(messages):
        if message.images and message.role == "assistant":
            raise RowRejected("image_in_answer", f"{row.place}, turn {index}: no target here writes images")
    return messages


def _with_parts(message: Message, parts: tuple[str | Image, ...]) -> Message:
    texts = [part for part in parts if isinstance(part, str)]
    return replace(message, content="".join(texts), parts=parts if len(texts) < len(parts) else ())


def _message(turn, place: str, aliases: Mapping[str, str], folder: Path | None, report: DataReport) -> Message:
    if not isinstance(turn, dict) or not turn.keys() & {"role", "from"}:
        found = ", ".join(sorted(map(str, turn))) if isinstance(turn, dict) else type(turn).__name__
        raise RowRejected(
            "malformed_message", f"{place}: expected an object with role/content or from/value, found {found}"
        )
    # either name of the list is met with either pair of keys
    role_key, text_key = ("role", "content") if "role" in turn else ("from", "value")
    if text_key == "value" and "value" not in turn and "content" in turn:
        text_key = "content"
    name = str(turn[role_key])
    role = aliases.get(name) or ROLE_ALIASES.get(name.lower())
    for key in unread_keys(turn):
        report.note(f"unread_key_of_a_turn_{key}", f"{place}: nothing reads `{key}`")
    if role is None and name.lower() in CALL_ROLES:
        if not isinstance(turn.get(text_key), str):
            raise RowRejected("tool_role", f"{place}: tool use (role {name!r}) without a call in `{text_key}`")
        return replace(_answer_fields(turn, place, report), tool_calls=(tool_call(turn[text_key], place),))
    if role is None and name.lower() in RESULT_ROLES:
        return Message("tool", _result_text(turn, text_key, place), name=_text_or_none(turn.get("name")),
                       tool_call_id=_text_or_none(turn.get("tool_call_id")))  # fmt: skip
    if role is None:
        known = ", ".join(sorted({**ROLE_ALIASES, **aliases}))
        raise RowRejected(
            "unknown_role",
            f"{place}: unknown role {name!r}; known are {known}; map it with a role alias such as {name}=assistant",
        )
    message = Message(role, "")
    if role == "assistant":
        message = replace(_answer_fields(turn, place, report), tool_calls=tool_calls_of(turn, place))
    elif turn.get("tool_calls") or turn.get("function_call"):
        raise RowRejected("tool_role", f"{place}: tool use in a turn of role {name!r}: only the assistant calls tools")
    content = turn.get(text_key)
    if content is None and message.tool_calls:
        content = ""
    if isinstance(content, list):
        reasoning, content = split_reasoning(content, place)
        if reasoning is not None:
            if role != "assistant" or message.reasoning not in (None, reasoning):
                raise RowRejected("separate_reasoning", f"{place}: reasoning among the parts and in another field")
            message = replace(message, reasoning=reasoning)
    parts = parts_of(content, folder, place) if isinstance(content, list) else None
    if parts is not None:
        return _with_parts(message, parts)
    if not isinstance(content, str):
        found = "parts of other types" if isinstance(content, list) else type(content).__name__
        raise RowRejected("non_text_content", f"{place}: `{text_key}` must be text, or texts and images; found {found}")
    return replace(message, content=content)


def _answer_fields(turn: Mapping, place: str, report: DataReport) -> Message:
    """What stands beside the text of a turn that the target wrote, be it an answer or a call of a tool."""
    ended, unknown = finish_reason(turn)
    if unknown is not None:
        report.note(
            "unknown_finish_reason", f"{place}: the finish reason {unknown!r} is not known: taken as a whole answer"
        )
    return Message(
        "assistant",
        "",
        ended,
        reasoning=reasoning_of(turn, place),
        learned=is_learned(turn, place),
        token_ids=_token_ids(turn.get("token_ids"), place),
    )


def split_reasoning(content: list, place: str) -> tuple[str | None, list]:
    """The reasoning among the parts of a content list, and the other parts; texts of other names become plain ones."""
    reasoning: list[str] = []
    rest: list = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in ("thinking", "reasoning", "reasoning_text", "think"):
            text = reasoning_of(
                {"thinking": next((part[k] for k in ("thinking", "reasoning", "text") if part.get(k)), None)}, place
            )
            if rest:
                raise RowRejected("separate_reasoning", f"{place}: reasoning behind a text, which no template renders")
            reasoning += [text] if text else []
        elif kind in ("output_text", "input_text"):
            rest.append({**part, "type": "text"})
        else:
            rest.append({"type": "text", "text": part} if isinstance(part, str) else part)
    return "".join(reasoning) or None, rest


def _result_text(turn: Mapping, key: str, place: str) -> str:
    """The text of a tool's result; an object is written as JSON, as servers do."""
    content = turn.get(key)
    if isinstance(content, list) and all(isinstance(p, Mapping) and p.get("type") == "text" for p in content):
        content = (
            "".join(part["text"] for part in content) if all(isinstance(p.get("text"), str) for p in content) else None
        )
    if isinstance(content, (dict, list)):
        check_plain(content, f"{place}: the result of a tool")
        return json.dumps(content, ensure_ascii=False)
    if not isinstance(content, str):
        raise RowRejected("tool_role", f"{place}: the result of a tool must be text, found {type(content).__name__}")
    return content


def _text_or_none(value) -> str | None:
    return None if value is None else str(value)


def _token_ids(value, place: str) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not value or not all(type(i) is int and 0 <= i < 2**31 for i in value):
        raise RowRejected("malformed_message", f"{place}: `token_ids` must be a non-empty list of token ids")
    return tuple(value)
