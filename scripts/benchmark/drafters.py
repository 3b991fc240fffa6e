"""Which drafter to take: heads of each kind trained for equal minutes on the same features, then decoded with.

    python scripts/benchmark/drafters.py --output drafters --minutes 5 --seeds 0 1 2

For every drafter and seed a head is trained by the quick start's settings (the drafter's own quick-start recipe where
it has one), for the same budget, on features that are made once. Each head then answers the same prompts greedily, as a
chain and, where its ``plans`` say so, as a tree: acceptance length (tokens a pass of the target), all together and by
category. At the end of a seed the generators of all its heads take turns on the same prompts beside plain decoding:
speed-up, and what drafting and a whole round cost, in plain steps.

What the minutes are, and how the same command goes on where an earlier one ended: see ``equal_minutes.py``. Intervals
are of 95 %, by drawing whole prompts with all of their seeds; the column "seeds" gives the least and the most of the
seeds' own lengths. Written: ``comparison.json`` and ``comparison.md``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import equal_minutes  # scripts/benchmark/equal_minutes.py
from equal_minutes import CHAIN, Contestant, by_prompt, length_of, mean, plan_name

from modelopt_eagle.common.acceptance import bootstrap_interval, pooled_length
from modelopt_eagle.common.files import write_whole

TREE = (2, 3, 7)
DRAFTERS: dict[str, Contestant] = {
    "eagle3": Contestant(plans=(CHAIN, TREE)),
    "peagle": Contestant("quickstart_peagle", plans=(CHAIN, TREE)),
    "dflash4": Contestant("quickstart_dflash", {"dflash": {"block_size": 4}}, plans=(CHAIN, TREE)),
    "dflash8": Contestant("quickstart_dflash", {"dflash": {"block_size": 8}}, plans=((7,), CHAIN)),
    "medusa": Contestant("quickstart_dflash", {"algorithm": "medusa", "dflash": None, "medusa": {"heads": 3},
                                               "eagle": {"draft_vocab_size": 6144, "init": "target"}}),
}  # fmt: skip


def build_parser() -> argparse.ArgumentParser:
    parser = equal_minutes.make_parser(__doc__)
    parser.add_argument("--drafters", nargs="+", default=list(DRAFTERS), choices=DRAFTERS, help="default: all")
    return parser


def compare(found: dict[str, Any], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row a drafter and plan, from the parts by ``(drafter, plan)`` and seed."""
    rows = []
    for name in arguments.drafters:
        for plan in DRAFTERS[name].plans:
            key = f"{name} {plan_name(plan)}"
            parts = [found["answers"][key][seed] for seed in arguments.seeds]
            accepted = list(by_prompt(parts).values())
            lengths = [length_of(part) for part in parts]
            speeds = [found["speeds"][seed][key] for seed in arguments.seeds]
            categories = sorted({row["category"] for part in parts for row in part["rows"]})
            rows.append({
                "drafter": name, "draft": plan_name(plan),
                "acceptance_length": pooled_length(accepted), "ci95": bootstrap_interval(accepted),
                "by_seed": lengths, "rounds": sum(map(len, accepted)),
                "steps": [found["heads"][name][seed]["steps"] for seed in arguments.seeds],
                **{name: mean([speed[name] for speed in speeds]) for name in ("speedup", "draft_cost", "round_cost")},
                "speedup_by_seed": [speed["speedup"] for speed in speeds],
                "processor_share": min(s["processor_share"] or 1.0 for s in speeds),
                "unreliable": any(speed["unreliable"] for speed in speeds),
                "texts_that_part": sum(speed["texts_that_part"] for speed in speeds),
                "categories": {
                    each: {"acceptance_length": pooled_length(rounds), "ci95": bootstrap_interval(rounds)}
                    for each in categories
                    for rounds in [list(by_prompt(parts, each).values())]
                },
            })  # fmt: skip
    return rows


