"""``docs/troubleshooting.md`` quotes messages that the code says, and commands and keys that there are."""

import ast
import re
from pathlib import Path

import pytest

from modelopt_eagle.cli.main import available_commands
from modelopt_eagle.recipe import Recipe

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("|") and not re.match(r"\|[-|]+\|$|\| you see", line)
]
MESSAGES = sorted({quoted for row in ROWS for quoted in re.findall(r"`([^`]+)`", row[0])})


def said() -> list[str]:
    """Every text of the package, values in it as ``\\0``, and the shell scripts."""
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "scripts").glob("*.sh")]
    for path in (ROOT / "modelopt_eagle").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return texts


SAID = said()


def test_every_row_has_a_symptom_a_cause_and_a_way_out():
    assert len(ROWS) > 35 and all(len(row) == 3 and all(row) for row in ROWS)


@pytest.mark.parametrize("message", MESSAGES)
def test_a_quoted_message_is_one_of_the_codes(message):
    parts = [part for part in (part.strip() for part in message.split("…")) if part]
    assert parts and any(holds(text, parts) for text in SAID)


def holds(text: str, parts: list[str]) -> bool:
    """Whether the parts stand in the text, one behind the other."""
    place = 0
    for part in parts:
        found = text.find(part, place)
        if found < 0:
            return False
        place = found + len(part)
    return True


def test_a_message_that_nobody_says_would_be_found():
    assert not any("the disk is made of cheese" in text for text in SAID)


def test_commands_scripts_and_recipe_keys_are_there():
    commands = available_commands()
    assert [name for name in re.findall(r"`modelopt-eagle ([\w-]+)", PAGE) if name not in commands] == []
    assert [path for path in re.findall(r"\bscripts/\w+\.\w+", PAGE) if not (ROOT / path).is_file()] == []
    keys = {f"{section}.{key}" for section, key in Recipe.keys()}
    sections = {section for section, _ in Recipe.keys()}
    named = [key for key in re.findall(r"\b([a-z_]+\.[a-z_]+)\b", PAGE) if key.split(".")[0] in sections]
    assert len(named) > 15 and [key for key in named if key not in keys] == []
    options = set(re.findall(r"`(--[\w-]+)|(?<= )(--[\w-]+)", PAGE))
    flat = {option for pair in options for option in pair if option}
    source = "\n".join(SAID)
    assert [option for option in flat if option not in source and option.replace("_", "-") not in source] == []
