"""``AcceptanceReport``: what a validation found, as a table and as ``acceptance.json``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from modelopt_eagle.common.acceptance import length_text
from modelopt_eagle.common.files import write_whole
from modelopt_eagle.common.machine import machine_line
from modelopt_eagle.common.text import visible
from modelopt_eagle.decoding import DraftPlan, SamplingOptions
from modelopt_eagle.validation.dialogues import Dialogue
from modelopt_eagle.validation.speed import Speed

JSON_FIELDS = (
    "acceptance_length",
    "ci95",
    "per_position",
    "per_category",
    "speedup",
    "steps",
    "prompts",
    "target",
    "commit",
)


@dataclass
class AcceptanceReport:
    """Acceptance of a head over a set of prompts.

    Attributes:
        acceptance_length: tokens a verification step gives, pooled over all steps.
        ci95: its 95 % interval, by bootstrap over prompts.
        per_position: ``[K or D]`` share of steps in which position k was accepted with all before it.
        per_category: acceptance length of each category, pooled within it; ``None`` for one without a step.
        speedup: over plain decoding in this run; ``None``: not measured.
        steps: verification steps.
        prompts: prompts that were answered.
        target: its name.
        commit: of this package.
        plan: what was drafted.
        per_category_ci95: the interval of each category; the value itself where it has one prompt.
        counts: prompts and steps of each category.
        too_long: turns left out because they do not fit the target's window.
        speed: what the speed-up is made of.
        first_prompt: the first prompt as the target saw it.
        sweep: rows of a sweep, if one was made.
        notes: what the generator said of this plan with this head.
        conditional: ``[K or D]`` share of the steps that reached position k in which it was accepted; ``None`` where
            none did.
        request_mean: mean over prompts of each one's own acceptance length; ``None`` without a step.
        by_context: steps and acceptance length by tokens before a step.
        sampling: temperature and filters of the answers; ``None``: greedy.
        sample_drafts: whether drafts were drawn, too.
        dialogues: what was asked and answered, step by step.
    """

    acceptance_length: float
    ci95: tuple[float, float]
    per_position: list[float]
    per_category: dict[str, float | None]
    speedup: float | None
    steps: int
    prompts: int
    target: str
    commit: str
    plan: DraftPlan
    per_category_ci95: dict[str, tuple[float, float]] = field(default_factory=dict)
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)
    too_long: int = 0
    speed: Speed | None = None
    first_prompt: str = ""
    sweep: list[dict] | None = None
    notes: list[str] = field(default_factory=list)
    conditional: list[float | None] = field(default_factory=list)
    request_mean: float | None = None
    by_context: dict[str, tuple[int, float]] = field(default_factory=dict)
    sampling: SamplingOptions | None = None
    sample_drafts: bool = False
    dialogues: Sequence[Dialogue] = ()

    def to_dict(self) -> dict:
        """The fields of ``acceptance.json``; ``costs`` if speed was measured, ``sweep`` and ``best`` after a sweep."""
        data = {name: getattr(self, name) for name in JSON_FIELDS}
        data["ci95"] = list(self.ci95)
        data["per_category_ci95"] = {name: list(bounds) for name, bounds in self.per_category_ci95.items()}
        data["draft"] = plan_fields(self.plan)
        data["conditional"], data["request_mean"] = self.conditional, self.request_mean
        data["by_context"] = {
            name: {"steps": steps, "acceptance_length": length} for name, (steps, length) in self.by_context.items()
        }
        if self.sampling is not None and not self.sampling.greedy:
            data["sampling"] = {**asdict(self.sampling), "sample_drafts": self.sample_drafts}
        if self.notes:
            data["notes"] = list(self.notes)
        if self.speed is not None:
            data["costs"] = cost_fields(self.speed) | {"machine": machine_line()}
        if self.sweep is not None:
            data["sweep"] = self.sweep
            data["best"] = best_setting(self.sweep)
        return data

    def write_json(self, path: str | Path) -> Path:
        """Write ``acceptance.json`` whole or not at all; returns the file."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        return write_whole(path, json.dumps(self.to_dict(), indent=2) + "\n")

    def dialogue_rows(self) -> list[dict]:
        """The dialogues as plain values: ``id, category, turns``, each turn with the fields of ``Answer``."""
        return [
            {
                "id": dialogue.prompt.id,
                "category": dialogue.prompt.category,
                "turns": [asdict(answer) for answer in dialogue.answers],
            }
            for dialogue in self.dialogues
        ]

    def write_dialogues(self, path: str | Path) -> Path:
        """Write :meth:`dialogue_rows` as JSON lines, whole or not at all; returns the file."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        return write_whole(path, "".join(json.dumps(row) + "\n" for row in self.dialogue_rows()))

    def table(self) -> str:
        """Category by category, then all, then what else was found."""
        rows = [("category", "prompts", "steps", "acceptance length")]
        for category, value in self.per_category.items():
            prompts, steps = self.counts.get(category, ("", ""))
            bounds = self.per_category_ci95.get(category)
            shown = f" [{bounds[0]:.3f}, {bounds[1]:.3f}]" if bounds else ""
            rows.append((visible(category), str(prompts), str(steps), f"{length_text(value)}{shown}"))
        low, high = self.ci95
        rows.append(
            ("all", str(self.prompts), str(self.steps), f"{self.acceptance_length:.3f} [{low:.3f}, {high:.3f}]")
        )
        lines = [format_table(rows)]
        shares = " ".join(f"{share:.3f}" for share in self.per_position)
        place = "depth of the tree" if self.plan.is_tree else "position"
        lines.append(f"accepted up to each {place}: {shares}   (share of steps; {self.drafted})")
        lines += [f"note: {note}" for note in self.notes]
        if any(rate is not None for rate in self.conditional):
            rates = " ".join("none" if rate is None else f"{rate:.3f}" for rate in self.conditional)
            lines.append(f"accepted at each {place} once reached: {rates}")
        if self.request_mean is not None:
            lines.append(f"mean over prompts: {self.request_mean:.3f}")
        if self.by_context:
            cells = ", ".join(f"{name}: {length:.3f} ({steps})" for name, (steps, length) in self.by_context.items())
            lines.append(f"by tokens before a step: {cells}   (steps)")
        if self.sampling is not None and not self.sampling.greedy:
            drawn = ", drafts drawn" if self.sample_drafts else ""
            named = ", ".join(f"{name} {value:g}" for name, value in asdict(self.sampling).items())
            lines.append(f"answers drawn: {named}{drawn}")
        if self.too_long:
            lines.append(f"left out: {self.too_long} turns that do not fit the target's window")
        if self.speed is not None:
            lines.append(speed_line(self.speed))
        return "\n".join(lines)

    @property
    def drafted(self) -> str:
        """What was drafted a step, in words."""
        if self.plan.is_tree:
            return f"tree of topk {self.plan.topk}, depth {self.plan.depth}, {self.plan.num_nodes} nodes"
        return f"chain of {self.plan.depth} drafted tokens"


def plan_fields(plan: DraftPlan) -> dict:
    """A plan as plain values, by the names of the command line's options."""
    if plan.is_tree:
        return {"mode": "tree", "topk": plan.topk, "depth": plan.depth, "num_nodes": plan.num_nodes}
    return {"mode": "chain", "num_steps": plan.depth}