def page(rows: Sequence[dict[str, Any]], settings: dict[str, Any], seeds: Sequence[int], commits: Sequence[str]) -> str:
    """The comparison as Markdown."""
    share = min(row["processor_share"] for row in rows)
    lines = [
        f"{equal_minutes.told_settings(settings, seeds, commits)} Answers are greedy. Times of "
        f"{settings['prompts_timed']} prompts in turns, in which this process had its processors for {share:.2f} of "
        "the time.",
        "",
        "| drafter | draft | acceptance length | 95 % | seeds | optimiser steps | drafting, plain steps | round, plain "
        "steps | speed-up |",
        "|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in rows:
        low, high = row["ci95"]
        note = " (unreliable)" if row["unreliable"] else ""
        lines.append(
            f"| `{row['drafter']}` | {row['draft']} | {row['acceptance_length']:.3f} | {low:.3f} to {high:.3f} | "
            f"{min(row['by_seed']):.3f} to {max(row['by_seed']):.3f} | {', '.join(map(str, row['steps']))} | "
            f"{row['draft_cost']:.2f} | {row['round_cost']:.2f} | {row['speedup']:.2f}{note} |"
        )
    categories = sorted({name for row in rows for name in row["categories"]})
    lines += ["", "Acceptance length by category (half width of the 95 % interval):", ""]
    lines += [f"| drafter | {' | '.join(categories)} |", "|---|" + "---|" * len(categories)]
    for row in rows:
        cells = []
        for name in categories:
            part = row["categories"][name]
            low, high = part["ci95"]
            cells.append(f"{part['acceptance_length']:.2f} ± {(high - low) / 2:.2f}")
        lines.append(f"| `{row['drafter']}` {row['draft']} | {' | '.join(cells)} |")
    if parted := sum(row["texts_that_part"] for row in rows):
        lines += ["", f"{parted} of the timed texts part from plain decoding's at near ties of the target."]
    return "\n".join([*lines, ""])


def main(argv: list[str] | None = None) -> int:
    """Run the comparison, or go on with it; returns the exit code."""
    return equal_minutes.begin(run, build_parser().parse_args(argv))


def run(arguments: argparse.Namespace) -> int:
    """See :func:`main`."""
    arguments.drafters = list(dict.fromkeys(arguments.drafters))
    settings = equal_minutes.prepare(arguments, {name: DRAFTERS[name] for name in arguments.drafters})
    from modelopt_eagle.export import load_draft
    from modelopt_eagle.target import load_target

    target = load_target(arguments.base_model, dtype="float32")
    found: dict[str, Any] = {"heads": {}, "answers": {}, "speeds": {}}
    for seed in arguments.seeds:
        pairs = []
        for name in arguments.drafters:
            made = equal_minutes.trained(DRAFTERS[name], name, seed, target, arguments)
            found["heads"].setdefault(name, {})[seed] = made
            head = load_draft(made["checkpoint"]).eval()
            for plan in DRAFTERS[name].plans:
                answers = equal_minutes.answered(head, name, seed, plan, target, arguments)
                found["answers"].setdefault(f"{name} {plan_name(plan)}", {})[seed] = answers
                pairs.append((name, head, plan))
        found["speeds"][seed] = equal_minutes.kept(
            arguments.output / f"speeds-seed{seed}-{'-'.join(arguments.drafters)}.json",
            lambda pairs=pairs: equal_minutes.speeds_of(pairs, target, arguments),
        )
    rows = compare(found, arguments)
    commits = equal_minutes.commits_of([part for parts in found["answers"].values() for part in parts.values()])
    text = page(rows, settings, arguments.seeds, commits)
    data = {"settings": settings, "seeds": arguments.seeds, "commits": commits, "rows": rows}
    write_whole(arguments.output / "comparison.json", json.dumps(data, indent=1) + "\n")
    write_whole(arguments.output / "comparison.md", text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
