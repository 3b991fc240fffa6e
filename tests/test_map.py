"""docs/map.md: the files and names that it sends a newcomer to exist, and its order of rooms is the tested one."""

import re
from pathlib import Path

import pytest

from tests.test_imports import STOREYS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "map.md"
TEXT = PAGE.read_text(encoding="utf-8")
LINK = re.compile(r"\]\(([^)\s]+)\)")
ROWS = [line for line in TEXT.splitlines() if line.startswith("| ") and LINK.search(line)]
ASKED = (
    "a loss convention", "a draft decoder", "a drafter", "a feature dtype", "a serving engine", "a GPU kernel",
    "a dataset format", "a plot of the report", "a learning-rate schedule", "a transport",
)  # fmt: skip


def linked(text):
    return [(PAGE.parent / target).resolve() for target in LINK.findall(text)]


def test_every_linked_file_exists():
    missing = [path for path in linked(TEXT) if not path.exists()]
    assert missing == [] and len(linked(TEXT)) > 60


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip()[:40])
def test_the_names_of_a_row_stand_in_one_of_its_files(row):
    files = [path for path in linked(row) if path.is_file()]
    files += [file for path in linked(row) if path.is_dir() for file in path.rglob("*.py")]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    names = re.findall(r"`(\w+(?:\.\w+)?)`", LINK.sub("", row.rsplit("|", 2)[0] if len(row.split("|")) == 5 else row))
    wanted = [part for name in names if not name.endswith(".py") for part in name.split(".")]
    assert [name for name in wanted if name not in text] == []


def test_the_ten_requests_stand_in_the_page():
    firsts = [row.split("|")[1].strip() for row in ROWS]
    assert [request for request in ASKED if not any(first.startswith(request) for first in firsts)] == []


def test_the_order_of_rooms_is_the_tested_one():
    assert " < ".join(", ".join(rooms) for rooms in STOREYS) in TEXT
