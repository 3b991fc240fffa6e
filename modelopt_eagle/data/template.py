"""What the target's own chat template makes of a conversation, and where in the text the answers stand.

No template family is known here. A server renders the turns so far with the generation prompt, and the target
continues that text; so an answer begins where the rendering *with the generation prompt* ends, and whatever the
generation prompt supplies (a role header, an empty pair of think tags) is context, as is text that the template adds
between the prompt and the content. Where an answer ends is found by
rendering it with two different characters added: what the two texts have in common at the end is what the template adds
behind an answer, its *tail*.
"""

import hashlib
import os
from dataclasses import dataclass

from modelopt_eagle.data.conversations import Conversation
from modelopt_eagle.data.images import RowImages
from modelopt_eagle.data.report import RowRejected
from modelopt_eagle.data.roles import Message
from modelopt_eagle.errors import DataError

_PROBES = ("A", "9")
_TEXT_PROBE = "modelopt eagle probe"
_TAKES_LISTS: dict[str, bool] = {}  # chat template -> whether it renders content lists and drops plain texts


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
    """One text as the target would see it, and the answers in it to learn from; ``images`` once they are expanded."""

    id: str
    text: str
    spans: list[AnswerSpan]
    messages: tuple[Message, ...]
    images: RowImages | None = None

    @property
    def pictured(self) -> bool:
        """Whether a turn of it has an image."""
        return any(message.images for message in self.messages)


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
    try:
        return tokenizer.apply_chat_template(
            template_messages(tokenizer, messages), tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except Exception as error:  # a template may raise anything
        raise RowRejected("template_refused", f"the chat template refused the conversation: {error}") from error


def template_messages(tokenizer, messages) -> list[dict]:
    """Messages as the chat template takes them.

    A turn with images is a list of parts. So is every turn under a template that renders lists only, as those of
    LLaVA and SmolVLM do: they leave a plain text out without a word. Which kind a template is, one rendering tells.
    """
    lists = _takes_lists_only(tokenizer)
    return [{"role": message.role, "content": _content(message, lists)} for message in messages]


def _content(message: Message, lists: bool):
    if not message.parts and not lists:
        return message.content
    return [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
        for part in message.parts or (message.content,)
    ]


def _takes_lists_only(tokenizer) -> bool:
    """Whether the template drops texts that do not stand in a list of parts."""
    template = tokenizer.get_chat_template()
    if template not in _TAKES_LISTS:
        _TAKES_LISTS[template] = "type" in template and not _renders(tokenizer, _TEXT_PROBE) and _renders(
            tokenizer, [{"type": "text", "text": _TEXT_PROBE}]
        )  # fmt: skip
    return _TAKES_LISTS[template]


def _renders(tokenizer, content) -> bool:
    """Whether the probe comes out of a user's turn with this content."""
    try:
        text = tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    except Exception:  # a template may raise anything
        return False
    return _TEXT_PROBE in text


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
    """The text of the server for one answer: generation prompt, then what the target wrote, then the tail."""
    messages = conversation.messages
    message, where = messages[turn], f"{conversation.place}, turn {turn}"
    prompt = render_text(tokenizer, messages[:turn], add_generation_prompt=True)
    whole = render_text(tokenizer, messages[: turn + 1], add_generation_prompt=False)
    tail = _tail(tokenizer, messages[:turn], message.content)
    if not whole.endswith(tail):
        raise RowRejected("template_unstable", f"{where}: the template ends this answer unlike others")
    answer = _answer(prompt, whole[: len(whole) - len(tail)], message.content, where)
    start = len(prompt) + len(_supplied(answer, message.content))
    body_end = len(prompt) + len(answer)
    span = AnswerSpan(start, body_end, body_end + len(tail), turn, message.finish_reason == "length")
    return RenderedRow(conversation.id, prompt + answer + tail, [span], messages[: turn + 1])


def _answer(prompt: str, whole: str, content: str, where: str) -> str:
    """What stands behind ``prompt`` when the target has written ``content``; ``whole`` is the rendering without tail.

    Usually ``whole`` begins with ``prompt``, and the answer is the rest. Two liberties of templates are followed: text
    supplied with the generation prompt may be missing from finished turns (the answer then begins at its content,
    provided that all before it is a beginning of ``prompt``), and finished turns may lose their beginning (reasoning),
    which the target did write.
    """
    common = len(os.path.commonprefix([prompt, whole]))
    supplied, written = prompt[common:], content.strip()
    start = common
    if supplied:
        found = max(whole.rfind(text, 0, common + len(text)) for text in (content, written))
        start = found if found >= 0 else common
    rendered = whole[start:]
    if supplied and found < 0 and not _shortened(rendered, written):
        raise RowRejected(
            "template_unstable",
            f"{where}: the rendered answer does not follow the generation prompt "
            f"(they part after {prompt[max(0, common - 20) : common]!r}); no boundary can be trusted",
        )
    if _shortened(rendered, written):
        return written.removeprefix(supplied.strip()).lstrip("\n") if supplied.strip() else written
    return rendered


def _shortened(rendered: str, written: str) -> bool:
    """Whether the template left out the beginning of what the target wrote."""
    kept = rendered.strip()
    return bool(kept) and kept != written and written.endswith(kept)


def _supplied(answer: str, content: str) -> str:
    """The text between generation prompt and content that the template adds to finished turns: empty think tags.

    The target did not write it. White space alone belongs to the answer: it is part of its first token.
    """
    written, answer = content.strip(), answer.rstrip()
    head = answer[: len(answer) - len(written)] if written and answer.endswith(written) else ""
    return head if head.strip() else ""


def _tail(tokenizer, before: tuple[Message, ...], content: str) -> str:
    """What the template adds behind this answer: the common end of its renderings with either probe added."""
    first, second = (
        render_text(tokenizer, (*before, Message("assistant", content + probe)), add_generation_prompt=False)
        for probe in _PROBES
    )
    return os.path.commonprefix([first[::-1], second[::-1]])[::-1]
