"""Look at a feature store, check it, join its manifests: ``features inspect|verify|merge|import DIR``."""

from __future__ import annotations

import argparse
import json

from modelopt_eagle.common.lists import parse_ids
from modelopt_eagle.common.parser import CommandParser, command_parser
from modelopt_eagle.errors import FeatureError
from modelopt_eagle.features.store import STORAGE_DTYPES, maintenance
from modelopt_eagle.recipe.command_line import add_target_options

SAMPLE = 8
"""Rows that ``verify --model`` computes again where nothing else is said."""


def build_parser() -> CommandParser:
    """The command line."""
    parser = command_parser("features", __doc__, example="modelopt-eagle features inspect DIR")
    actions = parser.add_subparsers(dest="action", required=True)
    inspect = actions.add_parser("inspect", help="rows, tokens, bytes, contract, lengths (reads manifests only)")
    inspect.add_argument("folder", metavar="DIR")
    inspect.add_argument("--json", action="store_true", help="print JSON")
    verify = actions.add_parser("verify", help="read every byte: sizes, checksums, rows, NaN and infinity")
    verify.add_argument("folder", metavar="DIR")
    verify.add_argument("--drop-bad", action="store_true", help="delete bad shards; the next dump redoes their rows")
    verify.add_argument("--model", help="also compute some rows again with this target, and compare")
    rows = verify.add_mutually_exclusive_group()
    rows.add_argument("--sample", type=int, metavar="N", help="how many rows, with --model (default 8)")
    rows.add_argument("--all", action="store_true", help="all rows, with --model")
    _add_answers(verify)
    add_target_options(verify, template=False)
    merge = actions.add_parser("merge", help="join the manifests of all --shard i/n workers into manifest.json")
    merge.add_argument("folder", metavar="DIR")
    foreign = actions.add_parser(
        "import", help="a dump of Model-Optimizer, SpecForge or speculators, or a store, as a store of another dtype"
    )
    foreign.add_argument("folder", metavar="DIR")
    foreign.add_argument("--model", required=True, help="the target that made it: hub id or local folder")
    foreign.add_argument("--output-dir", required=True, help="the store to write; goes on if it was begun")
    _add_answers(foreign)
    foreign.add_argument("--dtype", default="bfloat16", choices=list(STORAGE_DTYPES), help="default bfloat16")
    add_target_options(foreign, weights=False, template=False)
    return parser


def _add_answers(parser: argparse.ArgumentParser) -> None:
    """Options for what a dump of another tool does not say itself."""
    parser.add_argument("--aux-layers", metavar="a,b,c", help="of another tool's dump: ids of its layers, in order")
    parser.add_argument("--final-states", choices=("normed", "pre-norm"), help="where its files do not say it")
    parser.add_argument("--all-supervised", action="store_true", help="where its files hold no loss mask")


def _answers(args) -> dict:
    """The same as arguments of ``open_reader`` and ``open_offline``."""
    layers = parse_ids(args.aux_layers, "--aux-layers", FeatureError)
    normed = None if args.final_states is None else args.final_states == "normed"
    return {"aux_layer_ids": layers, "final_is_normed": normed, "all_supervised": args.all_supervised}


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns 0, or 1 when ``verify`` found bad shards or rows."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.action == "verify" and args.model is None and (args.all or args.sample is not None):
        parser.error(f"{'--all' if args.all else '--sample'} says which rows are computed again: give --model, too")
    actions = {"inspect": _inspect, "verify": _verify, "merge": _merge, "import": _import}
    return actions[args.action](args)


def _inspect(args) -> int:
    summary = maintenance.summarise(args.folder)
    if args.json:
        print(json.dumps(vars(summary) | {"contract": summary.contract.to_dict()}, indent=1))
    else:
        print("\n".join(summary.lines()))
    return 0


def _verify(args) -> int:
    from pathlib import Path

    from modelopt_eagle.features.store.manifest import is_store

    bad = 0
    if is_store(Path(args.folder)) or args.model is None:
        bad = _verify_bytes(args)
    if args.model is not None and not bad:
        bad = _verify_sample(args)
    return 1 if bad else 0


def _verify_bytes(args) -> int:
    """Number of bad shards."""
    from modelopt_eagle.common.console import ProgressBar

    bar = ProgressBar(maintenance.summarise(args.folder).bytes // 2**20, "verify", unit="MiB")
    report = maintenance.verify(
        args.folder, drop_bad=args.drop_bad, progress=lambda done, total: bar.reach(done // 2**20)
    )
    for problem in report.bad.values():
        print(f"bad: {problem}")
    print(f"{report.shards} shards, {report.rows} rows looked at: {len(report.bad)} bad")
    if report.dropped_rows:
        print(f"{report.dropped_rows} rows dropped; run the dump again to make them")
    return len(report.bad)


def _verify_sample(args) -> int:
    """Number of rows that are not the target's."""
    from modelopt_eagle.common.console import ProgressBar
    from modelopt_eagle.features.checks import lines, recompute
    from modelopt_eagle.features.foreign.reader import open_reader
    from modelopt_eagle.recipe.command_line import target_arguments
    from modelopt_eagle.target import load_target

    target = load_target(**target_arguments(args, args.model))
    reader = open_reader(args.folder, target, verify="read", **_answers(args))
    count = len(reader.lengths)
    asked = count if args.all else min(SAMPLE if args.sample is None else args.sample, count)
    bar = ProgressBar(asked, "verify")
    checks = recompute(reader, target, None if args.all else asked, bar.reach)
    shown = [check for check in checks if check.problem] if args.all else checks
    print("\n".join(lines(shown, reader.contract.aux_layer_ids)))
    bad = sum(check.problem is not None for check in checks)
    print(f"{len(checks)} of {count} rows computed again by {target.name}: {bad} bad")
    if left_out := asked - len(checks):
        print(f"{left_out} of these rows left out: they have images, which are not stored")
    if asked < count:
        print(f"warning: {count - asked} rows were not compared with the target; --all compares every one")
    return bad


def _merge(args) -> int:
    print(f"manifest.json now names {maintenance.merge(args.folder)} shards")
    return 0


def _import(args) -> int:
    from modelopt_eagle.common.console import ProgressBar
    from modelopt_eagle.features.dump import import_rows
    from modelopt_eagle.features.foreign.reader import open_offline
    from modelopt_eagle.recipe.command_line import table_arguments
    from modelopt_eagle.target import load_target_tables

    tables = load_target_tables(**table_arguments(args, args.model))
    source = open_offline(args.folder, tables, **_answers(args))
    bar = ProgressBar(len(source.lengths), "import")
    made = import_rows(source, args.output_dir, args.dtype, progress=bar.advance)
    print(f"{args.output_dir}: {made} of {len(source.lengths)} rows imported now")
    return 0
