"""What the target's own chat template makes of a conversation, and where in the text the answers stand.

No template family is known here. A server renders the turns so far with the generation prompt, and the target
continues that text; so an answer begins where the rendering *with the generation prompt* ends, and whatever the
generation prompt supplies (a role header, an empty pair of think tags) is context. Where an answer ends is found by
rendering it with two different characters added: what the two texts have in common at the end is what the template adds
behind an answer, its *tail*.
"""

import hashlib
import os
from dataclasses import dataclass

from modelopt_eagle.data.conversations import Conversation
from modelopt_eagle.data.roles import Message, RowRejected
from modelopt_eagle.errors import DataError

_PROBES = ("A", "9")


@dataclass(frozen=True)
class AnswerSpan:
    """Character positions of one answer in a rendered text.

    Attributes:
        start: where the generation prompt ends and the answer begins.
        body_end: where the answer ends and the template's tail begins.
        tail_end: where the tail ends.
        turn: index of the message.
        cut: the answer was cut before the target ended it.
    """

    start: int
    body_end: int
    tail_end: int
    turn: int
    cut: bool


@dataclass
class RenderedRow:
    """One text as the target would see it, and the answers in it to learn from."""

    id: str
    text: str
    spans: list[AnswerSpan]
    messages: tuple[Message, ...]


def template_hash(tokenizer) -> str:
    """Hash of the chat template in effect, the one in :class:`FeatureContract`; ``""`` if there is none."""
    if not getattr(tokenizer, "chat_template", None):
        return ""
    return hashlib.sha256(tokenizer.get_chat_template().encode()).hexdigest()[:16]


def render_text(tokenizer, messages, add_generation_prompt: bool) -> str:
    """The template's text for some turns.

    Raises:
        RowRejected: ``template_refused``, with the template's own words.
        DataError: the tokenizer has no chat template.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            "the target's tokenizer has no chat template, so what the target is served cannot be rendered; "
            "use an instruction-tuned target, or give a template (--chat_template, model.chat_template)"
        )
    plain = [{"role": message.role, "content": message.content} for message in messages]
    try:
        return tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=add_generation_prompt)
    except Exception as error:  # a template may raise anything
        raise RowRejected("template_refused", f"the chat template refused the conversation: {error}") from error


def render_conversation(tokenizer, conversation: Conversation) -> list[RenderedRow]:
    """Render one conversation: one row if the template only ever appends, else one row per answer, as it is served.

    Raises:
        RowRejected: ``template_refused`` or ``template_unstable``.
    """
    served = [_serve(tokenizer, conversation, turn) for turn in conversation.prompted]
    last = served[-1]
    if all(last.text.startswith(row.text) for row in served):
        last.spans = [row.spans[0] for row in served]
        return [last]
    for number, row in enumerate(served):
        row.id = f"{conversation.id}#{number}"
    return served


def _serve(tokenizer, conversation: Conversation, turn: int) -> RenderedRow:
    """The text of the server for one answer: generation prompt, then what the target wrote."""
    messages = conversation.messages
    prompt = render_text(tokenizer, messages[:turn], add_generation_prompt=True)
    whole = render_text(tokenizer, messages[: turn + 1], add_generation_prompt=False)
    start = _answer_start(prompt, whole, messages[turn].content, conversation.place, turn)
    answer = whole[start:]
    tail = _tail(tokenizer, messages[:turn], messages[turn].content)
    if not answer.endswith(tail):
        raise RowRejected(
            "template_unstable",
            f"{conversation.place}, turn {turn}: the template ends this answer unlike other answers",
        )
    begin = len(prompt)
    body_end = begin + len(answer) - len(tail)
    cut = messages[turn].finish_reason == "length"
    span = AnswerSpan(begin, body_end, begin + len(answer), turn, cut)
    return RenderedRow(conversation.id, prompt + answer, [span], messages[: turn + 1])


def _answer_start(prompt: str, whole: str, content: str, place: str, turn: int) -> int:
    """Where in ``whole`` the answer begins that the target would write behind ``prompt``.

    Usually ``whole`` begins with ``prompt``. A template may supply text with the generation prompt that it leaves out
    of finished turns; then the answer begins at its content, provided that all before it is a beginning of ``prompt``.
    """
    if whole.startswith(prompt):
        return len(prompt)
    common = len(os.path.commonprefix([prompt, whole]))
    for text in (content, content.strip()):
        start = whole.rfind(text, 0, common + len(text)) if text else -1
        if start >= 0:
            return start
    raise RowRejected(
        "template_unstable",
        f"{place}, turn {turn}: the rendered answer does not follow the generation prompt "
        f"(they part after {prompt[max(0, common - 20) : common]!r}); no boundary can be trusted",
    )


def _tail(tokenizer, before: tuple[Message, ...], content: str) -> str:
    """What the template adds behind this answer: what two renderings, each with another character added, share at the end."""
    first, second = (
        render_text(tokenizer, (*before, Message("assistant", content + probe)), add_generation_prompt=False)
        for probe in _PROBES
    )
    return os.path.commonprefix([first[::-1], second[::-1]])[::-1]
