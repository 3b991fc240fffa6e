"""Look at a feature store, check it, join its manifests: ``features inspect|verify|merge DIR``."""

from __future__ import annotations

import argparse
import json

from modelopt_eagle.features.store import maintenance


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="modelopt-eagle features", description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True)
    inspect = actions.add_parser(
        "inspect", help="rows, tokens, bytes, contract, lengths (reads manifests only)"
    )
    inspect.add_argument("folder", metavar="DIR")
    inspect.add_argument("--json", action="store_true", help="print JSON")
    verify = actions.add_parser("verify", help="read every byte: sizes, checksums, rows, NaN and infinity")
    verify.add_argument("folder", metavar="DIR")
    verify.add_argument(
        "--drop-bad", action="store_true", help="delete bad shards; the next dump redoes their rows"
    )
    merge = actions.add_parser("merge", help="join the manifests of all --shard i/n workers into manifest.json")
    merge.add_argument("folder", metavar="DIR")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns 0, or 1 when ``verify`` found bad shards."""
    args = build_parser().parse_args(argv)
    return {"inspect": _inspect, "verify": _verify, "merge": _merge}[args.action](args)


def _inspect(args) -> int:
    summary = maintenance.summarise(args.folder)
    if args.json:
        print(json.dumps(vars(summary) | {"contract": summary.contract.to_dict()}, indent=1))
    else:
        print("\n".join(summary.lines()))
    return 0


def _verify(args) -> int:
    from modelopt_eagle.data.progress import ProgressBar

    bar = ProgressBar(maintenance.summarise(args.folder).bytes // 2**20, "verify", unit="MiB")
    report = maintenance.verify(
        args.folder, drop_bad=args.drop_bad, progress=lambda done, total: bar.advance(done // 2**20 - bar.done)
    )
    for problem in report.bad.values():
        print(f"bad: {problem}")
    print(f"{report.shards} shards, {report.rows} rows looked at: {len(report.bad)} bad")
    if report.dropped_rows:
        print(f"{report.dropped_rows} rows dropped; run the dump again to make them")
    return 1 if report.bad else 0


def _merge(args) -> int:
    print(f"manifest.json now names {maintenance.merge(args.folder)} shards")
    return 0
