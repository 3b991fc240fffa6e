"""The first lines of every command: they import almost nothing, and from them on Ctrl-C ends a command in one line.

``python -m modelopt_eagle COMMAND`` is the ``modelopt-eagle`` command of a clone that is not installed.
"""

from __future__ import annotations

import importlib
import sys
from typing import NoReturn

from modelopt_eagle.common.interrupts import INTERRUPTED, interruptible, say_interrupted


def main() -> NoReturn:
    """Entry of the ``modelopt-eagle`` command: leave with its exit code."""
    _leave_with("main")


def run_script(module_name: str) -> NoReturn:
    """Run ``modelopt_eagle.cli.<module_name>`` as a script and leave with its exit code."""
    _leave_with("run_command", module_name)


def _leave_with(function: str, *arguments: str) -> NoReturn:
    """Call a function of :mod:`modelopt_eagle.cli.main`, which is imported here and not above."""
    try:
        code = interruptible(lambda: getattr(importlib.import_module("modelopt_eagle.cli.main"), function)(*arguments))
    except KeyboardInterrupt:  # before or after the command's own handling of it
        say_interrupted()
        code = INTERRUPTED
    sys.exit(code)


if __name__ == "__main__":
    main()
