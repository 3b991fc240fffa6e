"""Messages out of a row in either schema, with the roles mapped by name.

``messages`` rows have ``role`` and ``content``, ``conversations`` rows ``from`` and ``value``. Which one a row uses is
found per row.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from modelopt_eagle.data.files import SourceRow
from modelopt_eagle.data.images import Image, fill_in, parts_of
from modelopt_eagle.data.report import RowRejected

ROLE_ALIASES: dict[str, str] = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user", "prompter": "user",
    "assistant": "assistant", "gpt": "assistant", "model": "assistant", "bot": "assistant", "chatgpt": "assistant",
}  # fmt: skip
"""Role names that are understood without being told, lower case."""

TOOL_ROLES = frozenset(
    {"tool", "function", "function_call", "function_response", "observation", "ipython", "tool_call", "tool_response"}
)
_MESSAGE_KEYS = ("messages", "conversations")


@dataclass(frozen=True)
class Message:
    """One turn.

    Attributes:
        role: system, user or assistant.
        content: its text; of a turn with images, all its texts.
        finish_reason: ``"length"`` for an answer that was cut before the target ended it.
        parts: texts and images in their order, of a turn with images; else empty.
    """

    role: str
    content: str
    finish_reason: str | None = None
    parts: tuple[str | Image, ...] = ()

    @property
    def images(self) -> tuple[Image, ...]:
        """Its images, in order."""
        return tuple(part for part in self.parts if isinstance(part, Image))


def messages_of(row: SourceRow, aliases: Mapping[str, str] | None = None) -> list[Message]:
    """The turns of a row, in order, roles mapped to system, user or assistant.

    Args:
        row: a ``messages`` or ``conversations`` row; a text under ``system`` becomes the first turn.
        aliases: more role names, such as ``{"my_model_v2": "assistant"}``; they win over ``ROLE_ALIASES``.

    Raises:
        RowRejected: reasons ``no_messages``, ``malformed_message``, ``tool_role``, ``unknown_role``,
            ``non_text_content``, and the ``image_…`` ones of :mod:`modelopt_eagle.data.images`.
    """
    value, place = row.value, row.place
    turns_key = next((key for key in _MESSAGE_KEYS if value.get(key)), None)
    if turns_key is None:
        found = ", ".join(sorted(value)) or "nothing"
        raise RowRejected(
            "no_messages", f"{place}: expected a non-empty `messages` or `conversations` list, found the keys {found}"
        )
    turns = value[turns_key]
    if not isinstance(turns, list):
        raise RowRejected("malformed_message", f"{place}: `{turns_key}` must be a list, found {type(turns).__name__}")
    messages = [_message(turn, f"{place}, turn {i}", aliases or {}, row.folder) for i, turn in enumerate(turns)]
    messages = _with_row_images(messages, row)
    system = value.get("system")
    if isinstance(system, str) and system.strip() and messages[0].role != "system":
        messages.insert(0, Message("system", system))
    if (
        value.get("finish_reason") == "length"
        and messages[-1].role == "assistant"
        and messages[-1].finish_reason is None
    ):
        messages[-1] = Message("assistant", messages[-1].content, "length")
    refuse_half_characters(place, *(message.content for message in messages))
    return messages


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


def refuse_what_is_not_rendered(row: SourceRow) -> None:
    """Refuse what a row holds beside its texts and a server would have put before or into the answer.

    Raises:
        RowRejected: ``tool_role`` for descriptions of tools, ``separate_reasoning`` for reasoning in its own field.
    """
    for key in ("tools", "functions"):
        if row.value.get(key) not in (None, [], {}, "", "[]", "{}", "null"):
            raise RowRejected(
                "tool_role", f"{row.place}: `{key}` describes tools, and these are not rendered: remove them"
            )
    turns: list[dict] = next((row.value[key] for key in _MESSAGE_KEYS if row.value.get(key)), [])
    for index, turn in enumerate(turns):
        field = next((name for name in ("reasoning_content", "thinking") if turn.get(name)), None)
        if field is not None:
            raise RowRejected(
                "separate_reasoning",
                f"{row.place}, turn {index}: the reasoning stands in `{field}`, so the content is not all that was "
                "written: put it into the content, as the target writes it, or remove it",
            )


def row_id(row: SourceRow, index: int) -> str:
    """The row's own id (``id``, ``question_id``, ``prompt_id``, ``conversation_id``), or one made of its number."""
    keys = ("id", "question_id", "prompt_id", "conversation_id")
    return str(next((row.value[key] for key in keys if row.value.get(key) is not None), f"row-{index:06d}"))


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


def _message(turn, place: str, aliases: Mapping[str, str], folder: Path | None) -> Message:
    if not isinstance(turn, dict) or not turn.keys() & {"role", "from"}:
        found = ", ".join(sorted(turn)) if isinstance(turn, dict) else type(turn).__name__
        raise RowRejected(
            "malformed_message", f"{place}: expected an object with role/content or from/value, found {found}"
        )
    # either name of the list is met with either pair of keys
    role_key, text_key = ("role", "content") if "role" in turn else ("from", "value")
    name = str(turn[role_key])
    role = aliases.get(name) or ROLE_ALIASES.get(name.lower())
    if role is None and name.lower() in TOOL_ROLES or turn.get("tool_calls"):
        raise RowRejected(
            "tool_role",
            f"{place}: tool use (role {name!r}) is not supported: its rendering differs between serving and training",
        )
    if role is None:
        known = ", ".join(sorted({**ROLE_ALIASES, **aliases}))
        raise RowRejected(
            "unknown_role",
            f"{place}: unknown role {name!r}; known are {known}; map it with a role alias such as {name}=assistant",
        )
    content = turn.get(text_key)
    parts = parts_of(content, folder, place) if isinstance(content, list) else None
    if parts is not None:
        return _with_parts(Message(role, "", turn.get("finish_reason")), parts)
    if not isinstance(content, str):
        found = "parts of other types" if isinstance(content, list) else type(content).__name__
        raise RowRejected("non_text_content", f"{place}: `{text_key}` must be text, or texts and images; found {found}")
    return Message(role, content, turn.get("finish_reason"))
