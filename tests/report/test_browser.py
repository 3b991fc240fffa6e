"""The pages in a real browser, where one is installed: no message on its console, nothing cut off at three widths.

``apt-get install chromium`` brings one. Without it these tests are not defined; those of ``test_page.py`` always run.
"""

import importlib.util
import re
import shutil
import subprocess
from html import escape
from pathlib import Path

import pytest

from modelopt_eagle.report import read_run, write_comparison, write_page
from tests.report.runs import make_run

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

MEASURE = """<script>
const wide = [...document.querySelectorAll("body *")].filter(e => !e.closest(".scroll") && !e.closest("svg")
  && e.getBoundingClientRect().right > innerWidth + 1).map(e => e.tagName + "." + e.className);
const sizes = [...document.querySelectorAll("svg text")].map(e => e.getBoundingClientRect().height);
parent.document.documentElement.setAttribute("data-found", [innerWidth, document.documentElement.scrollWidth,
  Math.min(...sizes).toFixed(1), getComputedStyle(document.body).backgroundColor, wide.slice(0, 5)].join("|"));
</script>"""


def browse(tmp_path, *arguments):
    return subprocess.run(
        [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr",
         f"--user-data-dir={tmp_path / 'profile'}", *arguments],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip


if BROWSER is not None:

    @pytest.fixture(scope="module")
    def pages(tmp_path_factory):
        root = tmp_path_factory.mktemp("pages")
        first, second = make_run(root / "first"), make_run(root / "second", rate=0.4, seed=3)
        page = write_page(read_run(first), first / "report")
        return {"run": page, "comparison": write_comparison([first, second], root / "compared.html")[0]}

    @pytest.mark.parametrize("name", ["run", "comparison"])
    @pytest.mark.parametrize("width", [390, 820, 1280])
    def test_nothing_is_cut_off(pages, name, width, tmp_path):
        frame = tmp_path / "frame.html"  # a window of the browser is 500 wide at least
        text = re.sub(r"<meta http-equiv.*?>", "", pages[name].read_text()).replace("</body>", MEASURE + "</body>")
        style = f"border: 0; width: {width}px; height: 1000px"
        frame.write_text(f'<!doctype html><iframe style="{style}" srcdoc="{escape(text)}"></iframe>')
        dark = ["--blink-settings=preferredColorScheme=0"] if width == 820 else []
        done = browse(tmp_path, "--window-size=1400,1100", *dark, "--dump-dom", frame.as_uri())
        inner, scroll, least, paper, wide = re.search(r'data-found="([^"]*)"', done.stdout)[1].split("|")
        assert int(inner) == width and int(scroll) <= width and wide == "", wide
        assert float(least) >= 8, "text of a plot that nobody can read"
        assert paper == ("rgb(20, 23, 26)" if dark else "rgb(255, 255, 255)")

    def test_a_page_says_nothing_on_the_console_and_prints(pages, tmp_path):
        for name, page in pages.items():
            picture, paper = tmp_path / f"{name}.png", tmp_path / f"{name}.pdf"
            done = browse(tmp_path, "--window-size=1280,2000", f"--screenshot={picture}", page.as_uri())
            assert "CONSOLE" not in done.stderr, done.stderr
            assert picture.stat().st_size > 20_000
            browse(tmp_path, f"--print-to-pdf={paper}", page.as_uri())
            assert paper.read_bytes().startswith(b"%PDF")

    def test_the_page_is_photographed_for_the_readme(pages, tmp_path):
        path = Path(__file__).parents[2] / "scripts" / "draw_run.py"
        spec = importlib.util.spec_from_file_location("draw_run", path)
        draw = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(draw)
        run, log = pages["run"].parents[1], tmp_path / "run.log"
        log.write_text("quickstart: a run into here (loading)\nstep 1/2 | loss 3\n")
        draw.main([str(run), "--log", str(log), "--folder", str(tmp_path)])
        picture = (tmp_path / "page.png").read_bytes()
        assert picture.startswith(b"\x89PNG") and 20_000 < len(picture) < 200_000
        assert "step 1/2" in (tmp_path / "terminal.svg").read_text()
