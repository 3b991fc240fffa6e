"""Draw the concept pictures of the documentation: data flow, rollout, tree.

    python scripts/draw_concepts.py [--folder docs/images]

Writes three SVG files, the same bytes every time. Colours are taken from the reader's light or dark scheme.
"""

from __future__ import annotations

import argparse
from html import escape
from pathlib import Path

STYLE = """<style>
:root { --ink: #1f2328; --soft: #59636e; --line: #818b98; --box: #f6f8fa; --on: #0969da; --onbox: #ddf4ff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #f0f6fc; --soft: #9198a1; --line: #656c76; --box: #151b23; --on: #4493f8; --onbox: #122d4d; }
}
text { font: 13px system-ui, sans-serif; fill: var(--ink); text-anchor: middle; }
.soft { fill: var(--soft); } .left { text-anchor: start; } .right { text-anchor: end; } .bold { font-weight: 600; }
.small { font-size: 11px; }
rect { fill: var(--box); stroke: var(--line); } .on rect, rect.on { fill: var(--onbox); stroke: var(--on); }
rect.seen { fill: var(--on); stroke: none; } rect.unseen { fill: var(--box); stroke: none; }
path { fill: none; stroke: var(--line); stroke-width: 1.4; } path.on { stroke: var(--on); stroke-width: 2.4; }
path.tip { fill: var(--line); stroke: none; } path.tip.on { fill: var(--on); }
</style>"""


class Picture:
    """An SVG that grows by what is drawn on it.

    Args:
        width, height: in pixels.
        title: what it shows, for those who cannot see it.
    """

    def __init__(self, width: int, height: int, title: str):
        self._head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img"><title>{escape(title)}</title>'
        )
        self._parts: list[str] = []

    def text(self, x: float, y: float, words: str, kind: str = "") -> None:
        """A line of text around a point."""
        self._parts.append(f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(words)}</text>')

    def box(self, x: float, y: float, width: float, height: float, lines: list[str], on: bool = False) -> None:
        """A box with lines of text; its upper left corner is at ``(x, y)``."""
        kind = "on" if on else ""
        self._parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" class="{kind}"/>')
        top = y + height / 2 + 4.5 - 8.5 * (len(lines) - 1)
        for number, line in enumerate(lines):
            kind = "bold" if number == 0 and len(lines) > 1 else "" if number == 0 else "soft small"
            self.text(x + width / 2, top + 17 * number, line, kind)

    def cell(self, x: float, y: float, size: float, seen: bool) -> None:
        """A square of a mask."""
        kind = "seen" if seen else "unseen"
        self._parts.append(f'<rect x="{x:g}" y="{y:g}" width="{size:g}" height="{size:g}" class="{kind}"/>')

    def arrow(self, x: float, y: float, to_x: float, to_y: float, on: bool = False) -> None:
        """A straight arrow."""
        length = ((to_x - x) ** 2 + (to_y - y) ** 2) ** 0.5
        ux, uy = (to_x - x) / length, (to_y - y) / length
        back_x, back_y = to_x - 8 * ux, to_y - 8 * uy
        kind = "on" if on else ""
        self._parts.append(f'<path class="{kind}" d="M{x:.1f} {y:.1f}L{back_x:.1f} {back_y:.1f}"/>')
        corners = f"{to_x:.1f} {to_y:.1f}L{back_x - 4 * uy:.1f} {back_y + 4 * ux:.1f}"
        self._parts.append(f'<path class="tip {kind}" d="M{corners}L{back_x + 4 * uy:.1f} {back_y - 4 * ux:.1f}Z"/>')

    def svg(self) -> str:
        """The file's text."""
        return "\n".join([self._head, STYLE, *self._parts, "</svg>"]) + "\n"


def flow() -> Picture:
    """From conversations to engines."""
    picture = Picture(880, 250, "Data flow: conversations, features, training, validation, export, engines")
    stages = [
        ("conversations", ["ids and mask:", "what the target", "was served and wrote"]),
        ("features", ["states of the frozen", "target: online, stored", "or streamed"]),
        ("training", ["K-step rollout,", "decayed loss"]),
        ("validation", ["lossless decoding:", "acceptance, speed"]),
        ("export", ["one folder,", "read back, compared"]),
    ]
    width, gap = 146, 26
    for number, (name, lines) in enumerate(stages):
        x = 20 + number * (width + gap)
        picture.box(x, 70, width, 88, [name, *lines], on=name == "training")
        if number:
            picture.arrow(x - gap + 2, 114, x - 2, 114)
    picture.box(192, 10, 146, 34, ["frozen target"])
    picture.arrow(265, 46, 265, 68)
    picture.arrow(340, 27, 600, 68)
    for number, engine in enumerate(["vLLM", "SGLang", "TensorRT-LLM", "llama.cpp"]):
        x = 370 + number * 126
        picture.box(x, 206, 114, 34, [engine])
        picture.arrow(781, 160, x + 57, 204)
    picture.text(190, 228, "the same head, the same numbers:", "soft")
    return picture


