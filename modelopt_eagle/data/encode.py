"""Token ids of a rendered conversation, and which of them the target writes.

What is trained is what the target was served and wrote: the ids of the prompt as a server makes them, and behind them
the ids of the answer. Usually both are what the whole text is tokenised to; the text is then tokenised once, and
boundaries are found by character offsets. Where a token of the whole text lies across the boundary (two line breaks
that are one token, and three), or the written ids are known and others, the answer gets a row of its own: prompt ids,
then the answer's.

* a token is supervised iff all of its characters are the target's: the answer and the end-of-turn token;
* the end-of-turn token is the first special token of the template's tail; what follows it (a line break) is not
  supervised. A tail without special tokens is supervised up to its last character that is no white space. An empty tail
  is ended by the next token if that is one of the target's end tokens;
* the end-of-turn of an answer that was cut is not supervised: the target did not write it.

Tokenizers without offsets (Python ones) tokenise the pieces between the boundaries one by one, as a server does.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from modelopt_eagle.data.images import RowImages
from modelopt_eagle.data.report import DataReport, RowRejected
from modelopt_eagle.data.served import AnswerSpan, RenderedRow
from modelopt_eagle.data.special import SpecialTokens
from modelopt_eagle.data.template import render_text, template_messages
from modelopt_eagle.target.chat import chat_settings


@dataclass
class TokenizedRow:
    """One training row.

    Attributes:
        id: the conversation's, with ``#k`` behind it where the conversation makes several rows.
        category: of the conversation.
        input_ids: ``s`` token ids.
        supervised: ``s`` flags: this token is the target's own, to be predicted from the tokens before it.
        prompt_length: tokens before the first answer.
        images: what the target sees at the placeholders among the ids; ``None`` for a row of text.
        template_arguments: variables of the template that the conversation brought with it.
    """

    id: str
    category: str
    input_ids: list[int]
    supervised: list[bool]
    prompt_length: int
    images: RowImages | None = None
    template_arguments: dict[str, Any] = field(default_factory=dict)


Encoded = tuple[list[int], list[bool]]


def encode_rows(
    tokenizer,
    rows: Sequence[RenderedRow],
    special: SpecialTokens,
    report: DataReport,
    supervise_cut_ends: bool = False,
) -> list[list[Encoded | RowRejected]]:
    """Ids and supervised flags of each rendered row: one pair, or several where its answers need rows of their own.

    Args:
        report: takes notes.

    Returns:
        a list a row; in it a :class:`RowRejected` in the place of an answer that cannot be told from its prompt.
    """
    encoder = _Encoder(tokenizer, special, report, supervise_cut_ends)
    whole = [row for row in rows if tokenizer.is_fast and not any(span.ids for span in row.spans)]
    made = dict(zip(map(id, whole), encoder.whole(whole), strict=True))
    return [made.get(id(row)) or encoder.apart(row) for row in rows]


def encode_pictured(tokenizer, row: RenderedRow, special: SpecialTokens, report: DataReport, cut_ends: bool) -> Encoded:
    """One row whose text is tokenised as a whole, since its ids must be the processor's: a token across the boundary
    between prompt and answer is context, and counted (``boundary_tokens_as_context``)."""
    ((ids, offsets, prefixes),) = _encode_whole(tokenizer, [row]) if tokenizer.is_fast else [_pieces(tokenizer, row)]
    return ids, _Encoder(tokenizer, special, report, cut_ends).flags(row, ids, offsets, prefixes)


class _Encoder:
    def __init__(self, tokenizer, special: SpecialTokens, report: DataReport, supervise_cut_ends: bool):
        self.tokenizer, self.special, self.report = tokenizer, special, report
        self.supervise_cut_ends = supervise_cut_ends

    def whole(self, rows: Sequence[RenderedRow]) -> list[list[Encoded | RowRejected] | None]:
        """Rows tokenised in one piece; those whose prompts are not the beginning of that, apart."""
        result: list[list[Encoded | RowRejected] | None] = []
        for row, (ids, offsets, prefixes) in zip(rows, _encode_whole(self.tokenizer, rows), strict=True):
            if all(ids[: len(prefix)] == prefix for prefix in prefixes):
                result.append([(ids, self.flags(row, ids, offsets, prefixes))])
            else:
                result.append(self.apart(row, prefixes))
        return result

    def flags(self, row: RenderedRow, ids: list[int], offsets, prefixes) -> list[bool]:
        """Supervised flags of a row tokenised as a whole."""
        flags = [False] * len(ids)
        starts = [start for start, _ in offsets]
        for span, prefix in zip(row.spans, prefixes, strict=True):
            if prefix is None:
                first = bisect_left(starts, span.start)
            elif ids[: len(prefix)] == prefix:
                first = len(prefix)
            else:  # only where the row cannot be split, see encode_pictured
                self.report.note("boundary_tokens_as_context")
                first = bisect_left(starts, span.start)
                if first and offsets[first - 1][1] <= span.start:  # offsets without white space hide the overlap
                    first += 1
            self._mark(row, span, ids, offsets, starts, first, flags)
        return flags

    def _mark(self, row: RenderedRow, span: AnswerSpan, ids, offsets, starts, first: int, flags: list[bool]) -> None:
        """Set the flags of one answer, whose first token has the number ``first``."""
        open_end = span.cut and not self.supervise_cut_ends
        tail = range(bisect_left(starts, span.body_end), bisect_left(starts, span.tail_end))
        end = span.body_end if open_end else self._turn_end(row.text, span, tail, ids, offsets)
        if inside := self.special.ends.intersection(ids[first : tail.start]):
            self.report.note(
                "answers_with_an_end_token_inside",
                f"{row.conversation.place}, turn {span.turn}: the target stops at "
                f"{self.tokenizer.decode([min(inside)])!r}, and could not have written what follows",
            )
        after = bisect_left(starts, end)
        for i in range(first, after):
            low, high = offsets[i]
            flags[i] = high <= end and not any(
                low < stop and begin < max(high, low + 1) for begin, stop in span.unlearned
            )
        if span.body_end == span.tail_end and not open_end and after < len(ids) and ids[after] in self.special.ends:
            flags[after] = True

    def _turn_end(self, text: str, span: AnswerSpan, tail: range, ids, offsets) -> int:
        """The character behind the end-of-turn token, searched among the tokens of the tail."""
        for i in tail:
            if ids[i] in self.special.special:
                if self.special.ends and ids[i] not in self.special.ends:
                    self.report.note(
                        "ends_that_the_target_does_not_stop_at",
                        f"the template ends turns with {self.tokenizer.decode([ids[i]])!r} (id {ids[i]}), the target "
                        f"stops at {sorted(self.special.ends)}",
                    )
                return offsets[i][1]
        spelled = text[span.body_end : span.tail_end].rstrip()
        tokens = [str(ids[i]) for i in tail if offsets[i][1] <= span.body_end + len(spelled)]
        if len(tokens) > 1:
            self.report.note(
                "ends_of_turn_that_are_no_single_token",
                f"the template ends turns with {spelled!r}, which this tokenizer spells in {len(tokens)} tokens "
                f"({', '.join(tokens)}): is it the target's own tokenizer?",
            )
        return span.body_end + len(spelled)

    def apart(self, row: RenderedRow, prefixes: Sequence[list[int]] | None = None) -> list[Encoded | RowRejected]:
        """Each answer behind its own prompt's ids; answers share a row while the next prompt's ids go on from it."""
        made: list[Encoded | RowRejected] = []
        for number, span in enumerate(row.spans):
            prefix = prefixes[number] if prefixes else self._ids(row.text[: span.start])
            try:
                ids, flags = self._single(row, span, prefix)
            except RowRejected as error:
                made.append(error)
                continue
            if made and not isinstance(made[-1], RowRejected):
                before, marks = made[-1]
                kept = max((i + 1 for i, mark in enumerate(marks) if mark), default=len(before))
                if prefix[:kept] == before[:kept]:
                    made[-1] = ids, marks[:kept] + flags[kept:]
                    continue
            made.append((ids, flags))
        if (pieces := len(made)) > 1:
            self.report.note("answers_whose_tokens_need_a_row_of_their_own", count=pieces - 1)
        return made

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    def _single(self, row: RenderedRow, span: AnswerSpan, prefix: list[int]) -> Encoded:
        """A prompt's ids and one answer behind them.

        Raises:
            RowRejected: ``boundary_unclear``.
        """
        text = row.text
        cuts = sorted({span.start, span.body_end, span.tail_end, *(c for part in span.unlearned for c in part)})
        cuts = [cut for cut in cuts if span.start <= cut <= span.tail_end]
        ids, offsets = list(prefix), [(0, span.start)] * len(prefix)
        if span.ids is not None:
            ids += span.ids
            offsets += self._offsets_of_written(list(span.ids), span, cuts)
            starts = [start for start, _ in offsets]
            flags = [False] * len(prefix) + [True] * len(span.ids)
            for i in range(len(prefix), len(ids)):
                flags[i] = not any(begin <= starts[i] < stop for begin, stop in span.unlearned)
            return ids, flags
        if self.tokenizer.is_fast:
            ids, offsets = self._behind(prefix, text, span)
        else:
            for low, high in itertools.pairwise(cuts):
                piece = self._continuation(ids, text[:low], text[low:high])
                ids += piece
                offsets += self._tail_offsets(piece, low) if low >= span.body_end else [(low, high)] * len(piece)
        flags = [False] * len(ids)
        self._mark(row, span, ids, offsets, [start for start, _ in offsets], len(prefix), flags)
        return ids, flags

    def _behind(self, prefix: list[int], text: str, span: AnswerSpan) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids and offsets of a prompt and the answer behind it.

        Raises:
            RowRejected: ``boundary_unclear``.
        """
        whole = self.tokenizer(text[: span.tail_end], add_special_tokens=False, return_offsets_mapping=True)
        if whole["input_ids"][: len(prefix)] == prefix:
            return list(whole["input_ids"]), list(whole["offset_mapping"])
        answer = text[span.start : span.tail_end]
        own = self.tokenizer(answer, add_special_tokens=False, return_offsets_mapping=True)
        ids = [*prefix, *own["input_ids"]]
        if self.tokenizer.decode(ids) != self.tokenizer.decode(whole["input_ids"]):
            raise RowRejected("boundary_unclear", f"turn {span.turn}: {_UNCLEAR}")
        moved = [(low + span.start, high + span.start) for low, high in own["offset_mapping"]]
        return ids, [(0, span.start)] * len(prefix) + moved

    def _continuation(self, before: list[int], text: str, more: str) -> list[int]:
        """The ids of a text behind ids that are there: those that the whole is tokenised to, or else its own.

        Raises:
            RowRejected: ``boundary_unclear`` if its own do not read as the text.
        """
        whole = self._ids(text + more)
        if whole[: len(before)] == before:
            return whole[len(before) :]
        piece = self._ids(more)
        if self.tokenizer.decode(before + piece) != self.tokenizer.decode(whole):
            raise RowRejected("boundary_unclear", _UNCLEAR)
        return piece

    def _tail_offsets(self, piece: list[int], start: int) -> list[tuple[int, int]]:
        ends = [start + len(self.tokenizer.decode(piece[: i + 1])) for i in range(len(piece))]
        return list(zip([start, *ends], ends, strict=False))

    def _offsets_of_written(self, ids: list[int], span: AnswerSpan, cuts: list[int]) -> list[tuple[int, int]]:
        """Offsets of written ids, exact at the given cuts alone: where each begins in the text that they decode to."""
        bounds = [0]
        for cut in cuts[1:]:
            low, high = bounds[-1], len(ids)
            while low < high:  # decoding is monotonous in the number of ids
                middle = (low + high) // 2
                if len(self.tokenizer.decode(ids[:middle])) < cut - span.start:
                    low = middle + 1
                else:
                    high = middle
            bounds.append(low)
        offsets = []
        for (low, high), (first, last) in zip(itertools.pairwise(cuts), itertools.pairwise(bounds), strict=True):
            offsets += [(low, high)] * (last - first)
        return offsets + [(span.tail_end, span.tail_end)] * (len(ids) - len(offsets))


