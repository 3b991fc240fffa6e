"""What each choice of the quick start is worth: heads trained for equal minutes with one choice changed.

    python scripts/benchmark/choices.py --output choices --minutes 5 --seeds 0 1 2 --choices lk ttt5

``CHOICES`` names them. Each is held against ``eagle3``, the quick start as it is, or against the choice that it builds
on; those are trained too. Every head answers the same prompts, greedily as a chain and, where a choice asks for it,
with longer chains or with answers and drafts drawn at temperature 1; what it is held against answers likewise.

Written into the output folder: ``choices.md`` and ``choices.json`` (acceptance lengths, and the difference to the
other head, paired by prompt over all seeds, both with 95 % intervals), ``choices.html`` and its plots as PNG
(differences, and the learning curves over each other, all seeds of a choice pooled). They are written after each seed,
of the seeds that are finished.

What the minutes are, and how the same command goes on where an earlier one ended: see ``equal_minutes.py``. The folder
of ``drafters.py`` can be given: its ``eagle3`` heads are taken as they are.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import equal_minutes  # scripts/benchmark/equal_minutes.py
from equal_minutes import CHAIN, Contestant, Plan, by_prompt, length_of, mean, plan_name

from modelopt_eagle.common.acceptance import bootstrap_interval, paired_difference, pooled_length, prefix_shares
from modelopt_eagle.common.files import write_whole

BASELINE = "eagle3"
Reading = tuple[Plan, float]
"""What is drafted, and the temperature at which prompts are answered."""
GREEDY: Reading = (CHAIN, 0.0)


@dataclass(frozen=True)
class Choice:
    """A change to the quick start.

    Attributes:
        about: what is changed, in a few words.
        overrides: ``section.key=value``.
        against: the choice that it is held against.
        readings: what is measured of it, and of what it is held against.
    """

    about: str
    overrides: tuple[str, ...] = ()
    against: str = BASELINE
    readings: tuple[Reading, ...] = (GREEDY,)

    @property
    def contestant(self) -> Contestant:
        """The head that is trained."""
        return Contestant(overrides=self.overrides)


RANDOM = ("eagle.init=random",)
"""Layers of other sizes than the target's cannot begin as its last one."""
CHOICES: dict[str, Choice] = {
    BASELINE: Choice("the quick start as it is"),
    "lk": Choice("the LK loss in place of KL", ("eagle.loss=lk",), readings=(GREEDY, (CHAIN, 1.0))),
    "ttt5": Choice("rollouts of 5 steps in place of 3", ("eagle.ttt_steps=5",), readings=(GREEDY, ((5,), 0.0))),
    "ttt7": Choice("rollouts of 7 steps", ("eagle.ttt_steps=7",), readings=(GREEDY, ((7,), 0.0))),
    "no_warmup": Choice("all rollout steps from the beginning", ("eagle.ttt_warmup=0",)),
    "adamw": Choice("AdamW in place of Muon", ("training.optimizer=adamw", "training.muon_learning_rate=null")),
    "mixed": Choice("a fifth of the later steps read true states", ("eagle.mix_hidden_states=0.2",)),
    "two_layers": Choice("two layers, begun as the target's last two", ("eagle.num_layers=2",)),
    "random": Choice("random starting weights", RANDOM),
    "wide": Choice("twice the feed-forward width", (*RANDOM, "eagle.intermediate_size=3072"), against="random"),
    "qk_norm": Choice("queries and keys normed, as in Qwen3", (*RANDOM, "eagle.qk_norm=true"), against="random"),
    "half_text": Choice("half of the text, met twice as often", ("data.max_rows=320",)),
}
"""A new one is a new entry: nothing else names them."""
BINS = 20
"""Points of a learning curve: the minutes are cut into so many."""
CURVES = 7
"""Choices in one plot of curves, beside what they are held against; a plot has eight colours."""


def build_parser() -> argparse.ArgumentParser:
    text = "\n".join(f"  {name:12}{choice.about}" for name, choice in CHOICES.items())
    parser = equal_minutes.make_parser(f"{__doc__}\nchoices:\n{text}")
    parser.add_argument("--choices", nargs="+", default=list(CHOICES), choices=CHOICES, help="default: all")
    return parser


