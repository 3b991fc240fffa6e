"""Plots for pages: drawn once by matplotlib, as SVG that takes the page's colours and as PNG to lie beside it."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from modelopt_eagle.common.package import require_extra

INK, MUTED, LINE = "#1b1f23", "#5c6570", "#d5dae0"
"""Colours that the page replaces by its own, ``var(--ink)`` and so on, so that plots follow light, dark and print."""

SERIES = ("#2f7dc1", "#d97a1f", "#3f9a57", "#a05cc0", "#c9473d", "#7d8790", "#b39a1a", "#1fa3a3")
"""Colours of curves and bars; each is readable on white and on black."""

WIDTH = 4.4
"""Inches of a plot; at 9 points its text is readable where a page is 390 pixels wide."""

LABEL_LENGTH = 26
"""Characters of a name at an axis; tables show all of it."""

STYLE = {
    "font.size": 9.0,
    "font.family": "sans-serif",
    "svg.fonttype": "none",
    "text.parse_math": False,  # names come from data, and a $ in them is no formula
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": LINE,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "axes.formatter.useoffset": False,
}


@dataclass(frozen=True)
class Plot:
    """A finished plot.

    Attributes:
        name: of its file, without ending.
        title: what it shows, as a heading.
        alt: the same in words, for those who cannot see it.
        svg: an ``<svg>`` element for a page.
        png: the bytes of a picture on white.
    """

    name: str
    title: str
    alt: str
    svg: str
    png: bytes


@dataclass(frozen=True)
class Curve:
    """``y`` over ``x`` under a name."""

    label: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval under a name."""

    label: str
    value: float
    low: float
    high: float


def lines(
    name: str, title: str, curves: Sequence[Curve], *, x: str, y: str, base: float = 0.0, top: float | None = None
) -> Plot:
    """Curves over each other; a curve of one point is a dot.

    Args:
        name, title: of the plot.
        curves: what is drawn, each with a point at least.
        x, y: names of the axes.
        base: where the axis begins unless a value lies below it, such as 1 for acceptance lengths.
        top: end of the axis, such as 1 for shares.
    """

    def draw(axes: Any) -> None:
        for curve, color in zip(curves, colors(len(curves)), strict=True):
            marker = "o" if len(curve.x) <= 12 else None
            axes.plot(curve.x, curve.y, color=color, label=curve.label, marker=marker, markersize=3.5)
        axes.set(xlabel=x, ylabel=y)
        values = [value for curve in curves for value in curve.y]
        axes.set_ylim(*span(values, top, base))
        axes.xaxis.get_major_locator().set_params(integer=True, nbins=6)

    return finish(name, title, draw, 2.5, legend=len(curves) > 1, alt=f"{title}: {words(curves)}")


def intervals(
    name: str, title: str, groups: Sequence[tuple[str, Sequence[Estimate]]], *, x: str, least: float | None = None
) -> Plot:
    """A row of dots with intervals for each name, the groups (runs) below each other within it.

    Args:
        name, title: of the plot.
        groups: ``(run, estimates)``; all have the same labels in the same order.
        x: name of the axis.
        least: where the axis begins at the latest, such as 1 for acceptance lengths.
    """
    labels = [estimate.label for estimate in groups[0][1]]

    def draw(axes: Any) -> None:
        step = 0.7 / max(len(groups), 1)
        for number, ((label, estimates), color) in enumerate(zip(groups, colors(len(groups)), strict=True)):
            places = [row + (number - (len(groups) - 1) / 2) * step for row in range(len(estimates))]
            values = [estimate.value for estimate in estimates]
            errors = [
                [max(estimate.value - estimate.low, 0.0) for estimate in estimates],
                [max(estimate.high - estimate.value, 0.0) for estimate in estimates],
            ]
            axes.errorbar(
                values, places, xerr=errors, fmt="o", color=color, markersize=4.5, elinewidth=1.4, label=label
            )
        axes.set_yticks(range(len(labels)), [short(label) for label in labels])
        axes.set_ylim(len(labels) - 0.4, -0.6)
        axes.grid(axis="y", visible=False)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel(x)
        ends = [end for _, estimates in groups for e in estimates for end in (e.low, e.high, e.value)]
        margin = 0.04 * (max(ends) - min(ends)) or 0.5
        axes.set_xlim(min(ends) - margin if least is None else min(least, *ends), max(ends) + margin)

    height = 0.75 + len(labels) * (0.16 + 0.1 * len(groups))
    told = "; ".join(f"{e.label} {e.value:.2f}" for e in groups[0][1])
    return finish(name, title, draw, max(height, 1.3), legend=len(groups) > 1, alt=f"{title}: {told}")


def bars(
    name: str, title: str, groups: Sequence[tuple[str, Sequence[float]]], labels: Sequence[str], *, x: str, y: str,
    top: float | None = None,
) -> Plot:  # fmt: skip
    """Upright bars, the groups (runs) side by side, each with its value above it if there is one group."""

    def draw(axes: Any) -> None:
        width = 0.75 / max(len(groups), 1)
        for number, ((label, values), color) in enumerate(zip(groups, colors(len(groups)), strict=True)):
            places = [row + (number - (len(groups) - 1) / 2) * width for row in range(len(values))]
            drawn = axes.bar(places, values, width=0.92 * width, color=color, label=label)
            if len(groups) == 1 and len(values) <= 12:
                axes.bar_label(drawn, [f"{value:.2f}" for value in values], color=INK, fontsize=8.5, padding=1)
        axes.set_xticks(range(len(labels)), [short(label) for label in labels])
        axes.grid(axis="x", visible=False)
        axes.tick_params(axis="x", length=0)
        axes.set(xlabel=x, ylabel=y)
        axes.set_ylim(*span([value for _, values in groups for value in values], top))

    told = ", ".join(f"{label} {value:.2f}" for label, value in zip(labels, groups[0][1], strict=False))
    return finish(name, title, draw, 2.4, legend=len(groups) > 1, alt=f"{title}: {told}")


