"""What a bench measured, as data and as tables."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from modelopt_eagle.common.acceptance import length_text, shares_of_counts
from modelopt_eagle.export.engines import ENGINES
from modelopt_eagle.serving.live import Acceptance
from modelopt_eagle.validation.report import format_table

WITHOUT, WITH = "without", "with"
"""The two sides of a bench."""
ALL_SETS = "all sets"
PERCENTILES = (50, 90, 99)
KINDS = 4
"""Reasons of failures that a note tells for each cell."""
NOT_TOLD = "not told by this server"
LATENCIES = {"first_token": "first token", "per_token": "per token", "request": "whole request"}
"""Name in JSON to name in prose, in the order of :class:`Cell`'s lists."""


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which so many percent lie, drawn straight between neighbours (numpy's default)."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low, high = math.floor(place), math.ceil(place)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Mean and percentiles of seconds; ``None`` of nothing."""
    if not values:
        return None
    found = {f"p{percent}": percentile(values, percent) for percent in PERCENTILES}
    return {"mean": sum(values) / len(values), **found}


@dataclass(frozen=True)
class Failure:
    """A request that had no whole answer: which, and why."""

    prompt: str
    turn: int
    reason: str


@dataclass
class Cell:
    """One set of prompts or one of its categories, so many requests at a time, on one server.

    Attributes:
        prompts: name of the set.
        concurrency: requests under way at a time.
        planned: requests that the set has.
        answered: with a whole answer.
        failures: those without; ``asked`` is both together.
        not_asked: why others were not asked, or broken off, to how many; with ``asked`` they are ``planned``.
        seconds: from the first request to the end of the last.
        first_token, per_token, request: seconds of each answer: to its first token, for each token behind the first
            (answers of two tokens at least), to its end.
        prompt_tokens, completion_tokens: of answers, by the server's usage.
        untold: answers of which the server did not tell the usage.
        cut: answers that ended at the length asked for.
        acceptance: by the server's counters; ``None``: not told, then ``trouble`` says why.
        generated, cached: see ``Counted``.
        interrupted: the user, or a server that answered no more, ended it early.
        category: of the prompts, where the categories of the set were asked apart.
        parts: cells that were put together to this one; 0: it was measured as it is.
    """

    prompts: str
    concurrency: int
    planned: int
    answered: int = 0
    failures: list[Failure] = field(default_factory=list)
    not_asked: Counter = field(default_factory=Counter)
    seconds: float = 0.0
    first_token: list[float] = field(default_factory=list)
    per_token: list[float] = field(default_factory=list)
    request: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    untold: int = 0
    cut: int = 0
    acceptance: Acceptance | None = None
    trouble: str = "not read"
    generated: int | None = None
    cached: int | None = None
    interrupted: bool = False
    category: str | None = None
    parts: int = 0

    @property
    def title(self) -> str:
        """What it is called in tables."""
        return self.prompts if self.category is None else f"{self.prompts}: {self.category}"

    @property
    def asked(self) -> int:
        """Requests that were answered or failed."""
        return self.answered + len(self.failures)

    @property
    def whole(self) -> bool:
        """Whether every request was answered."""
        return self.answered == self.planned

    @property
    def tokens_per_second(self) -> float | None:
        """New tokens of answers a second, all requests together; ``None`` without an answer or without usage."""
        told = self.answered and not self.untold and self.seconds > 0
        return self.completion_tokens / self.seconds if told else None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        found, steps = self.acceptance, self.acceptance.drafts if self.acceptance else 0
        return {
            "prompts": self.prompts, "category": self.category, "concurrency": self.concurrency,
            "planned": self.planned, "asked": self.asked,
            "answered": self.answered, "failed": len(self.failures), "not_asked": dict(self.not_asked),
            "whole": self.whole, "seconds": self.seconds, "tokens_per_second": self.tokens_per_second,
            "prompt_tokens": None if self.untold else self.prompt_tokens,
            "completion_tokens": None if self.untold else self.completion_tokens,
            "answers_without_usage": self.untold, "cut": self.cut,
            **{name: spread(getattr(self, name)) for name in LATENCIES},
            "acceptance": None if found is None else {
                "drafts": steps, "accepted": found.accepted, "drafted": found.drafted,
                "acceptance_length": acceptance_length(found),
                "accepted_per_position": list(found.positions),
                "per_position": shares_of_counts(found.positions, steps),
            },
            "acceptance_not_told": self.trouble if found is None else None,
            "tokens_counted_by_server": self.generated, "prompt_tokens_from_cache": self.cached,
            "failures": [vars(failure) for failure in self.failures],
        }  # fmt: skip


def acceptance_length(found: Acceptance) -> float | None:
    """Tokens that a draft gave with the target's own; ``None`` without a draft."""
    return 1.0 + found.accepted / found.drafts if found.drafts else None


def pooled(cells: Sequence[Cell], name: str = ALL_SETS) -> Cell:
    """Several sets, or categories of one, at the same concurrency: sums, and latencies of all answers."""
    made = Cell(name, cells[0].concurrency, sum(cell.planned for cell in cells), parts=len(cells))
    for name in ("answered", "seconds", "prompt_tokens", "completion_tokens", "untold", "cut"):
        setattr(made, name, sum(getattr(cell, name) for cell in cells))
    for name in ("failures", *LATENCIES):
        setattr(made, name, [value for cell in cells for value in getattr(cell, name)])
    made.not_asked = sum((cell.not_asked for cell in cells), Counter())
    made.interrupted = any(cell.interrupted for cell in cells)
    found = [cell.acceptance for cell in cells]
    if any(each is None for each in found):
        made.trouble = next(cell.trouble for cell in cells if cell.acceptance is None)
    else:
        made.acceptance, made.trouble = sum(found[1:], found[0]), ""
    for name in ("generated", "cached"):
        told = [getattr(cell, name) for cell in cells]
        setattr(made, name, None if None in told else sum(told))
    return made


@dataclass
class Side:
    """A server's part of a bench.

    Attributes:
        name: ``with`` or ``without`` the head.
        url, model: what was asked; ``engine``, ``version``: what it says it is, if it does.
        cells: in the order in which they were measured.
        stopped: why it was not asked to the end, or empty.
    """

    name: str
    url: str = ""
    model: str = ""
    engine: str | None = None
    version: str | None = None
    cells: list[Cell] = field(default_factory=list)
    stopped: str = ""

    def rows(self) -> list[Cell]:
        """The cells by concurrency, behind the categories of a set the set, and behind several sets all of them."""
        made: list[Cell] = []
        for level in dict.fromkeys(cell.concurrency for cell in self.cells):
            cells = [cell for cell in self.cells if cell.concurrency == level]
            sets = dict.fromkeys(cell.prompts for cell in cells)
            for name in sets:
                own = [cell for cell in cells if cell.prompts == name]
                made += own if own[0].category is None else [*own, pooled(own, name)]
            made += [pooled(cells)] if len(sets) > 1 else []
        return made


@dataclass
class BenchReport:
    """A bench: its settings and its servers, those without the head first.

    Attributes:
        settings: what was asked for.
        sides: one or two.
        interrupted: Ctrl-C ended it.
    """

    settings: dict[str, Any]
    sides: list[Side] = field(default_factory=list)
    interrupted: bool = False

    @property
    def whole(self) -> bool:
        """Whether everything that was asked for was measured and answered."""
        stopped = self.interrupted or any(side.stopped for side in self.sides)
        return not stopped and all(cell.whole for side in self.sides for cell in side.cells)

    @property
    def sets(self) -> list[str]:
        """Names of the sets of prompts that were asked."""
        return list(dict.fromkeys(cell.prompts for side in self.sides for cell in side.cells))

    def speedup(self, cell: Cell) -> float | None:
        """Tokens a second of a row with the head over those without it; ``None`` unless both are whole."""
        plain = next((side for side in self.sides if side.name == WITHOUT), None)
        rows = plain.rows() if plain else []
        key = (cell.prompts, cell.category, cell.concurrency)
        other = next((row for row in rows if (row.prompts, row.category, row.concurrency) == key), None)
        if other is None or not (other.whole and cell.whole and other.planned == cell.planned):
            return None
        before, after = other.tokens_per_second, cell.tokens_per_second
        return after / before if before and after else None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        sides = []
        for side in self.sides:
            rows = []
            for cell in side.rows():
                row = cell.to_dict()
                if cell.parts:
                    del row["failures"]  # they stand with what it was put together from
                rows.append({**row, "speedup": self.speedup(cell) if side.name == WITH else None})
            about = {name: getattr(side, name) for name in ("name", "url", "model", "engine", "version", "stopped")}
            sides.append({**about, "rows": rows})
        return {
            "settings": self.settings, "whole": self.whole, "interrupted": self.interrupted, "sides": sides,
            "notes": self.notes(),
        }  # fmt: skip

    def speed_rows(self) -> list[tuple[str, ...]]:
        """Head and rows of the table of speed."""
        head = ["prompts", "at a time", "head", "asked", "failed", "tokens/s", "speed-up"]
        head += [f"{name} p50 / p90 / p99" for name in LATENCIES.values()]
        rows = [tuple(head)]
        for side in self.sides:
            for cell in side.rows():
                times = [times_text(spread(getattr(cell, name))) for name in LATENCIES]
                faster = self.speedup(cell) if side.name == WITH else None
                rows.append(
                    (cell.title, str(cell.concurrency), side.name, str(cell.asked), str(len(cell.failures)),
                     "not told" if cell.tokens_per_second is None else f"{cell.tokens_per_second:.1f}",
                     "" if faster is None else f"{faster:.2f}x", *times)
                )  # fmt: skip
        return rows

    def acceptance_rows(self) -> list[tuple[str, ...]]:
        """Head and rows of the table of acceptance, of servers that tell it; empty without one."""
        cells = [cell for side in self.sides if side.name == WITH for cell in side.rows() if cell.acceptance]
        depth = max((len(cell.acceptance.positions) for cell in cells), default=0)
        rows = [("prompts", "at a time", "drafts", "acceptance length", *(f"position {k + 1}" for k in range(depth)))]
        for cell in cells:
            found = cell.acceptance
            shares = [f"{share:.3f}" for share in shares_of_counts(found.positions, found.drafts)]
            shares += [("0.000" if found.positions else "not told")] * (depth - len(shares))
            length = length_text(acceptance_length(found))
            rows.append((cell.title, str(cell.concurrency), str(found.drafts), length, *shares))
        return rows if cells else []

    def notes(self) -> list[str]:
        """What is missing, and what makes the numbers other than they seem."""
        found = []
        for side in self.sides:
            where = f"{side.name} the head"
            if side.stopped:
                found.append(f"{where}: stopped: {side.stopped}")
            found += [f"{where}: {line}" for line in release_notes(side)]
            if side.name == WITH and side.cells and not any(cell.acceptance for cell in side.cells):
                found.append(f"acceptance: {NOT_TOLD} ({side.cells[0].trouble})")
            for cell in side.cells:
                place = f"{where}, {cell.title}, {cell.concurrency} at a time"
                found += [f"{place}: {line}" for line in cell_notes(cell, side.name)]
                if side.name == WITH and cell.acceptance is None and any(other.acceptance for other in side.cells):
                    found.append(f"{place}: acceptance {NOT_TOLD} ({cell.trouble})")
        return found

    def table(self) -> str:
        """Everything as text, what is missing last."""
        lines = [
            f"{side.name} the head: {side.url}, {side.model}, " + (
                "an engine that does not say its name" if side.engine is None
                else f"{ENGINES[side.engine].name} {side.version or '(version not told)'}"
            )
            for side in self.sides if side.url
        ]  # fmt: skip
        if any(side.cells for side in self.sides):
            lines += ["", format_table(self.speed_rows())]
        if rows := self.acceptance_rows():
            lines += ["", format_table(rows)]
        lines += [""] + [f"note: {note}" for note in self.notes()]
        if self.interrupted:
            lines.append("interrupted: this is what was measured until then")
        return "\n".join(lines).rstrip()


def release_notes(side: Side) -> list[str]:
    """What is to be said of an engine of another release than the one whose counters were read."""
    engine = ENGINES.get(side.engine or "")
    found = re.search(r"\d+(?:\.\d+)*", side.version or "")
    if engine is None or found is None or found[0] == engine.version:
        return []
    return [
        f"its counters are read as those of {engine.name} {engine.version}, and it is {side.version}: if they are "
        "named or counted otherwise there, acceptance is not what it says"
    ]


def times_text(found: dict[str, float] | None) -> str:
    """Percentiles in milliseconds."""
    if found is None:
        return "none"
    return " / ".join(f"{1000 * found[f'p{percent}']:.1f}" for percent in PERCENTILES) + " ms"


def cell_notes(cell: Cell, side: str) -> list[str]:
    """What is to be said of one cell."""
    kinds = Counter(failure.reason for failure in cell.failures).most_common()
    found = [f"{count} failed: {reason}" for reason, count in kinds[:KINDS]]
    if others := sum(count for _, count in kinds[KINDS:]):
        found.append(f"{others} more failed for {len(kinds) - KINDS} other reasons; the JSON has each")
    found += [f"{count} not asked: {reason}" for reason, count in cell.not_asked.items()]
    if cell.untold:
        found.append(f"tokens {NOT_TOLD} for {cell.untold} of {cell.answered} answers")
    if cell.generated is not None and not (cell.untold or cell.failures or cell.interrupted):
        if cell.generated != cell.completion_tokens:
            found.append(
                f"the server counted {cell.generated} new tokens, these answers have {cell.completion_tokens}: others "
                "asked it too, or its counters lag; acceptance is of all that it counted"
            )
    if cell.cached:
        found.append(f"{cell.cached} tokens of prompts came from the server's cache, so first tokens came sooner")
    if side == WITH and cell.acceptance and not cell.acceptance.drafts and cell.answered:
        found.append("the server counted no draft: it does not use a head")
    if side == WITHOUT and cell.acceptance and cell.acceptance.drafts:
        found.append(f"this server, said to be without a head, counted {cell.acceptance.drafts} drafts")
    return found