def rollout() -> Picture:
    """The steps at one anchor, and what each step's query sees."""
    picture = Picture(880, 430, "Rollout: three steps at one anchor, and the keys that each step sees")
    picture.text(20, 24, "Three steps at anchor i", "left bold")
    for step in range(3):
        x = 150 + 230 * step
        picture.box(x, 84, 130, 60, [f"step {step}", "one draft layer"], on=True)
        after = f"i+{1 + step}"
        picture.text(x + 65, 56, f"E(x[{after}])")
        picture.arrow(x + 65, 62, x + 65, 82)
        picture.arrow(x + 65, 146, x + 65, 172)
        picture.text(x + 65, 188, f"q: guesses x[i+{2 + step}]")
        picture.text(x + 65, 206, f"against the target's z[{after}]", "soft small")
        if step:
            picture.arrow(x - 100, 114, x - 2, 114)
            picture.text(x - 50, 106, "state", "soft small")
    picture.text(66, 110, "a[i]")
    picture.text(66, 126, "target's states", "soft small")
    picture.arrow(112, 114, 148, 114)
    picture.text(20, 250, "Keys that the query of each step sees, six positions", "left bold")
    size, count = 17, 6
    for step in range(3):
        left = 60 + 270 * step
        picture.text(left + size * count / 2, 278, f"queries of step {step}", "soft")
        for row in range(count):
            for column in range(count):
                picture.cell(left + column * (size + 1), 288 + row * (size + 1), size, column <= row)
            for own in range(step):
                picture.cell(left + (count + 0.7 + 1.2 * own) * (size + 1), 288 + row * (size + 1), size, True)
        picture.text(left + size * count / 2, 416, "step-0 keys", "soft small")
        if step:
            picture.text(left + (count + 0.7 + 0.6 * step) * (size + 1), 416, "own column", "soft small")
    return picture


def tree() -> Picture:
    """A draft tree, the path that the target accepts, and its mask."""
    picture = Picture(880, 330, "Draft tree: nodes, the accepted path, and the mask of its verification")
    nodes = {  # name: parent, place, accepted
        "The": (None, (80, 150), True),
        "cat": ("The", (220, 80), True),
        "dog": ("The", (220, 220), False),
        "sat": ("cat", (370, 40), True),
        "is": ("cat", (370, 120), False),
        "ran": ("dog", (370, 220), False),
    }
    picture.text(20, 24, "Six nodes, verified in one forward of the target", "left bold")
    for parent, (x, y), accepted in nodes.values():
        if parent is not None:
            from_x, from_y = nodes[parent][1]
            picture.arrow(from_x + 40, from_y + 17, x - 40, y + 17, accepted)
    for name, (_, (x, y), accepted) in nodes.items():
        picture.box(x - 38, y, 76, 34, [name], accepted)
    lines = (
        "The target writes “cat”, then “sat”: two drafted tokens are kept, and its own next token",
        "comes with the same forward. The text is the target's, whatever was drafted.",
    )
    for number, line in enumerate(lines):
        picture.text(20, 290 + 18 * number, line, "left")
    picture.text(520, 24, "Mask: a node sees the context and its ancestors", "left bold")
    names, size = list(nodes), 26
    for row, name in enumerate(names):
        above, ancestors = name, set()
        while above is not None:
            ancestors.add(above)
            above = nodes[above][0]
        picture.text(590, 92 + row * (size + 2), name, "right small")
        picture.text(630 + row * (size + 2), 66, name, "small")
        for column, other in enumerate(names):
            picture.cell(617 + column * (size + 2), 74 + row * (size + 2), size, other in ancestors)
    return picture


PICTURES = {"flow": flow, "rollout": rollout, "tree": tree}
"""File name without its ending → what draws it."""


def main(argv: list[str] | None = None) -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).resolve().parents[1] / "docs" / "images"
    parser.add_argument("--folder", type=Path, default=default, help="where the files are written (docs/images)")
    folder = parser.parse_args(argv).folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        (folder / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
