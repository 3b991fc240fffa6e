"""What the target wrote, as a message: the ids are kept, and its text is put where the chat template gives it back.

A target writes reasoning, channels and tags as tokens. A later turn is rendered from messages, as a client would send
them: the reasoning in its own field where the template has a place for it, the rest as content. Which division is
right, the template says: the one that it renders to what was written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from modelopt_eagle.data.conversations import Conversation
from modelopt_eagle.data.report import RowRejected
from modelopt_eagle.data.roles import Message
from modelopt_eagle.data.served import serve_answer
from modelopt_eagle.data.special import SpecialTokens
from modelopt_eagle.data.template import render_text

_WHY, _SAID = "modelopteaglewhy", "modelopteaglesaid"


def written_message(
    tokenizer,
    before: Sequence[Message],
    ids: Sequence[int],
    *,
    cut: bool = False,
    end_token_ids: Sequence[int] = (),
    tools: Sequence[dict] = (),
    arguments: Mapping[str, Any] | None = None,
) -> Message:
    """The assistant's message of what the target wrote behind a prompt.

    Args:
        tokenizer: the target's.
        before: the turns that the prompt was rendered from.
        ids: what was written, its end token included unless it was cut; not empty.
        cut: the answer reached a limit.
        end_token_ids: what the target stops at besides the tokenizer's own end token.
        tools, arguments: of the conversation.

    Returns:
        a message with ``token_ids``. If the template gives back the text in no division, all of it is the content.
    """
    special = SpecialTokens.of(tokenizer, end_token_ids)
    text_ids = list(ids[:-1] if ids and not cut and ids[-1] in special.ends else ids)
    text = tokenizer.decode(text_ids, skip_special_tokens=False)
    finish = "length" if cut else None
    for reasoning, content in _divisions(tokenizer, tuple(before), text, tools, arguments):
        message = Message("assistant", content, finish, reasoning=reasoning, token_ids=tuple(ids) or None)
        conversation = Conversation(
            "written", (*before, message), "all", "written", tuple(tools), dict(arguments or {})
        )
        try:
            serve_answer(tokenizer, conversation, len(before), special)
        except RowRejected:
            continue
        return message
    return Message("assistant", text, finish, token_ids=tuple(ids) or None)


def _divisions(tokenizer, before, text: str, tools, arguments) -> Iterator[tuple[str | None, str]]:
    """Ways to divide what was written into reasoning and content, the likeliest first."""

    def body(**fields) -> str:
        try:
            prompt = render_text(tokenizer, before, True, tools, arguments)
            whole = render_text(tokenizer, (*before, Message("assistant", _SAID, **fields)), False, tools, arguments)
        except RowRejected:
            return ""
        return whole[len(prompt) :] if whole.startswith(prompt) else ""

    framed = body(reasoning=_WHY)
    if _WHY in framed and _SAID in framed.partition(_WHY)[2]:
        opening, _, rest = framed.partition(_WHY)
        between = rest.partition(_SAID)[0]
        if text.startswith(opening) and between.strip():
            reasoning, found, content = text[len(opening) :].partition(between)
            if not found:
                reasoning, found, content = text[len(opening) :].partition(between.strip())
            if found and reasoning.strip():
                yield reasoning, content
            elif opening.strip() and not found:  # cut within the reasoning
                yield text[len(opening) :], ""
    frame = body().partition(_SAID)[0]
    if frame and text.startswith(frame):
        yield None, text[len(frame) :]
    yield None, text
