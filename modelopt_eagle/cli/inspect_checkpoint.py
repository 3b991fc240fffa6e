"""Say what a draft folder holds: whose layout, which vocabulary map, and what each engine would do with it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from modelopt_eagle.common.parser import CommandParser, command_parser

NOT_READABLE = 1


def build_parser() -> CommandParser:
    """The options."""
    from modelopt_eagle.cli._reading import add_reading_options

    parser = command_parser(
        "inspect-checkpoint",
        __doc__,
        example="modelopt-eagle inspect-checkpoint ckpts/quickstart-eagle3/export",
        epilog="Exit code 0: the head can be read; 1: it cannot as it is; 2: there is nothing to look at.",
    )
    parser.add_argument("path", type=Path, help="an export, another tool's head, or a training checkpoint")
    parser.add_argument("--json", action="store_true", help="print JSON, with every tensor's shape")
    add_reading_options(parser)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    from modelopt_eagle.cli._reading import reading_options
    from modelopt_eagle.export.inspect import inspect_checkpoint

    arguments = build_parser().parse_args(argv)
    options, _ = reading_options(arguments)
    found = inspect_checkpoint(arguments.path, options)
    print(json.dumps(dataclasses.asdict(found), indent=2) if arguments.json else found.text())
    return NOT_READABLE if found.problem else 0