def with_bases(asked: Sequence[str]) -> list[str]:
    """The choices asked for and those that they are held against, in the order of :data:`CHOICES`."""
    wanted = {BASELINE, *asked}
    wanted |= {CHOICES[name].against for name in wanted}
    return [name for name in CHOICES if name in wanted]


def readings_of(name: str, names: Sequence[str]) -> list[Reading]:
    """What is measured of a choice: its own readings, and those of the choices that are held against it."""
    others = [CHOICES[other].readings for other in names if CHOICES[other].against == name]
    return list(dict.fromkeys(reading for readings in (CHOICES[name].readings, *others) for reading in readings))


def reading_name(reading: Reading) -> str:
    """``chain 3``, or ``chain 3, T = 1``."""
    plan, temperature = reading
    return plan_name(plan) + (f", T = {temperature:g}" if temperature else "")


def states_of(heads: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    """What the trainings of a choice left behind, of each seed (``trainer_state.json``)."""
    files = [Path(made["checkpoint"]) / "trainer_state.json" for made in heads.values()]
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def difference_of(name: str, reading: Reading, found: dict[str, Any], seeds: Sequence[int]) -> dict[str, Any]:
    """How much longer a choice's acceptance is than that of what it is held against, on the same prompts."""
    against = CHOICES[name].against
    one, two = ([found["answers"][each, reading][seed] for seed in seeds] for each in (against, name))
    first, second = by_prompt(one), by_prompt(two)
    paired = paired_difference([first[key] for key in first], [second[key] for key in first])
    return {
        "against": against, "difference": paired.difference, "ci95": paired.ci95, "p_value": paired.p_value,
        "prompts": paired.prompts,
        "by_seed": [length_of(b) - length_of(a) for a, b in zip(one, two, strict=True)],
    }  # fmt: skip


def compare(found: dict[str, Any], names: Sequence[str], seeds: Sequence[int]) -> list[dict[str, Any]]:
    """A row a choice and reading, from the parts by choice, reading and seed."""
    rows = []
    for name in names:
        heads = found["heads"][name]
        expected = [state["evaluations"][-1].get("drawn_length") for state in states_of(heads) if state["evaluations"]]
        for reading in readings_of(name, names):
            parts = [found["answers"][name, reading][seed] for seed in seeds]
            accepted = list(by_prompt(parts).values())
            held = name != BASELINE and reading in CHOICES[name].readings
            rows.append({
                "choice": name, "about": CHOICES[name].about, "overrides": CHOICES[name].overrides,
                "draft": reading_name(reading), "temperature": reading[1],
                "acceptance_length": pooled_length(accepted), "ci95": bootstrap_interval(accepted),
                "by_seed": [length_of(part) for part in parts], "rounds": sum(map(len, accepted)),
                "per_position": prefix_shares(accepted, reading[0][0]),
                "difference": difference_of(name, reading, found, seeds) if held else None,
                "steps": [heads[seed]["steps"] for seed in seeds],
                "expected_at_temperature_1": mean(expected) if expected and None not in expected else None,
                "speed": speed_of(name, found, seeds) if reading == GREEDY and name != BASELINE else None,
            })  # fmt: skip
    return rows


def speed_of(name: str, found: dict[str, Any], seeds: Sequence[int]) -> dict[str, Any]:
    """Speed-up and cost of drafting beside those of what a choice is held against, means of the seeds' turns."""
    own, other = (f"{each} {plan_name(CHAIN)}" for each in (name, CHOICES[name].against))
    speeds = [found["speeds"][name][seed] for seed in seeds]
    return {
        "speedup": mean([each[own]["speedup"] for each in speeds]),
        "over_the_other": mean([each[own]["speedup"] / each[other]["speedup"] for each in speeds]),
        "draft_cost": mean([each[own]["draft_cost"] for each in speeds]),
        "draft_cost_of_the_other": mean([each[other]["draft_cost"] for each in speeds]),
        "processor_share": min(each[key]["processor_share"] or 1.0 for each in speeds for key in (own, other)),
        "unreliable": any(each[key]["unreliable"] for each in speeds for key in (own, other)),
    }


HEADINGS = (
    "choice", "held against", "draft", "acceptance length", "95 %", "seeds", "difference, paired by prompt", "95 %",
    "seeds", "optimiser steps", "accepted up to each position", "expected at T = 1, held-out rows",
    "drafting, plain steps (the other's)", "speed-up over the other",
)  # fmt: skip


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A row as text, under :data:`HEADINGS`."""

    def span(values: Sequence[float], form: str = ".3f") -> str:
        return f"{min(values):{form}} to {max(values):{form}}"

    other, speed, expected = row["difference"], row["speed"], row["expected_at_temperature_1"]
    difference = ("", "", "") if other is None else (
        f"{other['difference']:+.3f}", span(other["ci95"], "+.3f"), span(other["by_seed"], "+.3f"),
    )  # fmt: skip
    costs = ("", "") if speed is None else (
        f"{speed['draft_cost']:.2f} ({speed['draft_cost_of_the_other']:.2f})",
        f"{speed['over_the_other']:.2f}" + (" (unreliable)" if speed["unreliable"] else ""),
    )  # fmt: skip
    return (
        row["choice"], "" if other is None else other["against"], row["draft"], f"{row['acceptance_length']:.3f}",
        span(row["ci95"]), span(row["by_seed"]), *difference, ", ".join(map(str, row["steps"])),
        " ".join(f"{share:.3f}" for share in row["per_position"]),
        "" if expected is None else f"{expected:.3f}", *costs,
    )  # fmt: skip


def notes(rows: Sequence[dict[str, Any]], settings: dict[str, Any], seeds: Sequence[int], commits) -> list[str]:
    """What the table is of, in sentences."""
    shares = [row["speed"]["processor_share"] for row in rows if row["speed"]]
    timed = (
        f" Times of {settings['prompts_timed']} prompts in turns with the other head and plain decoding, in which "
        f"this process had its processors for {min(shares):.2f} of the time." if shares else ""
    )  # fmt: skip
    about = {row["choice"]: f"{row['choice']}: {row['about']}" for row in rows}
    return [
        equal_minutes.told_settings(settings, seeds, commits)
        + " Answers are greedy where no temperature is named. Intervals draw whole prompts with all of their seeds; "
        "they hold for these seeds' heads, and the seeds' own numbers stand beside them." + timed,
        "; ".join(about.values()) + ".",
    ]


def page(rows: Sequence[dict[str, Any]], told: Sequence[str]) -> str:
    """The comparison as Markdown."""
    lines = [line for note in told for line in (note, "")]
    lines += [f"| {' | '.join(HEADINGS)} |", "|---" * len(HEADINGS) + "|"]
    lines += [f"| {' | '.join((f'`{cells(row)[0]}`', *cells(row)[1:]))} |" for row in rows]
    return "\n".join([*lines, ""])


def learning_curve(states: Sequence[dict[str, Any]], step: int) -> tuple[list[float], list[float]]:
    """How often a rollout step names the target's choice on the rows being learned, over the minutes of training.

    Args:
        states: of all seeds of a choice; the log lines of all are pooled.
        step: of the rollout, from 0; log lines that did not train it are left out.

    Returns:
        minutes and shares, one for each of :data:`BINS` parts of the training that has a log line.
    """
    entries = [entry for state in states for entry in state["history"]]
    if step:
        entries = [entry for entry in entries if step < len(entry["per_step"]) and entry["per_step"][step] != 0]
    width = max((entry["elapsed"] for entry in entries), default=0.0) / BINS or 1.0
    parts: dict[int, list[dict[str, Any]]] = {}
    for entry in entries:
        parts.setdefault(min(int(entry["elapsed"] / width), BINS - 1), []).append(entry)
    minutes = [mean([entry["elapsed"] for entry in parts[number]]) / 60 for number in sorted(parts)]
    return minutes, [mean([entry["accuracy"][step] for entry in parts[number]]) for number in sorted(parts)]


def draw(rows: Sequence[dict[str, Any]], found: dict[str, Any], names: Sequence[str]) -> list[Any]:
    """Differences with their intervals, and learning curves over each other.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    from modelopt_eagle.report import plots

    held = [row for row in rows if row["difference"]]
    marks = [
        plots.Estimate(f"{row['choice']}, {row['draft']}", row["difference"]["difference"], *row["difference"]["ci95"])
        for row in held
    ]
    title = "Difference to what it is held against"
    drawn = [plots.intervals("choices-differences", title, [("difference", marks)], x="tokens a pass")] if marks else []
    states = {name: states_of(found["heads"][name]) for name in names}
    bases = [name for name in names if any(CHOICES[other].against == name for other in names)]
    for base in bases:
        others = [name for name in names if name != base and CHOICES[name].against == base]
        for first in range(0, len(others), CURVES):
            part = [base, *others[first : first + CURVES]]
            for step, place in ((0, "first"), (2, "third")):
                curves = [plots.Curve(name, *learning_curve(states[name], step)) for name in part]
                if curves := [curve for curve in curves if curve.x]:
                    name = f"choices-{base}-{first // CURVES + 1}-{place}"
                    title = f"The {place} draft is the target's choice, on the rows being learned"
                    drawn.append(plots.lines(name, title, curves, x="minutes of training", y="share of positions"))
    return drawn


def write(
    found: dict[str, Any], names: Sequence[str], seeds: Sequence[int], settings: dict[str, Any], output: Path
) -> str:
    """Write table and page of the seeds that are finished.

    Returns:
        the table, and where the page is.

    Raises:
        MissingExtraError: the page needs matplotlib or jinja2; the table is written before.
    """
    from modelopt_eagle.report import write_sheet

    rows = compare(found, names, seeds)
    commits = equal_minutes.commits_of([part for parts in found["answers"].values() for part in parts.values()])
    told = notes(rows, settings, seeds, commits)
    data = {"settings": settings, "seeds": seeds, "commits": commits, "rows": rows}
    write_whole(output / "choices.json", json.dumps(data, indent=1) + "\n")
    write_whole(output / "choices.md", page(rows, told))
    texts = [cells(row) for row in rows]
    sheet = write_sheet(output / "choices.html", "Choices", told, HEADINGS, texts, draw(rows, found, names))
    return f"{page(rows, told)}\nwrote {sheet}"


def main(argv: list[str] | None = None) -> int:
    """Run the comparison, or go on with it; returns the exit code."""
    return equal_minutes.begin(run, build_parser().parse_args(argv))


def run(arguments: argparse.Namespace) -> int:
    """See :func:`main`."""
    names = with_bases(arguments.choices)
    settings = equal_minutes.prepare(arguments, {name: CHOICES[name].contestant for name in names})
    from modelopt_eagle.export import load_draft
    from modelopt_eagle.target import load_target

    target = load_target(arguments.base_model, dtype="float32")
    found: dict[str, Any] = {kind: {} for kind in ("heads", "answers", "speeds")}
    for seed in arguments.seeds:
        heads: dict[str, Any] = {}
        for name in names:
            made = equal_minutes.trained(CHOICES[name].contestant, name, seed, target, arguments)
            found["heads"].setdefault(name, {})[seed] = made
            heads[name] = load_draft(made["checkpoint"]).eval()
            for plan, temperature in readings_of(name, names):
                part = equal_minutes.answered(heads[name], name, seed, plan, target, arguments, temperature)
                found["answers"].setdefault((name, (plan, temperature)), {})[seed] = part
        for name in names[1:]:
            pairs = [(each, heads[each], CHAIN) for each in (CHOICES[name].against, name)]
            found["speeds"].setdefault(name, {})[seed] = equal_minutes.kept(
                arguments.output / f"speeds-seed{seed}-{CHOICES[name].against}-{name}.json",
                lambda pairs=pairs: equal_minutes.speeds_of(pairs, target, arguments),
            )
        seeds = arguments.seeds[: arguments.seeds.index(seed) + 1]
        print(write(found, names, seeds, settings, arguments.output))
    return 0


if __name__ == "__main__":
    sys.exit(main())
