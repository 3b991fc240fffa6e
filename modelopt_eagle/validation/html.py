"""The report as one HTML file with plots (extra ``report``)."""

from __future__ import annotations

import base64
import io
from pathlib import Path

from modelopt_eagle.common.acceptance import length_text
from modelopt_eagle.common.files import write_whole
from modelopt_eagle.common.package import require_extra
from modelopt_eagle.validation.report import AcceptanceReport, speed_line
from modelopt_eagle.validation.speed import Speed
from modelopt_eagle.validation.sweep import advice, plan_name

BLUE = "#2b6cb0"

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Acceptance of {{ report.target }}</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 52rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0 } th, td { padding: .25rem .8rem; text-align: right }
th:first-child, td:first-child { text-align: left } thead th { border-bottom: 2px solid #222 }
tbody tr:nth-child(even) { background: #f4f4f4 } img { max-width: 100% }
pre { white-space: pre-wrap; background: #f4f4f4; padding: .8rem }
.number { font-size: 2.2rem; font-weight: 600 }
</style></head><body>
<h1>Acceptance length</h1>
<p><span class="number">{{ "%.3f"|format(report.acceptance_length) }}</span>
tokens a verification step, 95&nbsp;% interval
{{ "%.3f"|format(report.ci95[0]) }} to {{ "%.3f"|format(report.ci95[1]) }},
over {{ report.steps }} steps of {{ report.prompts }} prompts.</p>
<p>Target {{ report.target }}, {{ report.drafted }} a step, commit {{ report.commit }}.
{% if speed %}{{ speed|capitalize }}.{% endif %}
{% if report.too_long %}{{ report.too_long }} turns were left out: they do not fit the target's window.{% endif %}</p>
<h2>By category</h2>
<img alt="acceptance length by category" src="data:image/png;base64,{{ categories_plot }}">
<table><thead><tr><th>category</th><th>prompts</th><th>steps</th><th>acceptance length</th></tr></thead><tbody>
{% for name, value in report.per_category.items() %}
<tr><td>{{ name }}</td><td>{{ report.counts[name][0] }}</td><td>{{ report.counts[name][1] }}</td>
<td>{{ length_text(value) }}</td></tr>
{% endfor %}</tbody></table>
<h2>By {{ place }}</h2>
<p>Share of steps in which a {{ place }} was accepted with all before it.</p>
<img alt="acceptance by {{ place }}" src="data:image/png;base64,{{ positions_plot }}">
{% if report.speed %}<h2>What a step costs</h2>
<p>Seconds of a step over one of plain decoding. Drafting pays where the acceptance length is above their sum,
{{ "%.2f"|format(report.speed.break_even) }}; on the prompts that were timed it was
{{ "%.2f"|format(report.speed.acceptance_length) }}.</p>
<img alt="cost of a step" src="data:image/png;base64,{{ costs_plot }}">{% endif %}
{% if report.sweep %}<h2>Draft shapes on this machine</h2>
<p>{{ advice|capitalize }}.</p>
<img alt="speed-up by draft shape" src="data:image/png;base64,{{ sweep_plot }}">
<table><thead><tr><th>draft</th><th>acceptance length</th><th>speed-up</th><th>break-even</th></tr></thead><tbody>
{% for row in report.sweep %}<tr><td>{{ plan_name(row) }}</td><td>{{ "%.3f"|format(row.acceptance_length) }}</td>
<td>{{ "%.2f"|format(row.speedup) }}</td><td>{{ "%.2f"|format(row.break_even) }}</td></tr>{% endfor %}
</tbody></table>{% endif %}
<h2>First prompt, as the target saw it</h2>
<pre>{{ report.first_prompt }}</pre>
</body></html>
"""


def write_html(report: AcceptanceReport, path: str | Path) -> Path:
    """Write the report.

    Returns:
        the file.

    Raises:
        MissingExtraError: matplotlib or jinja2 is not installed.
    """
    jinja2 = require_extra("jinja2", "report")
    page = jinja2.Environment(autoescape=True).from_string(_PAGE)
    low, high = report.ci95
    measured = {name: length for name, length in report.per_category.items() if length is not None}
    place, speed = "depth" if report.plan.is_tree else "position", report.speed
    text = page.render(
        report=report,
        place=place,
        speed=speed_line(speed) if speed is not None else "",
        plan_name=plan_name,
        length_text=length_text,
        categories_plot=_bars(list(measured), list(measured.values()), "tokens a step", (low, high)),
        positions_plot=_bars(
            [str(k + 1) for k in range(len(report.per_position))], report.per_position, "share of steps", None
        ),
        costs_plot="" if speed is None else _costs(speed),
        sweep_plot=_sweep(report.sweep) if report.sweep else "",
        advice=advice(report.sweep) if report.sweep else "",
    )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_whole(path, text)


def _bars(names: list[str], values: list[float], label: str, band: tuple[float, float] | None) -> str:
    """A bar chart as base64 PNG; ``band`` is drawn behind the bars (the pooled interval)."""
    figure, axes = _axes(3)
    if band is not None:
        axes.axhspan(*band, color="#cfe3ff", label="all prompts, 95 %")
        axes.legend(frameon=False)
    bars = axes.bar(names, values, color=BLUE, width=0.6)
    axes.bar_label(bars, fmt="%.2f")
    axes.set_ylabel(label)
    axes.tick_params(axis="x", rotation=20 if len(names) > 5 else 0)
    return _picture(figure, axes)


def _costs(speed: Speed) -> str:
    """Draft, verification and the rest of a step, side by side, in plain steps."""
    figure, axes = _axes(1.7)
    left = 0.0
    for name, seconds, color in (
        ("draft", speed.draft_step, BLUE),
        ("verify", speed.verify_step, "#90b4de"),
        ("rest", speed.other_step, "#c8c8c8"),
    ):
        share = seconds / speed.plain_step if speed.plain_step else 0.0
        axes.barh([""], [share], left=[left], color=color, height=0.5, label=f"{name} {share:.2f}")
        left += share
    axes.axvline(speed.acceptance_length, color="#222", linestyle="--", label="acceptance length")
    axes.set_xlabel("plain steps")
    axes.set_xlim(0, 1.08 * max(left, speed.acceptance_length))
    axes.tick_params(axis="y", length=0)
    figure.legend(frameon=False, ncols=4, loc="outside upper center", fontsize="small")
    return _picture(figure, axes)


def _sweep(rows: list[dict]) -> str:
    """Speed-up of every shape, the fastest on top, its acceptance length beside it; the line is plain decoding."""
    figure, axes = _axes(0.6 + 0.3 * len(rows))
    names = [plan_name(row) for row in rows]
    bars = axes.barh(names, [row["speedup"] for row in rows], color=BLUE, height=0.65)
    labels = [f"{row['speedup']:.2f}x at {row['acceptance_length']:.2f} tokens a step" for row in rows]
    axes.bar_label(bars, labels, padding=4, fontsize="small", bbox={"facecolor": "white", "linewidth": 0, "pad": 1})
    axes.axvline(1, color="#222", linestyle="--", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlabel("speed-up over plain decoding")
    axes.set_xlim(0, 1.8 * max(1.0, *(row["speedup"] for row in rows)))
    return _picture(figure, axes)


def _axes(height: float):
    """An empty figure of this height in inches, and its axes."""
    figure = require_extra("matplotlib.figure", "report").Figure(figsize=(7, height), dpi=110, layout="constrained")
    return figure, figure.add_subplot()


def _picture(figure, axes) -> str:
    """A finished figure as base64 PNG."""
    axes.spines[["top", "right"]].set_visible(False)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return base64.b64encode(picture.getvalue()).decode()
