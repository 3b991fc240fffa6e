"""The pictures of the documentation are those that the script draws, and each is shown somewhere."""

import importlib.util
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("draw_concepts", ROOT / "scripts" / "draw_concepts.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
