"""Several runs on one page: curves and bars over each other, differences with their significance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelopt_eagle.common.acceptance import PairedDifference, paired_difference
from modelopt_eagle.common.files import write_whole
from modelopt_eagle.errors import CheckpointError
from modelopt_eagle.recipe import Recipe
from modelopt_eagle.report import plots
from modelopt_eagle.report.facts import RunFacts, as_text, by_category, by_context, read_run
from modelopt_eagle.report.page import by_depth, drafted, estimates, render, series
from modelopt_eagle.report.plots import Curve, Plot
from modelopt_eagle.validation.report import format_table

SIGNIFICANT = 0.05
"""Below this a difference is called one."""


@dataclass(frozen=True)
class Compared:
    """A run beside the first one.

    Attributes:
        facts: of the run.
        against: the first run's acceptance against this one's, on the prompts of both; ``None`` for the first run
            itself, and where either was not measured prompt by prompt.
    """

    facts: RunFacts
    against: PairedDifference | None

    @property
    def verdict(self) -> str:
        """The difference in words."""
        if self.against is None:
            return "not compared by prompt"
        found, (low, high) = self.against, self.against.ci95
        word = "no difference shown" if found.p_value >= SIGNIFICANT else "better" if found.difference > 0 else "worse"
        return f"{found.difference:+.3f} [{low:+.3f}, {high:+.3f}], p = {found.p_value:.3g}: {word}"


def compare_runs(folders: Sequence[str | Path]) -> list[Compared]:
    """Read runs, and hold each against the first.

    Args:
        folders: output folders of runs, two at least.

    Returns:
        the runs under names that tell them apart.

    Raises:
        CheckpointError: fewer than two, a folder without a run, or runs measured on other prompts altogether.
    """
    if len(folders) < 2:
        raise CheckpointError(f"a comparison needs two runs at least, found {len(folders)}")
    runs = [read_run(folder) for folder in folders]
    for run, name in zip(runs, names([Path(folder).resolve() for folder in folders]), strict=True):
        run.name = name
    first = runs[0].accepted
    compared = [Compared(runs[0], None)]
    for run in runs[1:]:
        own = run.accepted
        both = [prompt for prompt in first if prompt in own]
        if first and own and not both:
            raise CheckpointError(f"{runs[0].name} and {run.name} were measured on other prompts: none is in both")
        paired = paired_difference([first[name] for name in both], [own[name] for name in both]) if both else None
        compared.append(Compared(run, paired))
    return compared


def names(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of paths that tell them apart."""
    for parts in range(1, max(len(folder.parts) for folder in folders) + 1):
        found = ["/".join(folder.parts[-parts:]) for folder in folders]
        if len(set(found)) == len(found):
            return found
    return [f"{folder.name} ({number})" for number, folder in enumerate(folders, 1)]


