"""Show what is learned of conversations: context, answers and end tokens in colour, and the count of every reason."""

from __future__ import annotations

import sys
from pathlib import Path

from modelopt_eagle.common.parser import CommandParser, command_parser


def build_parser() -> CommandParser:
    """The command line; parse with ``parse_intermixed_args``."""
    from modelopt_eagle.recipe.command_line import add_recipe_arguments

    parser = command_parser("preview", __doc__, example="modelopt-eagle preview --data chats.jsonl --model NAME")
    parser.add_argument("--data", nargs="+", metavar="FILE", help="conversations; default: those of the recipe")
    parser.add_argument("--model", metavar="NAME", help="the target, of which only tokenizer and configs are read")
    parser.add_argument("-n", "--rows", type=int, default=3, help="rows shown, spread over the data (default 3)")
    parser.add_argument("--row", metavar="ID", help="show this row")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the page here as well")
    parser.add_argument("--colour", choices=("auto", "always", "never"), default="auto", help="default: on a terminal")
    add_recipe_arguments(parser)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit code.

    Raises:
        EagleError: bad input (exit code 2 through the dispatcher).
    """
    from modelopt_eagle.cli._tokenised import tokenised
    from modelopt_eagle.common.files import write_whole
    from modelopt_eagle.common.output import print_coloured
    from modelopt_eagle.common.text import visible
    from modelopt_eagle.data.preview import coloured, count_table, page
    from modelopt_eagle.errors import DataError
    from modelopt_eagle.recipe.command_line import data_flag, recipe_from_arguments

    arguments = build_parser().parse_intermixed_args(argv)
    flags = [("model.base_model", arguments.model), data_flag(arguments)]
    recipe = recipe_from_arguments(arguments, flags)
    if arguments.rows < 0:
        raise DataError(f"-n must be at least 0, found {arguments.rows}")
    if arguments.html is not None and not arguments.html.absolute().parent.is_dir():
        raise DataError(f"--html {arguments.html}: no such folder, make it first")
    data, source = tokenised(recipe)
    count = len(data.rows)
    shown = sorted({i * count // max(arguments.rows, 1) for i in range(min(arguments.rows, count))})
    if arguments.row is not None:
        shown = [n for n, row in enumerate(data.rows) if arguments.row in (row.id, row.id.rpartition("#")[0])]
        if not shown:
            raise DataError(f"no row {arguments.row!r} among the {count} that are used: ids are {data.rows[0].id!r}, …")
    colour = sys.stdout.isatty() if arguments.colour == "auto" else arguments.colour == "always"
    for number in shown:
        row = data.rows[number]
        print(f"--- {visible(row.id)}: {len(row.input_ids)} tokens, {sum(row.supervised)} supervised")
        print_coloured(coloured(row, source.tokenizer, source.end_token_ids, colour))
    print("---")
    for what, counted, meaning in count_table(data.report):
        print(visible(f"{counted:>9}  {what}{f' ({meaning})' if meaning else ''}"))
    if arguments.html is not None:
        write_whole(arguments.html, page(data, source.tokenizer, source.end_token_ids, shown))
        print(f"wrote {arguments.html}")
    return 0
