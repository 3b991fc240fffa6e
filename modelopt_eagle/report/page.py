"""``report/index.html``: a whole run on one page without scripts, nothing fetched, and its plots as PNG beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from modelopt_eagle.common.files import write_whole
from modelopt_eagle.common.package import require_extra
from modelopt_eagle.data.files import ASSETS
from modelopt_eagle.data.report import REASONS
from modelopt_eagle.report import plots
from modelopt_eagle.report.facts import Measured, RunFacts, by_category, by_context
from modelopt_eagle.report.plots import Curve, Estimate, Plot
from modelopt_eagle.validation.sweep import advice, plan_name

EXAMPLES, EXAMPLE_CHARACTERS = 8, 1500
"""Answers shown, one a category as far as they go, and how much of each."""

OUTDATED = (
    "the acceptance was measured on an earlier head of this run, which was trained further since: the same "
    "train-and-export command measures the newer one"
)
"""What a page says of a measurement that its run has left behind."""

SHADES = 5
"""Colours of accepted runs; longer ones have the last."""


def write_page(facts: RunFacts, folder: str | Path, file: str = "index.html", pictures: bool = True) -> Path:
    """Write the page of a run, and its plots as PNG beside it.

    Args:
        facts: from :func:`~modelopt_eagle.report.facts.read_run`.
        folder: where to; ``RUN/report`` for a run.
        file: name of the page.
        pictures: whether the plots are written as PNG too.

    Returns:
        the page.

    Raises:
        MissingExtraError: matplotlib or jinja2 is not installed.
    """
    folder = Path(folder)
    drawn = [*training_plots(facts), *acceptance_plots(facts), *cost_plots(facts), *data_plots(facts)]
    folder.mkdir(parents=True, exist_ok=True)
    for plot in drawn if pictures else ():
        write_whole(folder / f"{plot.name}.png", plot.png)
    text = render(
        "page.html",
        facts=facts,
        plots={plot.name: plot for plot in drawn},
        training=[plot for plot in drawn if plot.name.startswith("training-")],
        categories=by_category(facts),
        stepless=[name for name, value in (facts.acceptance or {}).get("per_category", {}).items() if value is None],
        contexts=by_context(facts.dialogues),
        headline=headline(facts),
        notes=[*([OUTDATED] if facts.outdated else []), *(facts.acceptance or {}).get("notes", [])],
        examples=examples(facts.dialogues),
        data=data_rows(facts),
        advice=advice(facts.acceptance["sweep"]) if facts.acceptance and facts.acceptance.get("sweep") else "",
        plan_name=plan_name,
        drafted=drafted(facts.acceptance or {}),
        place="depth" if is_tree(facts.acceptance or {}) else "position",
        shades=SHADES,
    )
    return write_whole(folder / file, text)


def write_sheet(
    file: str | Path, title: str, notes: Sequence[str], headings: Sequence[str], rows: Sequence[Sequence[str]],
    drawn: Sequence[Plot],
) -> Path:  # fmt: skip
    """Write a page of sentences, one table and plots, with the plots as PNG beside it.

    Args:
        file: the page.
        title: its heading.
        notes: paragraphs before the table.
        headings, rows: of the table, as text; all rows are as long as the headings.
        drawn: the plots, below the table.

    Returns:
        the page.

    Raises:
        MissingExtraError: jinja2 is not installed.
    """
    file = Path(file)
    text = render("sheet.html", title=title, notes=notes, headings=headings, rows=rows, plots=drawn)
    file.parent.mkdir(parents=True, exist_ok=True)
    for plot in drawn:
        write_whole(file.parent / f"{plot.name}.png", plot.png)
    return write_whole(file, text)


def render(template: str, **values: Any) -> str:
    """A shipped template filled in; everything that is not a plot of ours is escaped."""
    jinja2 = require_extra("jinja2", "report")
    markup = require_extra("markupsafe", "report").Markup
    loader = jinja2.FileSystemLoader(str(ASSETS))
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"svg": lambda plot: markup(plot.svg), "plain": plain, "clock": clock}
    style = markup((ASSETS / "page.css").read_text(encoding="utf-8"))
    return environment.get_template(template).render(style=style, **values)


def plain(text: Any) -> str:
    """Text without the control characters that a page may not hold."""
    return "".join(c if c in "\n\t" or (ord(c) >= 32 and ord(c) != 127) else "\ufffd" for c in str(text))


def clock(seconds: float) -> str:
    """A duration in its largest fitting units."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def headline(facts: RunFacts) -> dict[str, Any]:
    """The numbers on top: what was measured, or what the last evaluation walked."""
    acceptance, evaluations = facts.acceptance, facts.evaluations
    if acceptance is not None:
        low, high = acceptance["ci95"]
        return {
            "kind": "measured", "length": acceptance["acceptance_length"], "low": low, "high": high,
            "prompts": acceptance["prompts"], "steps": acceptance["steps"], "speedup": acceptance.get("speedup"),
            "costs": acceptance.get("costs"), "target": acceptance["target"], "commit": acceptance["commit"],
        }  # fmt: skip
    if evaluations:
        best = max(evaluations, key=lambda entry: entry["acceptance_length"])
        return {"kind": "walked", "length": best["acceptance_length"], "step": best["step"]}
    return {"kind": "none"}


