"""Where the answers stand in what the target's own chat template makes of a conversation.

No template family is known here. A server renders the turns so far with the generation prompt, and the target
continues that text; so an answer begins where the rendering *with the generation prompt* ends, and whatever the
generation prompt supplies (a role header, an empty pair of think tags) is context. So is an empty pair of tags that the
template adds between the prompt and the content; other text there (the header of a channel) the target writes itself.
Where an answer ends is found by rendering it with two different characters added: what the two texts have in common at
the end is what the template adds behind an answer, its *tail*.

What cannot be shown to be the target's own words is refused: a template that changes them, an answer that does not
follow the prompt, reasoning that the template has no place for.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace

from modelopt_eagle.data.conversations import Conversation
from modelopt_eagle.data.images import RowImages
from modelopt_eagle.data.reasoning import is_empty_pair, open_tag, reasoning_end
from modelopt_eagle.data.report import RowRejected
from modelopt_eagle.data.roles import Message
from modelopt_eagle.data.special import SpecialTokens
from modelopt_eagle.data.template import mending_argument, render_text, renders_tools

_PROBES = ("A", "9")
_ASKS_ON = Message("user", "and then?")


@dataclass(frozen=True)
class AnswerSpan:
    """Character positions of one answer in a rendered text.

    Attributes:
        start: where the prompt ends and the answer begins.
        body_end: where the answer ends and the template's tail begins.
        tail_end: where the tail ends.
        turn: index of the message.
        cut: the answer was cut before the target ended it.
        unlearned: parts of the answer that are context by choice (reasoning, tool calls), as ``(start, end)``.
        ids: the token ids that were written for it, end token included, if they are known.
    """

    start: int
    body_end: int
    tail_end: int
    turn: int
    cut: bool
    unlearned: tuple[tuple[int, int], ...] = ()
    ids: tuple[int, ...] | None = None


@dataclass
class RenderedRow:
    """One text as the target would see it, and the answers in it to learn from; ``images`` once they are expanded."""

    id: str
    text: str
    spans: list[AnswerSpan]
    messages: tuple[Message, ...]
    conversation: Conversation
    images: RowImages | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def pictured(self) -> bool:
        """Whether a turn of it has an image."""
        return any(message.images for message in self.messages)


@dataclass(frozen=True)
class Supervision:
    """Which parts of an answer are learned; see the ``data`` section of the recipe."""

    reasoning: bool = True
    tool_calls: bool = True


def render_conversation(
    tokenizer, conversation: Conversation, special: SpecialTokens, supervision: Supervision = Supervision()
) -> list[RenderedRow]:
    """Render one conversation: answers whose texts only ever grow share a row, each other one has its own, as served.

    An answer that cannot be used leaves the others in place; it is named in ``RenderedRow.notes``.

    Returns:
        a text for each row, with the spans of its answers.

    Raises:
        RowRejected: no answer of it can be used; the reason is that of the first.
    """
    if conversation.text is not None:
        text, spans = conversation.text
        answers = [AnswerSpan(*span, turn, False) for turn, span in enumerate(spans)]
        return [RenderedRow(conversation.id, text, answers, (), conversation)]
    rows: list[RenderedRow] = []
    errors: list[RowRejected] = []
    for turn in conversation.learned:
        try:
            row = _Answer(tokenizer, conversation, turn, special, supervision).served()
        except RowRejected as error:
            errors.append(error)
            continue
        if rows and row.text.startswith(rows[-1].text):
            row.spans = rows[-1].spans + row.spans
            row.notes = rows[-1].notes + row.notes
            rows[-1] = row
        else:
            rows.append(row)
    if not rows:
        raise errors[0]
    rows[0].notes += [f"answers_left_out_{error.reason}" for error in errors]
    return rows


def serve_answer(tokenizer, conversation: Conversation, turn: int, special: SpecialTokens) -> RenderedRow:
    """One answer as it is served.

    Raises:
        RowRejected: it cannot be shown that the target wrote it there, see the module.
    """
    return _Answer(tokenizer, conversation, turn, special, Supervision()).served()


class _Answer:
    """One answer of a conversation, being found in its rendering."""

    def __init__(self, tokenizer, conversation, turn: int, special: SpecialTokens, supervision: Supervision):
        self.tokenizer, self.conversation, self.special = tokenizer, conversation, special
        self.supervision, self.turn = supervision, turn
        self.message: Message = conversation.messages[turn]
        self.before: tuple[Message, ...] = conversation.messages[:turn]
        self.where = f"{conversation.place}, turn {turn}"
        self.notes: list[str] = []

    def render(self, messages, generation: bool = False, tools=None) -> str:
        conversation = self.conversation
        tools = conversation.tools if tools is None else tools
        return render_text(self.tokenizer, messages, generation, tools, conversation.template_arguments)

    def served(self) -> RenderedRow:
        """The text of the server for this answer: generation prompt, then what the target wrote, then the tail.

        Raises:
            RowRejected: ``template_refused``, ``template_unstable``, ``words_changed``, ``reasoning_missing``,
                ``separate_reasoning``, ``tool_role``, ``written_ids_differ``.
        """
        prompt = self.render(self.before, generation=True)
        self._check_tools(prompt)
        whole = self.render((*self.before, self.message))
        tail = self._tail(whole)
        answer = self._answer(prompt, whole[: len(whole) - len(tail)])
        content_at = self._content_at(answer)
        self._check_words(prompt, answer, content_at)
        if self.message.token_ids is not None:
            self._check_written(answer, list(self.message.token_ids))
            return self._row(prompt, answer, "", 0, content_at)
        supplied = self._supplied(prompt, answer, tail, content_at)
        if self.message.cut and not self.message.content.strip() and not self.message.tool_calls:
            answer, tail = answer[: self._reasoning_end(answer)], ""  # what closes the reasoning was not written
        elif not tail:
            tail = self._stop_of_next_role(whole)
        return self._row(prompt, answer, tail, supplied, content_at)

    def _row(self, prompt: str, answer: str, tail: str, supplied: int, content_at: int) -> RenderedRow:
        start, body_end = len(prompt) + supplied, len(prompt) + len(answer)
        span = AnswerSpan(
            start, body_end, body_end + len(tail), self.turn, self.message.cut,
            self._unlearned(prompt, answer, tail, content_at), self.message.token_ids,
        )  # fmt: skip
        messages = self.conversation.messages[: self.turn + 1]
        return RenderedRow(
            self.conversation.id, prompt + answer + tail, [span], messages, self.conversation, None, self.notes
        )

    def _answer(self, prompt: str, whole: str) -> str:
        """What stands behind ``prompt`` when the target has written this message; ``whole`` has no tail.

        Usually ``whole`` begins with ``prompt``, and the answer is the rest. Two liberties of templates are followed:
        text supplied with the generation prompt may be missing from finished turns (the answer then begins at its
        content, provided that all before it is a beginning of ``prompt``), and finished turns may lose their
        beginning (reasoning), which the target did write.
        """
        content, written = self.message.content, self.message.content.strip()
        common = len(os.path.commonprefix([prompt, whole]))
        kept = whole[common:].strip()
        if kept and kept != written and written.endswith(kept) and not self.message.tool_calls:
            trailing = content[len(content.rstrip()) :]
            return self._without_repeated_tag(prompt, content if whole.endswith(trailing) else content.rstrip())
        if common == len(prompt):
            return self._without_repeated_tag(prompt, whole[common:])
        for text in (content, written):
            if text and whole.endswith(text) and len(whole) - len(text) <= common:
                return self._without_repeated_tag(prompt, text)
        if not prompt[common:].strip():
            self.notes.append("white_space_changed_by_the_template")
            return self._without_repeated_tag(prompt, whole[common:])
        raise RowRejected(
            "template_unstable",
            f"{self.where}: the rendered answer does not follow the generation prompt "
            f"(they part after {prompt[max(0, common - 20) : common]!r}); no boundary can be trusted",
        )

    @staticmethod
    def _without_repeated_tag(prompt: str, answer: str) -> str:
        """The answer without the opening tag that the prompt has supplied already, and the white space they share."""
        opened = open_tag(prompt)
        if opened is None or not answer.lstrip().startswith(opened[0]):
            return answer
        rest = answer.lstrip()[len(opened[0]) :]
        spaces = prompt[len(prompt.rstrip()) :]
        return rest[len(os.path.commonprefix([spaces, rest])) :]

    def _content_at(self, answer: str) -> int:
        """Where the message's content begins in the answer; -1 if it is not there as it is."""
        content = self.message.content
        for text in (content, content.rstrip(), content.lstrip(), content.strip()):
            if not text:
                continue
            if answer.endswith(text):
                return len(answer) - len(text)
            if self.message.tool_calls and text in answer:
                return answer.index(text)
        return -1 if content.strip() else len(answer)

    def _check_words(self, prompt: str, answer: str, content_at: int) -> None:
        """Refuse a template that changes what the assistant wrote; white space may change, and is noted."""
        message = self.message
        if message.reasoning is not None and _squeezed(message.reasoning) not in _squeezed(answer):
            raise RowRejected(
                "separate_reasoning",
                f"{self.where}: the chat template has no place for reasoning in a field of its own: put it into the "
                "content, as the target writes it, or let the target answer (scripts/synthesize_answers.py)",
            )
        if content_at >= 0:
            return
        opened, wanted = open_tag(prompt), _squeezed(message.content)
        # the prompt may have supplied the beginning of the content
        if _squeezed(answer).endswith(wanted) or (opened and _squeezed(opened[0] + answer).endswith(wanted)):
            if not message.content.strip().endswith(answer.strip()):
                self.notes.append("white_space_changed_by_the_template")
            return
        raise RowRejected(
            "words_changed",
            f"{self.where}: the chat template renders the answer {message.content.strip()[:40]!r} as "
            f"{answer.strip()[:40]!r}, which the target did not write",
        )

    def _supplied(self, prompt: str, answer: str, tail: str, content_at: int) -> int:
        """Characters at the answer's beginning that the template adds and the target does not write."""
        if self.message.reasoning is not None:
            return 0
        opened = open_tag(prompt)
        if opened is not None and not self.message.cut and self._opens_reasoning(opened, tail):
            written, closed, _ = answer.partition(opened[1])
            if not closed or not written.strip():
                self._refuse_missing_reasoning(opened[0])
        head = answer[: max(content_at, 0)]
        if not is_empty_pair(head):
            return 0
        self.notes.append("empty_reasoning_as_context")
        return len(head)

    def _opens_reasoning(self, opened: tuple[str, str], tail: str) -> bool:
        named = re.search("think|reason|thought", opened[0], re.IGNORECASE) is not None
        return named or (opened[1] in self.tokenizer.get_chat_template() and opened[1] not in tail)

    def _reasoning_end(self, answer: str) -> int:
        """Where the message's reasoning ends in the answer."""
        reasoning = (self.message.reasoning or "").strip()
        return answer.find(reasoning) + len(reasoning) if reasoning in answer else len(answer)

    def _refuse_missing_reasoning(self, tag: str) -> None:
        def render(more):
            conversation = self.conversation
            arguments = {**conversation.template_arguments, **more}
            return render_text(self.tokenizer, self.before, True, conversation.tools, arguments)

        mend = mending_argument(self.tokenizer, render, lambda text: not text.rstrip().endswith(tag))
        raise RowRejected(
            "reasoning_missing",
            f"{self.where}: the generation prompt begins reasoning with {tag!r} and the answer has none, so the target "
            f"would not have written it there{mend or '; let the target answer (scripts/synthesize_answers.py)'}",
        )

    def _unlearned(self, prompt: str, answer: str, tail: str, content_at: int) -> tuple[tuple[int, int], ...]:
        parts, message, content = [], self.message, self.message.content.strip()
        if not self.supervision.reasoning:
            if message.reasoning is None:
                end = reasoning_end(prompt, answer)
            else:
                end = content_at if content and content_at >= 0 else self._reasoning_end(answer)
            parts += [(len(prompt), len(prompt) + end)] if end else []
        if message.tool_calls and not self.supervision.tool_calls:
            begin = content_at + len(content) if content else 0
            if not content and message.reasoning is not None:
                begin = self._reasoning_end(answer)
            parts.append((len(prompt) + begin, len(prompt) + len(answer) + len(tail)))  # and its end of turn
        return tuple(parts)

    def _tail(self, whole: str) -> str:
        """What the template adds behind this answer: the common end of its renderings with either probe added."""
        plain = replace(self.message, tool_calls=()) if self.message.tool_calls else self.message
        first, second = (
            self.render((*self.before, replace(plain, content=plain.content + probe, parts=()))) for probe in _PROBES
        )
        if first == second:
            raise RowRejected(
                "words_changed",
                f"{self.where}: the chat template leaves out the end of {plain.content.strip()[:40]!r}, so it renders "
                "text which the target did not write",
            )
        tail = os.path.commonprefix([first[::-1], second[::-1]])[::-1]
        if whole.endswith(tail):
            return tail
        if self.message.tool_calls and (last := self.special.last_in(whole)):
            return last
        raise RowRejected("template_unstable", f"{self.where}: the template ends this answer unlike others")

    def _stop_of_next_role(self, whole: str) -> str:
        """The special token of whoever speaks next, where the target stops at it and nothing else ends a turn."""
        if not self.special.ends:
            return ""
        following = self.conversation.messages[self.turn + 1 : self.turn + 2]
        if not following:
            following = (Message("tool", "9"),) if self.message.tool_calls else (_ASKS_ON,)
        try:
            longer = self.render((*self.before, self.message, *following))
        except RowRejected:
            return ""
        return self.special.end_at(longer, len(whole)) if longer.startswith(whole) else ""

    def _check_tools(self, prompt: str) -> None:
        """Refuse tools, calls and results that the template leaves out without a word."""
        conversation = self.conversation
        if conversation.tools and not renders_tools(
            self.tokenizer, conversation.tools, prompt, lambda: self.render(self.before, True, ())
        ):
            raise RowRejected("tool_role", f"{self.where}: the chat template does not render descriptions of tools")
        if not any(message.tool_calls or message.role == "tool" for message in (*self.before, self.message)):
            return
        rendered = _unescaped(prompt)
        for index, message in enumerate(self.before):
            missing = [
                call["function"]["name"] for call in message.tool_calls if call["function"]["name"] not in prompt
            ]
            if message.role == "tool" and _unescaped(message.content) not in rendered:
                missing.append(message.content[:40])
            if missing:
                raise RowRejected(
                    "tool_role", f"{self.where}: the chat template leaves out {missing[0]!r} of turn {index} (tool use)"
                )
        if not self.message.tool_calls:
            return
        whole = self.render((*self.before, self.message))
        for call in self.message.tool_calls:
            values = [str(value) for value in _leaves(call["function"]["arguments"])]
            written = _unescaped(whole[len(os.path.commonprefix([prompt, whole])) :])
            if call["function"]["name"] not in written or not all(_unescaped(value) in written for value in values):
                raise RowRejected("tool_role", f"{self.where}: the chat template does not render calls of tools")

    def _check_written(self, answer: str, ids: list[int]) -> None:
        """Refuse recorded ids that do not read as the rendered answer."""
        if ids[-1] in self.special.ends or (ids[-1] in self.special.special and not self.message.cut):
            ids = ids[:-1]
        text = self.tokenizer.decode(ids, skip_special_tokens=False)
        given, wanted = _squeezed(text).rstrip("\ufffd"), _squeezed(answer).rstrip("\ufffd")
        if given == wanted or (
            self.message.cut and _squeezed(self.message.content or self.message.reasoning or "") in given
        ):
            return
        raise RowRejected(
            "written_ids_differ",
            f"{self.where}: the token ids that were written read {text[:40]!r}, the chat template renders "
            f"{answer[:40]!r}: another tokenizer or template made them",
        )


def _squeezed(text: str) -> str:
    """A text without white space."""
    return "".join(text.split())


def _unescaped(text: str) -> str:
    """A text without white space, quotes and strokes, so that JSON and plain writing of a value compare equal."""
    return re.sub(r"[\s\"'\\]", "", text)


def _leaves(value):
    """The texts and numbers in a JSON value."""
    if isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
        yield value