_UNCLEAR = (
    "the tokenizer joins the prompt's last characters and the answer's first ones in a way that no target can write"
)


def _encode_whole(tokenizer, rows: Sequence[RenderedRow]):
    """Ids, offsets and the ids of each prompt, all by the tokenizer's own threads."""
    if not rows:
        return []
    texts = [row.text for row in rows]
    prompts = [row.text[: span.start] for row in rows for span in row.spans]
    whole = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
    prefixes = iter(tokenizer(prompts, add_special_tokens=False)["input_ids"])
    return [
        (ids, offsets, [next(prefixes) for _ in row.spans])
        for row, ids, offsets in zip(rows, whole["input_ids"], whole["offset_mapping"], strict=True)
    ]


def _pieces(tokenizer, row: RenderedRow):
    """The same for a tokenizer without offsets: a token's offsets are those of its piece, and exact in tails."""
    ids: list[int] = []
    offsets: list[tuple[int, int]] = []
    cuts = [0, *(cut for span in row.spans for cut in (span.start, span.body_end, span.tail_end)), len(row.text)]
    for number, (start, end) in enumerate(itertools.pairwise(cuts)):
        piece = tokenizer(row.text[start:end], add_special_tokens=False)["input_ids"] if end > start else []
        ids += piece
        if number % 3 == 2:  # a tail
            ends = [start + len(tokenizer.decode(piece[: i + 1])) for i in range(len(piece))]
            offsets += list(zip([start, *ends], ends, strict=False))
        else:
            offsets += [(start, end)] * len(piece)
    return ids, offsets, [None] * len(row.spans)


