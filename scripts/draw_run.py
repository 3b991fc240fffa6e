"""Take the pictures of README.md from a finished run: its page, and what its command prints in a terminal.

    python scripts/draw_run.py ckpts/quickstart [--log run.log] [--folder docs/images]

writes ``page.png``, photographed by a headless Chromium (``apt-get install chromium``), and ``terminal.svg``, drawn of
real output: of the log given, as ``bash train_eagle3_and_export.sh 2>&1 | tee run.log`` keeps it, or else of what the
finished command prints when it is called again. To make both anew for a release:

    bash train_eagle3_and_export.sh 2>&1 | tee run.log
    python scripts/draw_run.py ckpts/quickstart --log run.log
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from html import escape
from io import BytesIO
from pathlib import Path

COMMAND = "bash train_eagle3_and_export.sh"
COLUMNS, LINE, MARGIN = 112, 17, 14
"""Letters of a line of the terminal, and pixels of a line and around them all."""
KEPT = ((r"^features ", 1, 1), (r"^step \d+/", 3, 3), (r"^validate ", 1, 1))
"""Lines that come often: what they begin with, and how many of the first and of the last are shown."""
WIDTH, HEIGHT, COLOURS = 1280, 1500, 64
"""Of the photograph: pixels, and colours that are kept of it."""
STYLE = (
    "<style>text { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #d1d7e0; } "
    ".prompt { fill: #4493f8; font-weight: 600; } .soft { fill: #9198a1; }</style>"
)


def of_the_run(lines: Sequence[str]) -> list[str]:
    """The lines of a log from the run's first one to its result: neither the environment's making nor how to serve."""
    begun = [number for number, line in enumerate(lines) if " a run into " in line]
    lines = lines[begun[0] if begun else 0 :]
    ended = [number for number, line in enumerate(lines) if line == "serve it:"]
    here = f"{Path.cwd()}/"
    return [line.replace(here, "") for line in lines[: ended[0] if ended else len(lines)]]


def shortened(lines: Sequence[str]) -> list[str]:
    """The lines of a log without most of those that come again and again; what is left out is counted."""
    kept: list[str] = []
    left_out = 0
    places = {
        pattern: [number for number, line in enumerate(lines) if re.search(pattern, line)] for pattern, _, _ in KEPT
    }
    dropped = {
        number
        for pattern, first, last in KEPT
        for number in places[pattern][first : max(first, len(places[pattern]) - last)]
    }
    for number, line in enumerate(lines):
        if number in dropped:
            left_out += 1
            continue
        if left_out:
            kept.append(f"… {left_out} more lines")
            left_out = 0
        kept.append(line)
    return kept


def terminal(lines: Sequence[str], command: str = COMMAND) -> str:
    """An SVG of a terminal in which a command was typed and printed these lines; long ones end in an ellipsis.

    Args:
        lines: what was printed, without control characters.
        command: what was typed.
    """
    shown = [(f"$ {command}", "prompt")]
    for line in lines:
        text = "".join(c if c.isprintable() else " " for c in line.rstrip())
        text = text if len(text) <= COLUMNS else text[: COLUMNS - 1] + "…"
        shown.append((text, "soft" if text.startswith("… ") else ""))
    width, height = round(COLUMNS * 7.83) + 2 * MARGIN, LINE * len(shown) + 2 * MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img"><title>{escape(command)} in a terminal</title>{STYLE}'
        f'<rect width="{width}" height="{height}" rx="8" fill="#151b23"/>'
    ]
    for number, (text, kind) in enumerate(shown, 1):
        mark = f' class="{kind}"' if kind else ""
        parts.append(
            f'<text x="{MARGIN}" y="{MARGIN + LINE * number - 4}" xml:space="preserve"{mark}>{escape(text)}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def printed_again(run: Path) -> list[str]:
    """What the finished command of a run prints when it is called again."""
    command = [sys.executable, "-m", "modelopt_eagle", "train-and-export", "--recipe", str(run / "recipe.yaml")]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode not in (0, 1):  # 1: below validation.ar_lower_bound
        sys.exit(f"error: the run's command ended with {done.returncode}:\n{done.stdout}")
    return done.stdout.splitlines()


def photograph(page: Path) -> bytes:
    """A PNG of the upper part of a page, in few colours so that it stays small."""
    from PIL import Image

    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        sys.exit("error: no Chromium here: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder) / "page.png"
        subprocess.run(
            [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
             f"--user-data-dir={folder}/profile", f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={picture}",
             page.resolve().as_uri()],
            check=True, capture_output=True, timeout=120,
        )  # fmt: skip
        small = Image.open(picture).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    stream = BytesIO()
    small.save(stream, "PNG", optimize=True)
    return stream.getvalue()


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw both pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="output folder of a finished run")
    parser.add_argument("--log", type=Path, help="what its command printed (default: what it prints again)")
    parser.add_argument("--folder", type=Path, default=Path("docs/images"), help="where to (default docs/images)")
    options = parser.parse_args(arguments)
    page = options.run / "report" / "index.html"
    if not page.is_file():
        sys.exit(f"error: {page} is not there: modelopt-eagle report {options.run} makes it")
    if options.log is None:
        lines = printed_again(options.run)
    else:
        try:
            lines = options.log.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            sys.exit(f"error: --log {options.log}: {error}")
        if not lines:
            sys.exit(f"error: --log {options.log} is empty: keep what the run's command prints there, as --help says")
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / "terminal.svg").write_text(terminal(shortened(of_the_run(lines))), encoding="utf-8")
    (options.folder / "page.png").write_bytes(photograph(page))


if __name__ == "__main__":
    main()
