"""The page of a bench: speed and acceptance of a head in a live engine."""

from __future__ import annotations

from pathlib import Path

from modelopt_eagle.common.acceptance import shares_of_counts
from modelopt_eagle.common.files import write_whole
from modelopt_eagle.report import plots
from modelopt_eagle.report.page import render
from modelopt_eagle.report.plots import Curve, Plot
from modelopt_eagle.serving.bench_report import ALL_SETS, WITH, BenchReport, Cell, Side, percentile


def write_bench(report: BenchReport, file: str | Path) -> Path:
    """Write the page of a bench.

    Args:
        report: of a bench that measured something, to its end or not.
        file: the page.

    Returns:
        the page.

    Raises:
        MissingExtraError: matplotlib or jinja2 is not installed.
    """
    file = Path(file)
    text = render(
        "bench.html", report=report, plots=[*speed_plots(report), *acceptance_plots(report)],
        speed=report.speed_rows(), acceptance=report.acceptance_rows(), notes=report.notes(),
    )  # fmt: skip
    file.parent.mkdir(parents=True, exist_ok=True)
    return write_whole(file, text)


def overall(side: Side) -> list[Cell]:
    """The row of each concurrency: of all sets, or of the only one."""
    rows = {cell.concurrency: cell for cell in side.rows()}  # the row of all sets comes last
    return [cell for cell in rows.values() if cell.prompts == ALL_SETS or len(side_sets(side)) == 1]


def side_sets(side: Side) -> set[str]:
    """Names of the sets that a server was asked."""
    return {cell.prompts for cell in side.cells}


def speed_plots(report: BenchReport) -> list[Plot]:
    """Tokens a second and time to the first token over concurrency, a curve a server."""
    speed, first = [], []
    for side in report.sides:
        cells = overall(side)
        told = [cell for cell in cells if cell.tokens_per_second is not None]
        timed = [cell for cell in cells if cell.first_token]
        if told:
            values = [cell.tokens_per_second or 0.0 for cell in told]
            speed.append(Curve(f"{side.name} the head", [cell.concurrency for cell in told], values))
        if timed:
            medians = [1000 * percentile(cell.first_token, 50) for cell in timed]
            first.append(Curve(f"{side.name} the head", [cell.concurrency for cell in timed], medians))
    made = []
    for name, title, curves, unit in (
        ("bench-speed", "New tokens a second", speed, "tokens a second"),
        ("bench-first", "Time to the first token, median", first, "milliseconds"),
    ):
        if curves:
            made.append(plots.lines(name, title, curves, x="requests at a time", y=unit))
    return made


def acceptance_plots(report: BenchReport) -> list[Plot]:
    """Shares of drafts accepted up to each position, of the first concurrency: the sets side by side, or the categories
    of the only one."""
    side = next((side for side in report.sides if side.name == WITH), None)
    if side is None or not side.cells:
        return []
    level = side.cells[0].concurrency
    rows = [cell for cell in side.rows() if cell.concurrency == level and cell.prompts != ALL_SETS]
    if len(side_sets(side)) > 1:
        found = [(cell.prompts, cell.acceptance) for cell in rows if cell.category is None]
    else:
        found = [(cell.category or "all", cell.acceptance) for cell in rows] if len(rows) > 1 else [
            (cell.prompts, cell.acceptance) for cell in rows
        ]  # fmt: skip
    told = [(name, each) for name, each in found if each is not None and each.drafts and each.positions]
    if not told:
        return []
    depth = max(len(each.positions) for _, each in told)
    groups = [
        (name, [*shares_of_counts(each.positions, each.drafts), *[0.0] * (depth - len(each.positions))])
        for name, each in told
    ]
    title = f"Accepted up to each position, {level} at a time"
    labels = [str(k + 1) for k in range(depth)]
    return [plots.bars("bench-positions", title, groups, labels, x="position", y="share of drafts", top=1.0)]
