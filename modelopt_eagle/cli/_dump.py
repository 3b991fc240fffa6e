"""The command line that all back ends share: read conversations, say what the dump will take, fill the store.

Run one worker a device, all with the same data: ``--shard 0/4``, ``--shard 1/4`` … into the same ``--output-dir``.
A worker that is stopped or killed goes on when the same command is given again. Processes of torchrun are workers
without saying so.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

from modelopt_eagle.cli._options import json_object
from modelopt_eagle.common.console import shown
from modelopt_eagle.common.lists import parse_ids
from modelopt_eagle.common.parser import CommandParser, command_parser
from modelopt_eagle.errors import EagleError, FeatureError
from modelopt_eagle.features.dump import BackEnd, dump, estimate
from modelopt_eagle.features.store import SHARD_BYTES, STORAGE_DTYPES
from modelopt_eagle.recipe.command_line import add_target_options


def build_parser(description: str, command: str, weights: bool = False) -> CommandParser:
    """The shared options; a back end may add its own.

    Args:
        description, command: see :func:`~modelopt_eagle.common.parser.command_parser`.
        weights: transformers runs the target; else an engine does, and only its tables are loaded here.
    """
    example = f"modelopt-eagle {command} --model NAME --input-file chats.jsonl --output-dir features"
    parser = command_parser(command, description, example=example)
    parser.add_argument("--model", required=True, help="target: hub id, local folder, GGUF file, or quickstart")
    parser.add_argument("--input-file", required=True, nargs="+", help="conversations: .jsonl file(s), or quickstart")
    parser.add_argument("--output-dir", required=True, type=Path, help="the store; goes on if it was begun")
    parser.add_argument("--shard", metavar="i/n", help="this worker takes every n-th row (default 0/1)")
    parser.add_argument(
        "--dtype", default="bfloat16", choices=list(STORAGE_DTYPES), help="how states are stored (default bfloat16)"
    )
    parser.add_argument("--max-length", type=int, default=2048, help="window in tokens (default 2048)")
    parser.add_argument("--overlong", default="truncate", choices=("truncate", "drop"), help="longer conversations")
    parser.add_argument("--max-rows", type=int, help="use only the first rows of the data")
    parser.add_argument(
        "--aux-layers", metavar="a,b,c", help="layers by their outputs, 0-based (default 1, n//2-1, n-4)"
    )
    parser.add_argument("--batch-tokens", type=int, default=4096, help="tokens of one forward (default 4096)")
    parser.add_argument("--shard-mib", type=float, default=SHARD_BYTES / 2**20, help="of a shard file (default 256)")
    parser.add_argument(
        "--template-arguments",
        type=json_object,
        default={},
        metavar="JSON",
        help='variables of the chat template, such as {"enable_thinking": false}',
    )
    parser.add_argument(
        "--template-date",
        metavar="YYYY-MM-DD",
        help="what a template that prints the date is told; default: the store's own, or today where it is begun",
    )
    parser.add_argument("--workers", type=int, default=1, help="processes that tokenise (default 1)")
    parser.add_argument("--estimate", action="store_true", help="print bytes, time and disk, and write nothing")
    add_target_options(parser, weights=weights, dtype_option="--target-dtype")
    return parser


def parse_shard(text: str) -> tuple[int, int]:
    """(i, n) of ``--shard i/n``.

    Raises:
        FeatureError: not of that form.
    """
    parts = text.split("/")
    if len(parts) != 2 or not all(part.isdigit() for part in parts) or not int(parts[0]) < int(parts[1]):
        raise FeatureError(f"--shard i/n with 0 <= i < n expected, such as 0/4; found {text!r}")
    return int(parts[0]), int(parts[1])


def worker_of(args: argparse.Namespace) -> tuple[int, int]:
    """(i, n): of ``--shard``, or the place of this process among those that torchrun started.

    Raises:
        FeatureError: both.
    """
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes == 1 or not hasattr(args, "parallel"):  # engines start processes of their own
        return parse_shard("0/1" if args.shard is None else args.shard)
    if args.shard is not None:
        raise FeatureError(
            f"--shard {args.shard} says which rows this worker takes, and so does its place among the {processes} "
            "processes that were launched: leave it out"
        )
    return int(os.environ.get("RANK", "0")), processes


def parse_layers(text: str | None) -> tuple[int, ...] | None:
    """Ascending ids of ``--aux-layers a,b,c``; None if it was not given.

    Raises:
        FeatureError: not numbers.
    """
    ids = parse_ids(text, "--aux-layers", FeatureError)
    return None if ids is None else tuple(sorted(ids))


def use_template(args: argparse.Namespace, back_end: BackEnd) -> None:
    """Render with the arguments and the date of the command line; the date is kept in the store.

    Raises:
        DataError: an argument or a date that cannot be used.
    """
    from dataclasses import replace

    from modelopt_eagle.target.chat import asks_for_date, keep_date, kept_date, set_chat_settings, today
    from modelopt_eagle.target.identity import template_hash

    template = getattr(back_end.tokenizer, "chat_template", None)
    date = args.template_date or kept_date(args.output_dir)
    if date is None and template and asks_for_date(back_end.tokenizer.get_chat_template()):
        date = today()
    if date is not None and not args.estimate:
        keep_date(args.output_dir, date)
    if args.template_arguments or date is not None:
        set_chat_settings(back_end.tokenizer, args.template_arguments, date)
        back_end.contract = replace(back_end.contract, template_hash=template_hash(back_end.tokenizer))


def run(parser: argparse.ArgumentParser, open_back_end: Callable[[argparse.Namespace], BackEnd], argv=None) -> int:
    """Parse, dump, report; returns the exit code: 0 done, 2 bad input, 130 interrupted."""
    args = parser.parse_args(argv)
    try:
        with shown():
            return _run(args, open_back_end)
    except EagleError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\ninterrupted; the same command goes on from {args.output_dir}", file=sys.stderr)
        return 130


def _run(args: argparse.Namespace, open_back_end: Callable[[argparse.Namespace], BackEnd]) -> int:
    worker = worker_of(args)
    for name in ("batch_tokens", "shard_mib"):
        if getattr(args, name) <= 0:
            raise FeatureError(f"--{name.replace('_', '-')} must be above 0, found {getattr(args, name)}")
    from modelopt_eagle.target.shards import ended_peers

    with ended_peers():
        return _filled(args, open_back_end(args), worker)


def _filled(args: argparse.Namespace, back_end: BackEnd, worker: tuple[int, int]) -> int:
    """Fill the store in step with the processes that hold the target together."""
    with back_end.together() if hasattr(back_end, "together") else contextlib.nullcontext():
        return _fill(args, back_end, worker)


def _fill(args: argparse.Namespace, back_end: BackEnd, worker: tuple[int, int]) -> int:
    from modelopt_eagle.common.console import ProgressBar
    from modelopt_eagle.data import prepare_dataset

    use_template(args, back_end)
    data = prepare_dataset(
        back_end.tokenizer,
        args.input_file,
        max_rows=args.max_rows,
        max_length=args.max_length,
        target_window=getattr(back_end, "window", None),
        workers=args.workers,
        overlong=args.overlong,
        end_token_ids=back_end.end_token_ids,
        vision=getattr(back_end, "vision", None),
    )
    print(data.header())
    if args.estimate:
        shard_bytes = int(args.shard_mib * 2**20)
        print("\n".join(estimate(back_end, data.rows, args.output_dir, args.dtype, worker, shard_bytes).lines()))
        return 0
    bar: ProgressBar | None = None

    def begin(rows_before: int, tokens: int) -> None:
        nonlocal bar
        if rows_before:
            print(f"{rows_before} rows of this worker are stored already")
        bar = ProgressBar(tokens, "features", unit="tokens")

    made, before = dump(
        back_end,
        data.rows,
        args.output_dir,
        dtype=args.dtype,
        worker=worker,
        shard_bytes=int(args.shard_mib * 2**20),
        begin=begin,
        progress=lambda tokens: bar.advance(tokens),
    )
    contract = back_end.contract.to_dict() | {"dtype": args.dtype}
    print(f"{args.output_dir}: {made} rows made, {before} were there, contract {contract}")
    return 0
