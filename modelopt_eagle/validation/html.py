"""The report as one HTML file with plots (extra ``report``)."""

from __future__ import annotations

import base64
import io
import os
from pathlib import Path

from modelopt_eagle.errors import require_extra

from .report import AcceptanceReport, speed_line
from .sweep import plan_name

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
<p>Target {{ report.target }}, drafting a {{ drafted }}, commit {{ report.commit }}.
{% if speed %}{{ speed|capitalize }}.{% endif %}
{% if report.too_long %}{{ report.too_long }} turns were left out: they do not fit the target's window.{% endif %}</p>
<h2>By category</h2>
<img alt="acceptance length by category" src="data:image/png;base64,{{ categories_plot }}">
<table><thead><tr><th>category</th><th>prompts</th><th>steps</th><th>acceptance length</th></tr></thead><tbody>
{% for name, value in report.per_category.items() %}
<tr><td>{{ name }}</td><td>{{ report.counts[name][0] }}</td><td>{{ report.counts[name][1] }}</td>
<td>{{ "%.3f"|format(value) }}</td></tr>
{% endfor %}</tbody></table>
<h2>By position</h2>
<p>Share of steps in which a position was accepted with all before it.</p>
<img alt="acceptance by position" src="data:image/png;base64,{{ positions_plot }}">
{% if report.sweep %}<h2>Draft shapes on this machine</h2>
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

    Raises:
        MissingExtraError: matplotlib or jinja2 is not installed.
    """
    jinja2 = require_extra("jinja2", "report")
    page = jinja2.Environment(autoescape=True).from_string(_PAGE)
    low, high = report.ci95
    shape = report.plan
    drafted = f"chain of {shape.depth} tokens"
    if shape.is_tree:
        drafted = f"tree of topk {shape.topk}, depth {shape.depth} and {shape.num_nodes} nodes"
    text = page.render(
        report=report,
        drafted=drafted,
        speed=speed_line(report.speed) if report.speed is not None else "",
        plan_name=plan_name,
        categories_plot=_bars(
            list(report.per_category), list(report.per_category.values()), "tokens a step", (low, high)
        ),
        positions_plot=_bars(
            [str(k + 1) for k in range(len(report.per_position))], report.per_position, "share of steps", None
        ),
    )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".part")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)
    return path


def _bars(names: list[str], values: list[float], label: str, band: tuple[float, float] | None) -> str:
    """A bar chart as base64 PNG; ``band`` is drawn behind the bars (the pooled interval)."""
    figure = require_extra("matplotlib.figure", "report").Figure(figsize=(7, 3), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    if band is not None:
        axes.axhspan(*band, color="#cfe3ff", label="all prompts, 95 %")
        axes.legend(frameon=False)
    bars = axes.bar(names, values, color="#2b6cb0", width=0.6)
    axes.bar_label(bars, fmt="%.2f")
    axes.set_ylabel(label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="x", rotation=20 if len(names) > 5 else 0)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return base64.b64encode(picture.getvalue()).decode()
