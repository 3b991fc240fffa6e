"""The pictures of the documentation are those that the script draws, and each is shown somewhere."""

import importlib.util
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def script():
    return load("draw_concepts")


def test_pictures_are_those_that_are_drawn(script, tmp_path):
    script.main(["--folder", str(tmp_path)])
    drawn = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert sorted(drawn) == sorted(f"{name}.svg" for name in script.PICTURES)
    for name, text in drawn.items():
        assert (DOCS / "images" / name).read_text() == text, "run scripts/draw_concepts.py"
        assert ElementTree.fromstring(text).find("{http://www.w3.org/2000/svg}title").text


def test_every_picture_is_shown():
    pages = [*DOCS.glob("*.md"), ROOT / "README.md"]
    text = "".join(page.read_text() for page in pages)
    unseen = [path.name for path in (DOCS / "images").iterdir() if f"images/{path.name}" not in text]
    assert not unseen


LOG = """Making /somewhere/.venv with Python 3.11.7
quickstart: a run into ckpts/quickstart (loading)
data: 640 <conversations> & more \x1b[31m
{features}
{steps}
acceptance length  1.428 [1.376, 1.481] (24 prompts, 3 drafted tokens) {long}
serve it:
  vllm serve /somewhere/else
"""


def test_the_terminal_is_drawn_of_what_a_run_printed():
    draw = load("draw_run")
    steps = [f"step {n}/60 | loss 3.0" for n in range(1, 61)]
    log = LOG.format(features="features 1/9\nfeatures 5/9\nfeatures 9/9", steps="\n".join(steps), long="x" * 200)
    lines = draw.shortened(draw.of_the_run(log.splitlines()))
    assert [line for line in lines if line.startswith("step")] == [*steps[:3], *steps[-3:]]
    assert [line for line in lines if line.startswith("…")] == ["… 1 more lines", "… 54 more lines"]
    picture = ElementTree.fromstring(draw.terminal(lines))
    shown = ["".join(part.itertext()) for part in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert shown[0] == "$ bash train_eagle3_and_export.sh" and len(shown) == len(lines) + 1
    assert "data: 640 <conversations> & more  [31m" in shown and not any("somewhere" in line for line in shown)
    assert max(map(len, shown)) == draw.COLUMNS and shown[-1].endswith("…")


def test_pictures_of_a_run_are_small_and_name_no_place():
    page, terminal = DOCS / "images" / "page.png", (DOCS / "images" / "terminal.svg").read_text()
    assert page.read_bytes().startswith(b"\x89PNG") and page.stat().st_size < 200_000
    assert len(terminal) < 100_000 and ElementTree.fromstring(terminal) is not None
    assert "acceptance length" in terminal and "/home/" not in terminal and "/tmp/" not in terminal
