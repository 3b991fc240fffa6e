"""Rows to look at: context, what is supervised and where turns end, in colour for a terminal or as a page."""

from __future__ import annotations

import html
from collections.abc import Collection, Iterable

from modelopt_eagle.common.text import visible
from modelopt_eagle.data.dataset import TokenizedDataset
from modelopt_eagle.data.encode import TokenizedRow
from modelopt_eagle.data.report import REASONS, DataReport

CONTEXT, SUPERVISED, END = "context", "supervised", "end"
_COLOURS = {CONTEXT: "\x1b[2m", SUPERVISED: "\x1b[32m", END: "\x1b[1;35m"}
_RESET = "\x1b[0m"
_STYLE = (
    "body{font-family:sans-serif;margin:2em;max-width:70em}pre{white-space:pre-wrap;border:1px solid #ccc;padding:1em}"
    ".context{color:#777}.supervised{background:#d9f2d9}.end{background:#e7c6f2;font-weight:bold}"
    "table{border-collapse:collapse}td,th{border:1px solid #ccc;padding:.3em .6em;text-align:left}"
)


def segments(row: TokenizedRow, tokenizer, ends: Collection[int]) -> list[tuple[str, str]]:
    """A row as ``(kind, text)``: runs of context, of supervised tokens, and of supervised end tokens."""
    runs: list[tuple[str, list[int]]] = []
    for token, flag in zip(row.input_ids, row.supervised, strict=True):
        kind = CONTEXT if not flag else END if token in ends else SUPERVISED
        if not runs or runs[-1][0] != kind:
            runs.append((kind, []))
        runs[-1][1].append(token)
    return [(kind, tokenizer.decode(ids)) for kind, ids in runs]


def coloured(row: TokenizedRow, tokenizer, ends: Collection[int], colour: bool = True) -> str:
    """A row for a terminal; without colour supervised parts stand between ``⟦⟧``, end tokens between ``⟪⟫``.

    Control characters in it are shown as escapes.
    """
    parts = []
    for kind, raw in segments(row, tokenizer, ends):
        text = visible(raw, lines=True)
        if colour:
            parts.append(f"{_COLOURS[kind]}{text}{_RESET}")
        else:
            parts.append({CONTEXT: text, SUPERVISED: f"⟦{text}⟧", END: f"⟪{text}⟫"}[kind])
    return "".join(parts)


def count_table(report: DataReport) -> list[tuple[str, int, str]]:
    """``(what, how many, what it means or the first one)`` of everything that a report counts."""
    rows = [
        ("read", report.read, "conversations found in the files"),
        ("used", report.rows, "rows"),
        *([("fanned out", report.fanned_out, "of them: answers with a row of their own")] if report.fanned_out else []),
        ("tokens", report.tokens, ""),
        ("supervised", report.supervised, "tokens that are learned"),
        ("truncated", report.truncated, f"rows cut at {report.max_length} tokens" if report.max_length else ""),
    ]
    for reason, count in sorted(report.dropped.items()):
        rows.append((f"dropped: {reason}", count, f"{REASONS.get(reason, '')}; first: {report.examples[reason]}"))
    for note, count in sorted(report.notes.items()):
        rows.append((f"note: {note.replace('_', ' ')}", count, report.examples.get(note, "")))
    return rows


def page(data: TokenizedDataset, tokenizer, ends: Collection[int], rows: Iterable[int]) -> str:
    """The rows and the counts as one page of HTML that needs no other file."""
    shown = []
    for number in rows:
        row = data.rows[number]
        text = "".join(
            f'<span class="{kind}">{html.escape(part)}</span>' for kind, part in segments(row, tokenizer, ends)
        )
        count = sum(row.supervised)
        shown.append(
            f"<h2>{html.escape(row.id)}: {len(row.input_ids)} tokens, {count} supervised</h2><pre>{text}</pre>"
        )
    table = "".join(
        f"<tr><td>{html.escape(what)}</td><td>{count}</td><td>{html.escape(meaning)}</td></tr>"
        for what, count, meaning in count_table(data.report)
    )
    return (
        f'<!doctype html><meta charset="utf-8"><title>What is learned</title><style>{_STYLE}</style>'
        '<h1>What is learned</h1><p><span class="context">context</span> · <span class="supervised">supervised</span> '
        f'· <span class="end">end of turn</span></p>{"".join(shown)}'
        "<table><tr><th>what</th><th>count</th><th></th></tr>"
        f"{table}</table>\n"
    )
