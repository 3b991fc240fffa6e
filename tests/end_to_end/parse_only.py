"""Run a script or module up to its parsed command line: ``python -m tests.end_to_end.parse_only SCRIPT.py|MODULE ...``.

It exits with ``PARSED`` where the arguments were taken. A process of its own, because what a script changes before it
parses would stay in the process of the tests.
"""

import argparse
import runpy
import sys
from pathlib import Path

PARSED = 77


def ending(parse):
    """The method of a parser that ends the process behind ``parse``."""

    def parse_and_end(*arguments, **options):
        parse(*arguments, **options)
        sys.exit(PARSED)

    return parse_and_end


def main() -> None:
    """Run the program that is named first, with the rest as its arguments."""
    for name in ("parse_args", "parse_intermixed_args"):
        setattr(argparse.ArgumentParser, name, ending(getattr(argparse.ArgumentParser, name)))
    del sys.argv[0]
    if sys.argv[0].endswith(".py"):
        sys.path.insert(0, str(Path(sys.argv[0]).parent))  # as Python does for a script
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        runpy.run_module(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
