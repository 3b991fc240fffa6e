"""What a serving check found, as data and as a table."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from modelopt_eagle.common.acceptance import length_text
from modelopt_eagle.export.engines import ENGINES

TELLING = 0.05
"""A head that is served wrongly is seen by what it loses; one below this share of first tokens has little to lose."""


def left_out_line(names: list[str]) -> str:
    """What is said of prompts that do not fit."""
    return f"{len(names)} of the prompts, too long for the window, left out: {', '.join(names[:4])}" + (
        ", ..." if len(names) > 4 else ""
    )


@dataclass
class Divergence:
    """A place where two greedy texts part.

    Attributes:
        prompt: which one; ``position``: of the first token that differs.
        tokens: the two tokens, in the order of ``between``.
        gap: how far apart the target's logits for them are; a tie if small.
    """

    prompt: str
    between: str
    position: int
    tokens: tuple[int | None, int | None]
    gap: float
    is_tie: bool


@dataclass
class ServingReport:
    """The verdict of a serving check.

    Attributes:
        passed: no ``failures``.
        engine, engine_version, prompts, new_tokens: what was run.
        drafts: verification steps that the engine counted.
        acceptance_length, per_position: the engine's (accepted at least that many drafted tokens, per draft);
            ``None`` and 0 without a draft.
        our_acceptance_length, our_per_position, our_drafts: of this toolkit's generator on the same prompts.
        divergences: where texts part, ties among them.
        seconds_plain, seconds_drafted, speedup: the engine's decoding time without and with the head.
        proposals, proposals_equal: drafted tokens of the engine that were compared with the head's own, and the equal.
        left_out: names of prompts that are too long for the window.
        mended: the engine ran with a fault of its own mended, see ``serving/vllm_context_norms.py``.
    """

    passed: bool
    engine: str
    engine_version: str
    prompts: int
    new_tokens: int
    drafts: int
    acceptance_length: float | None
    per_position: list[float]
    our_acceptance_length: float | None
    our_per_position: list[float]
    our_drafts: int
    seconds_plain: float
    seconds_drafted: float
    speedup: float
    divergences: list[Divergence] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    proposals: int = 0
    proposals_equal: int = 0
    mended: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return asdict(self)

    def table(self) -> str:
        """The result as text, verdict last."""
        positions, engine = range(1, len(self.our_per_position) + 1), ENGINES[self.engine]
        rows = [
            ["", "acceptance length", *(f"position {p}" for p in positions), "drafts"],
            [f"{engine.name} {self.engine_version}", length_text(self.acceptance_length),
             *(f"{p:.3f}" for p in self.per_position), str(self.drafts)],
            ["this toolkit", length_text(self.our_acceptance_length), *(f"{p:.3f}" for p in self.our_per_position),
             str(self.our_drafts)],
        ]  # fmt: skip
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        lines.append(
            f"{self.prompts} prompts, {self.new_tokens} new tokens: {self.seconds_plain:.1f} s without the head, "
            f"{self.seconds_drafted:.1f} s with it ({self.speedup:.2f} times as fast)"
        )
        if self.proposals:
            lines.append(f"{self.proposals_equal} of {self.proposals} drafted tokens of the engine are the head's own")
        elif self.drafts:
            lines.append(
                "note: this engine's drafted tokens were not seen one by one; acceptance and texts alone were judged"
            )
        if self.mended:
            lines.append(
                f"note: {engine.name} ran with its norm of context keys mended; as released it accepts less of this "
                "head on a CPU (docs/serving.md names the plugin; --as_released shows it)"
            )
        if self.left_out:
            lines.append(f"note: {left_out_line(self.left_out)}")
        first = self.our_per_position[0]
        if first < TELLING:
            lines.append(f"note: the head gets {first:.1%} of first tokens right; of so weak a head this sees little")
        if self.engine_version != engine.version:
            lines.append(
                f"note: this toolkit's rules for {engine.name} are those of {engine.version}, not of "
                f"{self.engine_version}"
            )
        for place in self.divergences:
            kind = "tie" if place.is_tie else "DIFFERENCE"
            lines.append(
                f"{kind}: prompt {place.prompt}, token {place.position}, {place.between}: {place.tokens[0]} or "
                f"{place.tokens[1]}, logits {place.gap:.1e} apart"
            )
        lines += [f"failed: {failure}" for failure in self.failures]
        lines.append(
            "verdict: " + ("the engine serves this head as it was trained" if self.passed else "NOT SERVED RIGHT")
        )
        return "\n".join(lines)
