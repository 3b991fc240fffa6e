"""Saved tiny vision-language targets, loaded, and a file of conversations of which some have images."""

import json

import pytest

from modelopt_eagle.target import load_target
from tests.vision.tiny_vision import FAMILIES, draw, make_folder


def text(*turns):
    """A row of text, beginning with the user."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]}


def pictured(*turns):
    """The same; names of pictures in a list before the user's text become images."""
    row = text(*turns)
    for message in row["messages"]:
        if isinstance(message["content"], list):
            *names, words = message["content"]
            images = [{"type": "image", "image": name} for name in names]
            message["content"] = [*images, {"type": "text", "text": words}]
    return row


class MadeOnce(dict):
    """Values that are made when they are first asked for."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def __missing__(self, family):
        self[family] = self.make(family)
        return self[family]


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Folder of each family."""
    return MadeOnce(lambda family: make_folder(family, tmp_path_factory.mktemp("vision") / family))


@pytest.fixture(scope="session")
def targets(folders):
    """The loaded targets. Read only."""
    return MadeOnce(lambda family: load_target(folders[family]))


@pytest.fixture(params=list(FAMILIES))
def family(request):
    return request.param


@pytest.fixture
def target(targets, family):
    return targets[family]


@pytest.fixture(scope="session")
def mixed(tmp_path_factory):
    """A file with rows of text, of one image, of two in one turn and of one in each of two turns."""
    folder = tmp_path_factory.mktemp("pictures")
    names = [
        draw(folder / "red.png", 60, 40, (200, 30, 90)),
        draw(folder / "green.png", 80, 80, (20, 230, 9)),
        draw(folder / "wide.png", 120, 30, (3, 90, 190)),
    ]
    rows = [
        pictured([names[0], "what is it?"], "a red one"),
        text("hello", "good day", "and you?", "well"),
        pictured([names[1], names[2], "compare"], "the first is green"),
        pictured(["no picture yet"], "tell me", [names[2], "now?"], "a wide one"),
    ]
    rows[3]["messages"][0]["content"] = "no picture yet"
    path = folder / "mixed.jsonl"
    path.write_text("".join(json.dumps({"id": f"row-{i}"} | row) + "\n" for i, row in enumerate(rows)))
    return path