def rows(name: str, title: str, values: Sequence[tuple[str, float, str]], *, x: str, mark: float) -> Plot:
    """Lying bars, the first on top, each with a note behind it; a dashed line at ``mark``."""

    def draw(axes: Any) -> None:
        drawn = axes.barh(range(len(values)), [value for _, value, _ in values], color=SERIES[0], height=0.65)
        axes.bar_label(drawn, [note for _, _, note in values], color=INK, fontsize=8, padding=3)
        axes.axvline(mark, color=MUTED, linestyle="--", linewidth=1)
        axes.set_yticks(range(len(values)), [short(label) for label, _, _ in values])
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel(x)
        axes.set_xlim(0, 1.45 * max(mark, *(value for _, value, _ in values)))

    told = "; ".join(f"{label} {value:.2f}" for label, value, _ in values)
    return finish(name, title, draw, 0.8 + 0.24 * len(values), legend=False, alt=f"{title}: {told}")


def stack(name: str, title: str, parts: Sequence[tuple[str, float]], mark: tuple[str, float], *, x: str) -> Plot:
    """One lying bar put together of parts, and a marked place on its axis."""

    def draw(axes: Any) -> None:
        left = 0.0
        for (label, value), color in zip(parts, colors(len(parts)), strict=True):
            axes.barh([0], [value], left=[left], color=color, height=0.5, label=f"{label} {value:.2f}")
            left += value
        axes.axvline(mark[1], color=INK, linestyle="--", linewidth=1.2, label=f"{mark[0]} {mark[1]:.2f}")
        axes.set_yticks([])
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(x)
        axes.set_xlim(0, 1.08 * max(left, mark[1], 1e-9))

    told = ", ".join(f"{label} {value:.2f}" for label, value in (*parts, mark))
    return finish(name, title, draw, 1.7, legend=True, alt=f"{title}: {told}")


def histogram(name: str, title: str, edges: Sequence[int], counts: Sequence[int], *, x: str, y: str) -> Plot:
    """Counts between edges."""

    def draw(axes: Any) -> None:
        widths = [high - low for low, high in itertools.pairwise(edges)]
        axes.bar(list(edges[:-1]), counts, width=widths, align="edge", color=SERIES[0], linewidth=0)
        axes.grid(axis="x", visible=False)
        axes.set(xlabel=x, ylabel=y)
        axes.set_ylim(*span(counts))

    return finish(name, title, draw, 2.1, legend=False, alt=f"{title}: {min(edges)} to {max(edges) - 1}")


def colors(count: int) -> list[str]:
    """So many colours, from the beginning again where there are more than eight."""
    return [SERIES[number % len(SERIES)] for number in range(count)]


def span(values: Iterable[float], top: float | None = None, base: float = 0.0) -> tuple[float, float]:
    """An axis for values: from ``base`` where none is below it, and never empty."""
    found = list(values)
    low, high = min(found, default=base), max(found, default=base)
    margin = 0.1 * (high - min(low, base)) or 1.0
    return (base if low >= base else low - margin), (high + margin if top is None else top)


def one_line(text: str) -> str:
    """Text without line ends and control characters."""
    return "".join(character if character.isprintable() else " " for character in text)


def short(label: str) -> str:
    """A name for an axis: one line, cut where it is long."""
    line = one_line(label)
    return line if len(line) <= LABEL_LENGTH else line[: LABEL_LENGTH - 1] + "…"


def words(curves: Sequence[Curve]) -> str:
    """Where each curve begins and ends."""
    return "; ".join(f"{curve.label} from {curve.y[0]:.3g} to {curve.y[-1]:.3g}" for curve in curves)


def finish(name: str, title: str, draw: Callable[[Any], None], height: float, *, legend: bool, alt: str) -> Plot:
    """The plot that ``draw`` makes in new axes; the legend lies above them and never on them."""
    matplotlib = require_extra("matplotlib", "report")
    figures = require_extra("matplotlib.figure", "report")
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        figure = figures.Figure(figsize=(WIDTH, height), layout="constrained")
        axes = figure.add_subplot()
        draw(axes)
        if legend:
            handles, labels = axes.get_legend_handles_labels()
            figure.legend(
                handles, [short(label) for label in labels], loc="outside upper center",
                ncols=min(len(labels), 3), columnspacing=1.2, handlelength=1.4,
            )  # fmt: skip
        vector, picture = io.StringIO(), io.BytesIO()
        figure.savefig(vector, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        figure.savefig(picture, format="png", dpi=130, facecolor="white")
    alt = one_line(alt)
    return Plot(name, title, alt, for_page(vector.getvalue(), alt), picture.getvalue())


def for_page(svg: str, alt: str) -> str:
    """The element alone, with the page's colours, named for screen readers."""
    element = svg[svg.index("<svg") :]
    element = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", element, flags=re.S)  # page.css has the style
    element = re.sub(r'<g id="[^"]*">', "<g>", element)  # several plots share a page, and ids are told apart by it
    element = re.sub(r'^<svg[^>]*?viewBox="([^"]*)"[^>]*>', r'<svg class="plot" viewBox="\1" role="img">', element)
    element = element.replace('role="img">', f'role="img" aria-label="{escape(alt)}">', 1)
    for color, variable in ((INK, "--ink"), (MUTED, "--muted"), (LINE, "--line")):
        element = element.replace(color, f"var({variable})")
    return element