def write_comparison(folders: Sequence[str | Path], file: str | Path) -> tuple[Path, str]:
    """Write the page of a comparison.

    Args:
        folders: see :func:`compare_runs`.
        file: the page.

    Returns:
        the page, and its table as text.

    Raises:
        CheckpointError: see :func:`compare_runs`.
        MissingExtraError: matplotlib or jinja2 is not installed.
    """
    compared = compare_runs(folders)
    runs = [entry.facts for entry in compared]
    text = render(
        "compare.html",
        compared=compared,
        first=runs[0],
        training=training_plots(runs),
        acceptance=acceptance_plots(runs),
        differing=differing(runs),
        notes=notes(runs),
        significant=SIGNIFICANT,
    )
    file = Path(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    return write_whole(file, text), table(compared)


def table(compared: Sequence[Compared]) -> str:
    """The comparison as text."""
    rows: list[tuple[str, ...]] = [("run", "acceptance length", "speed-up", f"against {compared[0].facts.name}")]
    for number, entry in enumerate(compared):
        acceptance = entry.facts.acceptance
        length = speedup = "not measured"
        if acceptance is not None:
            low, high = acceptance["ci95"]
            length = f"{acceptance['acceptance_length']:.3f} [{low:.3f}, {high:.3f}]"
            speedup = "not measured" if acceptance.get("speedup") is None else f"{acceptance['speedup']:.2f}x"
        rows.append((entry.facts.name, length, speedup, entry.verdict if number else ""))
    return "\n".join([format_table(rows), *(f"note: {note}" for note in notes([e.facts for e in compared]))])


def notes(runs: Sequence[RunFacts]) -> list[str]:
    """What makes the numbers of runs hard to compare."""
    found, first = [], runs[0]
    for run in runs[1:]:
        one, two = first.acceptance, run.acceptance
        if one is None or two is None:
            continue
        if one.get("draft") != two.get("draft"):
            found.append(f"{first.name} was measured with a {drafted(one)}, {run.name} with a {drafted(two)}")
        if one["target"] != two["target"]:
            found.append(f"{first.name} was measured over {one['target']}, {run.name} over {two['target']}")
        if (mine := set(first.accepted)) and (theirs := set(run.accepted)) and mine != theirs:
            found.append(
                f"{len(mine & theirs)} of {len(mine | theirs)} prompts are in both {first.name} and {run.name}"
            )
        machines = [(acceptance.get("costs") or {}).get("machine") for acceptance in (one, two)]
        if all(machines) and machines[0] != machines[1]:
            found.append(f"speed-ups of {first.name} and {run.name} are of two machines")
    return found


def training_plots(runs: Sequence[RunFacts]) -> list[Plot]:
    """Curves of the runs over each other; a run without one is left out of it."""
    step = "optimiser step"

    def first_of(key: str) -> Callable[[RunFacts], Curve | None]:
        return lambda run: next(iter(by_depth(run.history, key)), None)

    def last_of(key: str) -> Callable[[RunFacts], Curve | None]:
        return lambda run: next(iter(by_depth(run.history, key)[::-1]), None)

    wanted: list[tuple[str, str, str, Callable[[RunFacts], Curve | None]]] = [
        ("compare-loss", "Loss", "loss", lambda run: series(run.history, "loss")),
        ("compare-first", "Accuracy of the first rollout step", "share of positions", first_of("accuracy")),
        ("compare-last", "Accuracy of the last rollout step", "share of positions", last_of("accuracy")),
        ("compare-evaluations", "Acceptance length at each evaluation", "tokens a step", evaluation_curve),
        ("compare-rate", "Learning rate", "learning rate", lambda run: series(run.history, "learning_rate")),
        ("compare-speed", "Tokens a second", "tokens a second", lambda run: series(run.history, "tokens_per_second")),
    ]
    drawn = []
    for name, title, unit, find in wanted:
        curves = [Curve(run.name, found.x, found.y) for run in runs if (found := find(run)) is not None]
        if curves:
            base = 1.0 if name == "compare-evaluations" else 0.0
            drawn.append(plots.lines(name, title, curves, x=step, y=unit, base=base))
    return drawn


def evaluation_curve(run: RunFacts) -> Curve | None:
    """The pooled acceptance length at each evaluation."""
    return series(run.evaluations, "acceptance_length")


def acceptance_plots(runs: Sequence[RunFacts]) -> list[Plot]:
    """Acceptance of the runs that were measured, side by side; categories and bins that all of them have."""
    measured = [run for run in runs if run.acceptance is not None]
    if len(measured) < 2:
        return []
    drawn = []
    for name, title, find in (
        ("compare-categories", "Acceptance length by category", by_category),
        ("compare-contexts", "Acceptance length by context length", lambda run: by_context(run.dialogues)),
    ):
        found = [{entry.label: entry for entry in find(run)} for run in measured]
        shared = [label for label in found[0] if all(label in entries for entries in found)]
        if shared:
            groups = [
                (run.name, estimates([entries[label] for label in shared]))
                for run, entries in zip(measured, found, strict=True)
            ]
            drawn.append(plots.intervals(name, title, groups, x="tokens a step", least=1.0))
    shares = [(run.acceptance or {})["per_position"] for run in measured]
    depth = max(map(len, shares))
    filled = [(run.name, [*own, *[0.0] * (depth - len(own))]) for run, own in zip(measured, shares, strict=True)]
    labels = [str(k + 1) for k in range(depth)]
    title = "Accepted up to each position"
    drawn.append(plots.bars("compare-positions", title, filled, labels, x="position", y="share of steps", top=1.0))
    return drawn


def differing(runs: Sequence[RunFacts]) -> list[tuple[str, list[str]]]:
    """Keys of the recipes in which the runs differ, with each run's value; runs without a recipe are left out."""
    recipes = [run.recipe for run in runs]

    def value(recipe: Recipe | None, section: str, key: str) -> Any:
        return "?" if recipe is None else as_text(getattr(getattr(recipe, section), key))

    found = []
    for section, key in Recipe.keys():
        if (section, key) == ("training", "output_dir"):
            continue
        values = [value(recipe, section, key) for recipe in recipes]
        if len({text for text in values if text != "?"}) > 1:
            found.append((f"{section}.{key}", values))
    return found
