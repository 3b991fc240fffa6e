"""``modelopt-eagle SUBCOMMAND``: finds the command's file in this folder and runs its ``main(argv)``.

A sub-command is a file ``cli/my_command.py`` with a docstring, whose first line is its help, and a function
``main(argv: list[str] | None = None) -> int | None`` that returns the exit code. ``scripts/*.py`` are three
lines: ``run_script("my_command")``, imported from :mod:`modelopt_eagle.__main__`, under ``if __name__ ==
"__main__"``, since processes that a command starts may import its script again.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from modelopt_eagle.common.console import shown
from modelopt_eagle.common.interrupts import INTERRUPTED, interruptible
from modelopt_eagle.common.output import finish_output, guard_output
from modelopt_eagle.common.text import visible
from modelopt_eagle.errors import EagleError

BAD_INPUT = 2
OUTPUT_LOST = 74
"""Exit code of a command that did its work and could not print all of what it had to say (a full disk)."""
GRACE_SECONDS = 5.0
"""How long a process other than the first waits to be ended before it prints its own error."""


def main(argv: list[str] | None = None) -> int:
    """Entry of the ``modelopt-eagle`` command; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    return _guarded(lambda: _dispatch(argv))


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage(), flush=True)
        return 0 if argv else BAD_INPUT
    if argv[0] in ("-V", "--version"):
        from modelopt_eagle import __version__

        print(f"modelopt_eagle {__version__}", flush=True)
        return 0
    commands = available_commands()
    name = argv[0].replace("_", "-")
    if name not in commands:
        near = difflib.get_close_matches(name, commands, n=1)
        hint = f"; nearest: {near[0]}" if near else ""
        print(f"error: no such command: {visible(argv[0])}{hint}\n\n{usage()}", file=sys.stderr)
        return BAD_INPUT
    return run_command(name.replace("-", "_"), argv[1:])


def run_command(module_name: str, argv: list[str] | None = None) -> int:
    """Run ``modelopt_eagle.cli.<module_name>.main(argv)``.

    Returns:
        Its exit code; 2 after an ``EagleError``, printed without a traceback; 130 after Ctrl-C. Other exceptions are
        faults of the toolkit and keep their traceback.
    """
    return _guarded(lambda: importlib.import_module(f"modelopt_eagle.cli.{module_name}").main(argv))


def _guarded(action: Callable[[], int | None]) -> int:
    """Run an action; its result, or the exit code of the error that it raised.

    What goes wrong with standard output and error ends nothing: see :mod:`modelopt_eagle.common.output`.
    """
    guard_output()
    try:
        with shown():
            code = interruptible(action) or 0
    except EagleError as error:
        say_once(f"error: {visible(str(error), lines=True)}")
        code = BAD_INPUT
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        code = INTERRUPTED
    except SystemExit as end:  # of argparse, after --help or an unknown option
        if finish_output() is None or end.code:
            raise
        code = 0
    if (lost := finish_output()) is None or code:
        return code
    print(f"error: what was printed is not whole: {lost.strerror or lost}; the work itself was done", file=sys.stderr)
    return OUTPUT_LOST


def say_once(line: str) -> None:
    """Print an error; where several processes run into the same one, the first alone prints it.

    The launcher ends the others as soon as the first has left. One that is not ended by then met an error of its own.
    """
    rank = int(os.environ.get("RANK", "0"))
    if rank and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        time.sleep(GRACE_SECONDS)
        line = f"process {rank}: {line}"
    print(line, file=sys.stderr)


def available_commands() -> dict[str, str]:
    """Command name → first line of its docstring, found without importing anything."""
    commands = {}
    for file in sorted(Path(__file__).parent.glob("*.py")):
        if file.stem != "main" and not file.stem.startswith("_"):
            doc = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
            commands[file.stem.replace("_", "-")] = doc.partition("\n")[0]
    return commands


def usage() -> str:
    """The list of commands."""
    commands = available_commands()
    width = max(map(len, commands), default=0)
    lines = [f"  {name:<{width}}  {help_line}" for name, help_line in commands.items()]
    return "\n".join(
        ["usage: modelopt-eagle COMMAND [OPTIONS]   (modelopt-eagle COMMAND --help for its options)", "", *lines]
    )


if __name__ == "__main__":
    sys.exit(main())