def uses_generation_tags(tokenizer) -> bool:
    """Whether the template marks the assistant's text itself."""
    if not getattr(tokenizer, "chat_template", None):
        return False
    template = tokenizer.get_chat_template()
    return any(f"{{%{dash} generation" in template for dash in ("", "-"))


def apply_generation_tags(tokenizer, row: RenderedRow, ids: list[int], flags: list[bool], place: str) -> list[bool]:
    """Narrow the flags to what the template's generation tags mark, after a cross-check.

    Inside an answer the tags decide (a template may leave its reasoning out); the end-of-turn token is supervised
    either way. Outside, the tags may mark the assistant's header and what follows the end-of-turn token, nothing else.

    Returns:
        a flag for each id.

    Raises:
        RowRejected: ``generation_tags_disagree``.
    """
    conversation = row.conversation
    arguments = {**chat_settings(tokenizer).arguments, **conversation.template_arguments}
    output = tokenizer.apply_chat_template(
        template_messages(tokenizer, row.messages),
        tools=list(conversation.tools) or None,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
        **arguments,
    )
    if output["input_ids"] != ids:
        return flags  # the generation prompt supplies text that finished turns lack: the tags describe another text
    tagged = [bool(mark) for mark in output["assistant_masks"]]
    offsets = tokenizer(row.text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    allowed = []
    for span in row.spans:
        before = render_text(tokenizer, row.messages[: span.turn], False, conversation.tools, arguments)
        header = len(before) if row.text.startswith(before) else span.start
        # answers that are not learned from here may be tagged, too
        others = any(message.role == "assistant" for message in row.messages[: row.spans[0].turn])
        allowed.append((0 if others and span is row.spans[0] else header, span.tail_end))
        inside = [
            i for i, (start, end) in enumerate(offsets) if flags[i] and span.start <= start and end <= span.body_end
        ]
        if inside and not any(tagged[i] for i in inside):
            raise RowRejected(
                "generation_tags_disagree", f"{place}, turn {span.turn}: its generation tags mark nothing"
            )
        for i in inside:
            flags[i] = tagged[i]
    learned = {span.turn for span in row.spans}
    if any(m.role == "assistant" and i not in learned and i > row.spans[0].turn for i, m in enumerate(row.messages)):
        return flags  # answers between these that are not learned are tagged, too
    for mark, (start, end) in zip(tagged, offsets, strict=True):
        if mark and not any(low <= start and end <= high for low, high in allowed):
            raise RowRejected(
                "generation_tags_disagree",
                f"{place}: the template's generation tags mark {row.text[start:end]!r}, which is no part of an answer",
            )
    return flags
