"""Conversations to token rows with their supervised flags: the data set that training and vocabulary read."""

import contextlib
import itertools
import warnings
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

from modelopt_eagle.common.interrupts import uninterrupted
from modelopt_eagle.data.conversations import Conversation, ConversationSet, ConversationStream
from modelopt_eagle.data.encode import (
    TokenizedRow,
    apply_generation_tags,
    encode_pictured,
    encode_rows,
    uses_generation_tags,
)
from modelopt_eagle.data.files import SHIPPED, read_rows, rows_in_memory
from modelopt_eagle.data.images import expand_images
from modelopt_eagle.data.packed import PackedRows, RowPacker
from modelopt_eagle.data.report import DataReport, RowRejected
from modelopt_eagle.data.served import RenderedRow, Supervision, render_conversation
from modelopt_eagle.data.special import SpecialTokens
from modelopt_eagle.errors import DataError
from modelopt_eagle.target.identity import template_hash

_CHUNK = 128  # conversations tokenised in one call
_AHEAD = 4  # calls that wait for each other process that tokenises
_HELD = 16  # calls a process, done or not, that are held in memory for the sake of order


@dataclass
class TokenizedDataset:
    """Rows, the account of how they came to be, and the hash of the template that rendered them."""

    rows: PackedRows
    report: DataReport
    template_hash: str

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return self.rows.lengths

    def header(self) -> str:
        """What to print at the head of a run."""
        return self.report.header()

    def preview(self, tokenizer, row: int = 0) -> str:
        """One row as text, the supervised parts between ``⟦`` and ``⟧``; for a look at what is learned."""
        item, parts = self.rows[row], []
        tokens = zip(item.input_ids, item.supervised, strict=True)
        for supervised, run in itertools.groupby(tokens, key=lambda pair: bool(pair[1])):
            text = tokenizer.decode([token for token, _ in run])
            parts.append(f"⟦{text}⟧" if supervised else text)
        return "".join(parts)


@dataclass(frozen=True)
class _Options:
    max_length: int | None
    overlong: str
    end_token_ids: tuple[int, ...]
    supervise_cut_ends: bool
    vision: object | None
    supervision: Supervision


def render(tokenizer, conversation: Conversation, **options) -> list[TokenizedRow]:
    """Tokenise one conversation; several rows if the template rewrites history (:mod:`modelopt_eagle.data.template`).

    Args:
        options: those of :func:`tokenize_conversations`.

    Returns:
        a row, or several.

    Raises:
        DataError: the conversation was dropped; the message says why.
    """
    return list(tokenize_conversations(tokenizer, [conversation], **options).rows)