def is_tree(acceptance: dict[str, Any]) -> bool:
    """Whether trees were drafted."""
    return acceptance.get("draft", {}).get("mode") == "tree"


def drafted(acceptance: dict[str, Any]) -> str:
    """What was drafted a step, in words."""
    draft = acceptance.get("draft")
    if not draft:
        return ""
    if is_tree(acceptance):
        return f"tree of topk {draft['topk']}, depth {draft['depth']}, {draft['num_nodes']} nodes"
    return f"chain of {draft['num_steps']} drafted tokens"


def series(history: Sequence[dict[str, Any]], key: str, factor: float = 1.0) -> Curve | None:
    """A metric over the steps, ``None`` where no log line has it."""
    found = [(entry["step"], factor * entry[key]) for entry in history if entry.get(key) is not None]
    return Curve(key, [step for step, _ in found], [value for _, value in found]) if found else None


def by_depth(history: Sequence[dict[str, Any]], key: str) -> list[Curve]:
    """One curve a rollout step of a metric ``[K]``, without points where it was not trained (``eagle.ttt_warmup``)."""
    depth = max((len(entry[key]) for entry in history), default=0)
    curves = []
    for k in range(depth):
        trained = [entry for entry in history if k < len(entry[key]) and (k == 0 or entry["per_step"][k] != 0)]
        found = [(entry["step"], entry[key][k]) for entry in trained]
        if found:
            curves.append(Curve(f"step {k + 1}", [step for step, _ in found], [value for _, value in found]))
    return curves


def training_plots(facts: RunFacts) -> list[Plot]:
    """Curves of the training; those that nothing was logged for are left out."""
    history, evaluations, step = facts.history, facts.evaluations, "optimiser step"
    drawn = []
    if history:
        curves = by_depth(history, "per_step")
        drawn.append(plots.lines("training-loss", "Loss by rollout step", curves, x=step, y="loss"))
        curves = by_depth(history, "accuracy")
        title = "Accuracy by rollout step"
        drawn.append(plots.lines("training-accuracy", title, curves, x=step, y="share of positions"))
    if evaluations:
        curves = evaluation_curves(evaluations)
        title = "Acceptance length at each evaluation"
        drawn.append(plots.lines("training-evaluations", title, curves, x=step, y="tokens a step", base=1.0))
    for key, title, unit in (
        ("learning_rate", "Learning rate", "learning rate"),
        ("grad_norm", "Gradient norm", "norm before clipping"),
        ("preservation_kl", "Distance of the adapted target", "nats a position"),
        ("tokens_per_second", "Tokens a second", "tokens a second"),
        ("waiting", "Waiting for features", "share of the time"),
    ):
        if (curve := series(history, key)) is not None:
            top = 1.0 if key == "waiting" else None
            name = f"training-{key.replace('_', '-')}"
            drawn.append(plots.lines(name, title, [curve], x=step, y=unit, top=top))
    return drawn


def evaluation_curves(evaluations: Sequence[dict[str, Any]]) -> list[Curve]:
    """The pooled acceptance length over the steps, and that of each file where there are several."""
    steps = [entry["step"] for entry in evaluations]
    curves = [Curve("all", steps, [entry["acceptance_length"] for entry in evaluations])]
    for name in evaluations[-1].get("by_file", {}):
        found = [entry for entry in evaluations if name in entry.get("by_file", {})]
        values = [entry["by_file"][name]["acceptance_length"] for entry in found]
        curves.append(Curve(Path(name).name, [entry["step"] for entry in found], values))
    return curves


