"""Token ids of a rendered conversation, and which of them the target writes.

The text is tokenised once, as a whole, and boundaries are found by character offsets:

* a token is supervised iff all of its characters are the target's: the answer and the end-of-turn token;
* a token across the boundary between generation prompt and answer is context, since a server would have split it there;
* the end-of-turn token is the first special token of the template's tail; what follows it (a line break) is not
  supervised. A tail without special tokens is supervised up to its last character that is no white space. An empty tail
  is ended by the next token if that is one of the target's end tokens;
* the end-of-turn of an answer that was cut is not supervised: the target did not write it.

Tokenizers without offsets (Python ones) tokenise the pieces between the boundaries one by one, as a server does.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from modelopt_eagle.data.images import RowImages
from modelopt_eagle.data.report import RowRejected
from modelopt_eagle.data.template import AnswerSpan, RenderedRow, render_text, template_messages


@dataclass
class TokenizedRow:
    """One training row.

    Attributes:
        id: the conversation's, with ``#k`` behind it where the template gave each answer a row of its own.
        category: of the conversation.
        input_ids: ``s`` token ids.
        supervised: ``s`` flags: this token is the target's own, to be predicted from the tokens before it.
        prompt_length: tokens before the first answer.
        images: what the target sees at the placeholders among the ids; ``None`` for a row of text.
    """

    id: str
    category: str
    input_ids: list[int]
    supervised: list[bool]
    prompt_length: int
    images: RowImages | None = None


@dataclass(frozen=True)
class SpecialIds:
    """Ids that can end a turn: all special ones, and those that the target is known to stop at."""

    special: frozenset[int]
    ends: frozenset[int]

    @classmethod
    def of(cls, tokenizer, end_token_ids: Sequence[int] = ()) -> "SpecialIds":
        """The tokenizer's, with further end tokens such as those of the target's generation config."""
        added = {i for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items() if token.special}
        ends = {*end_token_ids} | ({tokenizer.eos_token_id} - {None})
        return cls(frozenset({*tokenizer.all_special_ids, *added, *ends}), frozenset(ends))


def encode_rows(
    tokenizer, rows: Sequence[RenderedRow], special: SpecialIds, supervise_cut_ends: bool = False
) -> tuple[list[tuple[list[int], list[bool]]], Counter]:
    """Ids and supervised flags of each row, and notes to count (``boundary_tokens_as_context``)."""
    notes: Counter = Counter()
    encoded = _encode_whole(tokenizer, rows) if tokenizer.is_fast else [_encode_pieces(tokenizer, row) for row in rows]
    result = []
    for row, (ids, offsets, prefixes) in zip(rows, encoded, strict=True):
        flags = [False] * len(ids)
        starts = [start for start, _ in offsets]
        for span, prefix in zip(row.spans, prefixes, strict=True):
            first = bisect_left(starts, span.start)
            if prefix is not None and ids[: len(prefix)] != prefix:
                notes["boundary_tokens_as_context"] += 1
                if first and offsets[first - 1][1] <= span.start:  # offsets that leave out white space hide the overlap
                    first += 1
            ends_open = span.cut and not supervise_cut_ends
            tail = range(bisect_left(starts, span.body_end), bisect_left(starts, span.tail_end))
            end = span.body_end if ends_open else _turn_end(row.text, span, tail, ids, offsets, special)
            after = bisect_left(starts, end)
            for i in range(first, after):
                flags[i] = offsets[i][1] <= end
            if span.body_end == span.tail_end and not ends_open and after < len(ids) and ids[after] in special.ends:
                flags[after] = True
        result.append((ids, flags))
    return result, notes


def _turn_end(text: str, span: AnswerSpan, tail: range, ids, offsets, special: SpecialIds) -> int:
    """The character behind the end-of-turn token, searched among the tokens of the tail."""
    for i in tail:
        if ids[i] in special.special:
            return offsets[i][1]
    return span.body_end + len(text[span.body_end : span.tail_end].rstrip())


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


def _encode_pieces(tokenizer, row: RenderedRow):
    """The same for a tokenizer without offsets: a token's offsets are those of its piece, and exact in tails."""
    ids: list[int] = []
    offsets: list[tuple[int, int]] = []
    cuts = [0, *(cut for span in row.spans for cut in (span.start, span.body_end, span.tail_end)), len(row.text)]
    for number, (start, end) in enumerate(zip(cuts, cuts[1:], strict=False)):
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

    Raises:
        RowRejected: ``generation_tags_disagree``.
    """
    output = tokenizer.apply_chat_template(
        template_messages(tokenizer, row.messages),
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    if output["input_ids"] != ids:
        return flags  # the generation prompt supplies text that finished turns lack: the tags describe another text
    tagged = [bool(mark) for mark in output["assistant_masks"]]
    offsets = tokenizer(row.text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    allowed = []
    for span in row.spans:
        before = render_text(tokenizer, row.messages[: span.turn], add_generation_prompt=False)
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
    for mark, (start, end) in zip(tagged, offsets, strict=True):
        if mark and not any(low <= start and end <= high for low, high in allowed):
            raise RowRejected(
                "generation_tags_disagree",
                f"{place}: the template's generation tags mark {row.text[start:end]!r}, which is no part of an answer",
            )
    return flags