def tokenize_conversations(
    tokenizer,
    conversations: ConversationSet | ConversationStream | Sequence[Conversation],
    *,
    max_length: int | None = None,
    target_window: int | None = None,
    overlong: str = "truncate",
    end_token_ids: Sequence[int] = (),
    supervise_cut_ends: bool = False,
    supervise_reasoning: bool = True,
    supervise_tool_calls: bool = True,
    workers: int = 1,
    vision=None,
    folder: Path | None = None,
) -> TokenizedDataset:
    """Render, tokenise and mark every conversation.

    Args:
        tokenizer: the target's, with its chat template.
        conversations: what :func:`read_conversations` returned, or a stream, of which a few hundred conversations
            are held at a time; the report is continued.
        max_length: training window in tokens; None: no limit.
        target_window: positions that the target has; a longer window is set to it, and the header says so.
        overlong: ``"truncate"`` cuts a longer row at its end, ``"drop"`` leaves it out; both are counted.
        end_token_ids: what the target stops at besides the tokenizer's own special tokens (its generation config).
        supervise_cut_ends: also learn the end-of-turn token that a template puts behind answers with
            ``finish_reason: length``, although the target did not write it.
        supervise_reasoning: learn the reasoning in front of an answer; False makes it context.
        supervise_tool_calls: learn the calls of tools; False makes them context.
        workers: processes that render, this one among them.
        vision: ``Target.vision``, which reads the images of conversations; without it those with images are dropped.
        folder: where the tokens are kept, see :class:`~modelopt_eagle.data.packed.RowPacker`; ``None``: in memory.

    Raises:
        DataError: no supervised token at all, a bad option, a folder that cannot be written, or a tokenizer without
            chat template.
        TargetError: conversations with images, and a target whose processor cannot be loaded.
    """
    if overlong not in ("truncate", "drop"):
        raise DataError(f"overlong must be truncate or drop, found {overlong!r}")
    if max_length is not None and max_length < 2:
        raise DataError(f"max_length must be at least 2 tokens, found {max_length}")
    if workers < 1:
        raise DataError(f"workers must be at least 1, found {workers}")
    if isinstance(conversations, ConversationSet):
        items, source = iter(conversations.rows), conversations.report
    elif isinstance(conversations, ConversationStream):
        items, source = iter(conversations), conversations.report
    else:
        items, source = iter(conversations), DataReport(read=len(conversations))
    limited = target_window is not None and (max_length is None or max_length > target_window)
    max_length = target_window if limited else max_length
    supervision = Supervision(supervise_reasoning, supervise_tool_calls)
    options = _Options(max_length, overlong, tuple(end_token_ids), supervise_cut_ends, vision, supervision)
    chunks = iter(lambda: list(itertools.islice(items, _CHUNK)), [])
    packer, made = RowPacker(folder), DataReport()
    with contextlib.closing(packer):
        for part, partial in _map(tokenizer, chunks, options, workers):
            for row in part:
                packer.add(row)
            _add(made, partial)
    rows = packer.finish()
    report = _continued(source, max_length, target_window if limited else None)  # a stream has now counted its rows
    _add(report, made)
    report.check_complete()
    if not report.supervised:
        reasons = report.reasons() or "the answers are empty"
        raise DataError(f"no supervised token in {report.read} conversations, there is nothing to train on: {reasons}")
    if report.supervised == report.tokens:
        warnings.warn(
            "every token of the data is supervised; on chat data the user's turns must not be: check the chat template",
            stacklevel=2,
        )
    return TokenizedDataset(rows, report, template_hash(tokenizer))


def prepare_dataset(
    tokenizer,
    sources: str | Path | Sequence[str | Path],
    *,
    unknown_role: str = "fail",
    role_aliases: Mapping[str, str] | None = None,
    max_rows: int | None = None,
    columns: Mapping[str, str] | None = None,
    text_boundary: str | Sequence[str] | None = None,
    **options,
) -> TokenizedDataset:
    """:func:`tokenize_conversations` with ``options`` of what :func:`read_conversations` reads, a part at a time."""
    rows = read_rows(sources, SHIPPED)
    found = ConversationStream(rows, unknown_role, role_aliases, max_rows, columns, text_boundary)
    return tokenize_conversations(tokenizer, found, **options)


def prepare_rows(
    tokenizer,
    rows: Iterable[Mapping | Sequence[Mapping]],
    *,
    name: str = "rows",
    unknown_role: str = "fail",
    role_aliases: Mapping[str, str] | None = None,
    max_rows: int | None = None,
    columns: Mapping[str, str] | None = None,
    text_boundary: str | Sequence[str] | None = None,
    **options,
) -> TokenizedDataset:
    """:func:`prepare_dataset` for rows in memory: see :func:`~modelopt_eagle.data.files.rows_in_memory`."""
    found = ConversationStream(rows_in_memory(rows, name), unknown_role, role_aliases, max_rows, columns, text_boundary)
    return tokenize_conversations(tokenizer, found, **options)