def estimates(measured: Sequence[Measured]) -> list[Estimate]:
    """As a plot takes them."""
    return [Estimate(entry.label, entry.value, entry.low, entry.high) for entry in measured]


def acceptance_plots(facts: RunFacts) -> list[Plot]:
    """By category, by position, by context length; none without a measurement."""
    acceptance = facts.acceptance
    if acceptance is None:
        return []
    unit, drawn = "tokens a step", []
    low, high = acceptance["ci95"]
    pooled = Estimate("all prompts", acceptance["acceptance_length"], low, high)
    found = [pooled, *estimates(by_category(facts))]
    title = "Acceptance length by category"
    drawn.append(plots.intervals("acceptance-categories", title, [(facts.name, found)], x=unit, least=1.0))
    place, shares = "depth" if is_tree(acceptance) else "position", acceptance["per_position"]
    labels = [str(k + 1) for k in range(len(shares))]
    title = f"Accepted up to each {place}"
    drawn.append(
        plots.bars("acceptance-positions", title, [(facts.name, shares)], labels, x=place, y="share of steps", top=1.0)
    )
    if contexts := by_context(facts.dialogues):
        title = "Acceptance length by context length"
        drawn.append(
            plots.intervals("acceptance-contexts", title, [(facts.name, estimates(contexts))], x=unit, least=1.0)
        )
    return drawn


def cost_plots(facts: RunFacts) -> list[Plot]:
    """What a step costs, and the draft shapes of a sweep, where they were timed."""
    acceptance, drawn = facts.acceptance or {}, []
    costs = acceptance.get("costs")
    if costs and costs["plain_step"]:
        parts = [
            (name, costs[f"{key}_step"] / costs["plain_step"])
            for name, key in (("draft", "draft"), ("verify", "verify"), ("rest", "other"))
        ]
        timed = acceptance["speedup"] / costs["efficiency"] if costs.get("efficiency") else 0.0
        drawn.append(
            plots.stack("cost-step", "What a step costs", parts, ("acceptance length", timed), x="plain steps")
        )
    if sweep := acceptance.get("sweep"):
        values = [
            (plan_name(row), row["speedup"], f"{row['speedup']:.2f}x at {row['acceptance_length']:.2f}")
            for row in sweep
        ]
        drawn.append(plots.rows("cost-sweep", "Draft shapes", values, x="speed-up over plain decoding", mark=1.0))
    return drawn


def data_plots(facts: RunFacts) -> list[Plot]:
    """How long the training rows are."""
    lengths = (facts.data or {}).get("lengths")
    if not lengths:
        return []
    title = "Length of the training rows"
    return [plots.histogram("data-lengths", title, lengths["edges"], lengths["counts"], x="tokens", y="rows")]


def data_rows(facts: RunFacts) -> dict[str, Any] | None:
    """The account of the data, as a table shows it."""
    data = facts.data
    if data is None:
        return None
    dropped = [(reason, REASONS.get(reason, ""), count) for reason, count in sorted(data["dropped"].items())]
    notes = [(name.replace("_", " "), count) for name, count in sorted(data["notes"].items())]
    return {**data, "dropped": dropped, "notes": notes, "share": data["supervised"] / max(data["tokens"], 1)}


def examples(dialogues: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """First answers, one of each category and then more, as runs of accepted text and the target's own tokens."""
    asked = [row for row in dialogues if row["turns"]]
    firsts: dict[str, dict[str, Any]] = {}
    for row in asked:
        firsts.setdefault(row["category"], row)
    begun = {row["id"] for row in firsts.values()}
    chosen = [*firsts.values(), *(row for row in asked if row["id"] not in begun)][:EXAMPLES]
    shown = []
    for row in chosen:
        turn, pieces, length = row["turns"][0], [], 0
        for number, (accepted, own) in enumerate(turn["pieces"]):
            if length > EXAMPLE_CHARACTERS:
                break
            length += len(accepted) + len(own)
            count = turn["accepted"][number - 1] if number else None
            pieces.append({"accepted": accepted, "own": own, "count": count, "shade": min(count or 0, SHADES)})
        steps = len(turn["accepted"])
        shown.append(
            {
                "id": row["id"], "category": row["category"], "question": turn["question"], "pieces": pieces,
                "cut": len(pieces) < len(turn["pieces"]), "steps": steps,
                "length": 1 + sum(turn["accepted"]) / steps if steps else 1.0,
            }
        )  # fmt: skip
    return shown
