"""The command line of every command: its own name, an example, and options under either spelling."""

from __future__ import annotations

import argparse
import sys
import textwrap
from pathlib import Path
from typing import Any

COLUMNS = 78
"""Where texts of a help page are broken."""


TARGET_OPTIONS = {"model": "base-model", "base-model": "model"}
"""Two names of the option that names the target: each is taken where a command knows the other alone."""


class CommandParser(argparse.ArgumentParser):
    """A parser that takes ``--base-model`` where ``--base_model`` or ``--model`` is meant, and the other way round."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As the base class; returns what was found and what was left over."""
        words = sys.argv[1:] if args is None else list(args)
        end = words.index("--") if "--" in words else len(words)  # behind it nothing is an option
        return super().parse_known_args([*map(self.spelt, words[:end]), *words[end:]], namespace)

    def spelt(self, word: str) -> str:
        """An option as this parser names it; other words as they are."""
        name, equals, value = word.partition("=")
        if not name.startswith("--") or name in self._option_string_actions:
            return word
        known = {option.replace("_", "-"): option for option in self._option_string_actions}
        dashed = name.replace("_", "-")
        other = "--" + TARGET_OPTIONS.get(dashed.removeprefix("--"), "")
        return known.get(dashed, known.get(other, name)) + equals + value


def command_parser(command: str, description: str | None, *, example: str, epilog: str = "") -> CommandParser:
    """The parser of a command.

    Args:
        command: as it is called, such as ``ar-validate``.
        description: what it does.
        example: a call, or several lines of them.
        epilog: what else there is to say, such as exit codes.

    Returns:
        It names itself as it was called: ``modelopt-eagle ar-validate``, or the script of that name.
    """
    called = Path(sys.argv[0])
    script = called.suffix == ".py" and called.stem == command.replace("-", "_")
    lines = "\n".join(f"  {line.strip()}" for line in example.strip().splitlines())
    head = "example:" if lines.count("\n") == 0 else "examples:"
    about = "\n\n".join(textwrap.fill(part, COLUMNS) for part in (description or "").split("\n\n"))
    return CommandParser(
        prog=f"python {called}" if script else f"modelopt-eagle {command}",
        description=about,
        epilog="\n\n".join(part for part in (f"{head}\n{lines}", textwrap.fill(epilog, COLUMNS)) if part),
        formatter_class=argparse.RawDescriptionHelpFormatter,  # an example stays on its line
    )