def best_setting(rows: Sequence[dict]) -> dict:
    """The fastest shape of a sweep, or ``mode: plain`` if plain decoding is faster than all of them."""
    best = max(rows, key=lambda row: row["speedup"])
    shape = ("mode", "num_steps", "topk", "depth", "num_nodes")
    return {key: best[key] for key in shape if key in best} if best["speedup"] >= 1 else {"mode": "plain"}


def cost_fields(speed: Speed) -> dict:
    """What a measured speed-up is made of: seconds a step, and the acceptance length above which drafting pays."""
    names = ("plain_step", "draft_step", "verify_step", "other_step", "break_even", "efficiency", "processor_share")
    return {name: getattr(speed, name) for name in names}


def speed_line(speed: Speed) -> str:
    """A sentence on speed-up, costs and break-even."""
    share = 100 * speed.efficiency
    verdict = "" if speed.speedup >= 1 else "; on this machine plain decoding is faster: draft nothing"
    return (
        f"speed-up {speed.speedup:.2f}x over plain decoding in this run, {share:.0f} % of the acceptance length "
        f"{speed.acceptance_length:.2f} of those prompts; a step costs {speed.break_even:.2f} plain steps "
        f"(draft {1e3 * speed.draft_step:.1f} ms, verify {1e3 * speed.verify_step:.1f} ms, other "
        f"{1e3 * speed.other_step:.1f} ms; plain {1e3 * speed.plain_step:.1f} ms), so drafting pays above an "
        f"acceptance length of {speed.break_even:.2f}{verdict}; {same_text(speed)}{disturbance(speed)}"
    )


def disturbance(speed: Speed) -> str:
    """A warning if the machine was busy with other work while the times were taken."""
    unreliable = ""
    if speed.implausible:
        unreliable = (
            "; unreliable: a step cannot cost less than a plain one, nor the speed-up exceed the acceptance length, so "
            "something else slowed this machine down: measure the speed again on a quiet machine"
        )
    if not speed.disturbed or speed.processor_share is None:
        return unreliable
    return unreliable + (
        f"; other work held this one up ({100 * speed.processor_share:.0f} % of the time on a processor): measure the "
        "speed again on a quiet machine"
    )


def same_text(speed: Speed) -> str:
    """Whether the texts are those of plain decoding."""
    if not speed.divergences:
        return "the texts are those of plain decoding"
    ties = sum(divergence.is_tie for divergence in speed.divergences)
    worst = max(divergence.gap for divergence in speed.divergences)
    return (
        f"{len(speed.divergences)} texts part from plain decoding, {ties} of them where the target's logits nearly tie "
        f"(largest gap {worst:.2g})"
    )


def format_table(rows: Sequence[tuple[str, ...]]) -> str:
    """Columns aligned, the first to the left, a line under the head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for number, row in enumerate(rows):
        cells = [
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
        if number == 0:
            lines.append("  ".join("-" * width for width in widths))
    return "\n".join(lines)