def _map(tokenizer, chunks: Iterator[list[Conversation]], options: _Options, workers: int):
    """What :func:`_tokenize_chunk` makes of each chunk, in order, by this process and ``workers - 1`` others.

    This process reads, and tokenises what the others have no hands for: the first chunks while they start (seconds).
    """
    first = list(itertools.islice(chunks, 2))
    if workers == 1 or len(first) < 2:
        yield from (_tokenize_chunk(tokenizer, chunk, options) for chunk in itertools.chain(first, chunks))
        return
    # spawned, not forked: the caller may hold threads and devices; the tokenizer is sent once a process
    pool = ProcessPoolExecutor(
        workers - 1, mp_context=get_context("spawn"), initializer=_begin_worker, initargs=(tokenizer, options)
    )
    strangers = set(active_children())
    begun: deque[Future] = deque()
    given: set[Future] = set()  # to the other processes, and not known to be done
    try:
        for chunk in itertools.chain(first, chunks):
            given = {future for future in given if not future.done()}
            if len(given) < _AHEAD * (workers - 1):
                with uninterrupted():  # a process that starts has no answer to Ctrl-C yet: this one stops it
                    begun.append(pool.submit(_work, chunk))
                given.add(begun[-1])
            else:
                begun.append(Future())
                begun[-1].set_result(_tokenize_chunk(tokenizer, chunk, options))
            while begun and (begun[0].done() or len(begun) >= _HELD * workers):
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(
            "a process that tokenises was killed, perhaps for want of memory: set data.workers to fewer"
        ) from error
    except BaseException:
        for process in set(active_children()) - strangers:  # nobody waits for what they still do
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


_WORKER: dict[str, Any] = {}  # tokenizer and options of a process that tokenises


def _begin_worker(tokenizer, options: _Options) -> None:
    _WORKER.update(tokenizer=tokenizer, options=options)


def _work(chunk: Sequence[Conversation]):
    return _tokenize_chunk(_WORKER["tokenizer"], chunk, _WORKER["options"])


def _tokenize_chunk(tokenizer, conversations: Sequence[Conversation], options: _Options):
    """Rows of some conversations, and the counts they add to the report."""
    report = DataReport(max_length=options.max_length)
    special = SpecialTokens.of(tokenizer, options.end_token_ids)
    rendered: list[list[RenderedRow]] = []
    for conversation in conversations:
        try:
            if options.vision is None and any(message.images for message in conversation.messages):
                raise RowRejected(
                    "image_without_processor",
                    "the row has images, and the target reads none, or its features come from an engine or a server",
                )
            if conversation.tokens is None:
                rendered.append(render_conversation(tokenizer, conversation, special, options.supervision))
            else:
                rendered.append([RenderedRow(conversation.id, "", [], (), conversation)])
        except RowRejected as error:
            _drop(report, error, conversation)
    plain = [row for texts in rendered for row in texts if not _made_otherwise(row)]
    encoded = iter(encode_rows(tokenizer, plain, special, report, options.supervise_cut_ends))
    rows = []
    for texts in rendered:
        pieces = [(text, piece) for text in texts for piece in ([None] if _made_otherwise(text) else next(encoded))]
        report.fanned_out += len(pieces) - 1
        for number, (text, piece) in enumerate(pieces):
            name = text.id if len(pieces) == 1 else f"{text.id}#{number}"
            try:
                rows.append(_row(tokenizer, text, piece, name, special, options, report))
            except RowRejected as error:
                _drop(report, error, text.conversation)
    return rows, report


def _made_otherwise(row: RenderedRow) -> bool:
    """Whether its ids do not come from its text alone."""
    return row.pictured or row.conversation.tokens is not None


def _drop(report: DataReport, error: RowRejected, conversation: Conversation) -> None:
    """Count a row as left out; its place is put before what the rejection says."""
    place = conversation.place or conversation.id
    report.drop(error.reason, str(error) if place in str(error) else f"{place}: {error}")


