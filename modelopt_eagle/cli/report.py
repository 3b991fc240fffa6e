"""Make the page of a run, or compare several runs on one page."""

from __future__ import annotations

import argparse
from pathlib import Path

from modelopt_eagle.common.parser import CommandParser, command_parser
from modelopt_eagle.errors import CheckpointError

EXAMPLES = """
    modelopt-eagle report ckpts/quickstart
    modelopt-eagle report --compare ckpts/first ckpts/second --output compared.html"""


def build_parser() -> CommandParser:
    """The command line."""
    parser = command_parser("report", __doc__, example=EXAMPLES)
    parser.add_argument("run", nargs="*", metavar="RUN", help="output folder of a run")
    parser.add_argument(
        "--compare", action="store_true", help="several runs on one page, each held against the first, prompt by prompt"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="the page (default: RUN/report/index.html; compared.html for several)",
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns 0.

    Raises:
        CheckpointError: a folder that holds no run, not as many as are needed, or a page that cannot be written.
    """
    from modelopt_eagle.common.files import disk_trouble

    arguments = build_parser().parse_args(argv)
    try:
        return _write(arguments)
    except OSError as error:
        place = arguments.output or error.filename or "the page"
        raise CheckpointError(f"cannot write {place}: {disk_trouble(error)}; name another --output") from error


def _write(arguments: argparse.Namespace) -> int:
    if not arguments.compare and len(arguments.run) != 1:
        raise CheckpointError(
            f"expected the output folder of one run, found {len(arguments.run)}; several are compared with --compare"
        )
    from modelopt_eagle.report import read_run, write_comparison, write_page
    from modelopt_eagle.report.page import OUTDATED

    if arguments.compare:
        page, table = write_comparison(arguments.run, arguments.output or Path("compared.html"))
        print(table)
    else:
        folder = Path(arguments.run[0])
        file = arguments.output or folder / "report" / "index.html"
        facts = read_run(folder)
        if facts.outdated:
            print(f"note: {OUTDATED}")
        page = write_page(facts, file.parent, file.name)
    print(f"wrote {page}")
    return 0