def _row(tokenizer, text: RenderedRow, piece, name: str, special: SpecialTokens, options: _Options, report: DataReport):
    """One row of the data set, counted.

    Raises:
        RowRejected: it cannot be used.
    """
    conversation = text.conversation
    if isinstance(piece, RowRejected):
        raise piece
    images = None
    if conversation.tokens is not None:
        ids, flags = list(conversation.tokens[0]), list(conversation.tokens[1])
        if max(ids) >= len(tokenizer):
            raise RowRejected(
                "malformed_message", f"id {max(ids)}, the tokenizer has {len(tokenizer)}: is it another one?"
            )
    elif text.pictured:
        ids, flags, images = _encode_with_images(tokenizer, text, special, options, report)
    else:
        ids, flags = piece
        if text.messages and uses_generation_tags(tokenizer) and tokenizer.is_fast:
            flags = apply_generation_tags(tokenizer, text, ids, flags, conversation.place)
    row = TokenizedRow(name, conversation.category, ids, flags, 0, images, dict(conversation.template_arguments))
    row = _fit(row, options, report, conversation.place)
    if name == text.id or name.endswith("#0"):
        for note in text.notes:
            report.note(note)
        report.notes["cut_answers"] += sum(message.cut for message in conversation.messages)
    report.rows += 1
    report.tokens += len(row.input_ids)
    report.supervised += sum(row.supervised)
    report.notes += Counter()  # forget the zeros
    return row


def _encode_with_images(tokenizer, row: RenderedRow, special: SpecialTokens, options: _Options, report: DataReport):
    """Ids, flags and images of one rendered row."""
    place, cut_ends = row.conversation.place, options.supervise_cut_ends
    expanded, wanted = expand_images(row, options.vision)
    ids, flags = encode_pictured(tokenizer, expanded, special, report, cut_ends)
    if ids != wanted:
        raise RowRejected(
            "image_refused", "the target's processor gives other token ids than its tokenizer for this text"
        )
    if uses_generation_tags(tokenizer) and tokenizer.is_fast:
        # the tags are read from the row as rendered; answers hold no placeholder, so its supervised tokens are the same
        short, before = encode_pictured(tokenizer, row, special, DataReport(), cut_ends)
        after = apply_generation_tags(tokenizer, row, short, list(before), place)
        marks = iter([mark for mark, flag in zip(after, before, strict=True) if flag])
        flags = [flag and next(marks) for flag in flags]
    return ids, flags, expanded.images


def _fit(row: TokenizedRow, options: _Options, report: DataReport, place: str) -> TokenizedRow:
    length, window = len(row.input_ids), options.max_length
    if window is not None and length > window:
        cut = length if options.overlong == "drop" else length - window
        report.tokens_cut += cut
        if options.overlong == "drop":
            raise RowRejected("too_long", f"{place}: {length} tokens, the window has {window}")
        if row.images is not None and window < row.images.end:
            raise RowRejected(
                "image_past_window", f"{place}: its last image ends at {row.images.end} tokens, the window has {window}"
            )
        row = replace(row, input_ids=row.input_ids[:window], supervised=row.supervised[:window])
    if True not in row.supervised:
        if length > len(row.input_ids):
            raise RowRejected("prompt_fills_window", f"{place}: no answer begins within {window} of {length} tokens")
        raise RowRejected("no_supervised_token", f"{place}: no token lies wholly within an answer")
    report.truncated += length > len(row.input_ids)
    return replace(row, prompt_length=row.supervised.index(True))


def _continued(report: DataReport, max_length: int | None, target_window: int | None) -> DataReport:
    return DataReport(
        read=report.read,
        dropped=report.dropped.copy(),
        examples=dict(report.examples),
        notes=report.notes.copy(),
        max_length=max_length,
        target_window=target_window,
    )


def _add(report: DataReport, part: DataReport) -> None:
    report.dropped += part.dropped
    report.notes += part.notes
    for reason, example in part.examples.items():
        report.examples.setdefault(reason, example)
    for name in ("rows", "fanned_out", "tokens", "supervised", "truncated", "tokens_cut"):
        setattr(report, name, getattr(report, name) + getattr(part, name))
