"""Which drafter to take: heads of each kind trained for equal minutes on the same features, then decoded with.

    python scripts/benchmark/drafters.py --output drafters --minutes 5 --seeds 0 1 2

For every drafter and seed a head is trained by the quick start's settings (the drafter's own quick-start recipe where
it has one), for the same budget, on features that are made once. Each head then answers the same prompts greedily, as a
chain and, where ``PLANS`` says so, as a tree: acceptance length (tokens a pass of the target), all together and by
category. At the end of a seed the generators of all its heads take turns on the same prompts beside plain decoding:
speed-up, and what drafting and a whole round cost, in plain steps.

Equal minutes on a busy machine: ``--clock processor`` (the default) counts the time that the processors worked for the
training, over its threads (recipe key ``training.time_budget_clock``), so what else runs changes nothing but how long
it takes. ``--clock wall`` counts what a watch shows and wants a quiet machine. Speed-ups are of the wall clock either
way; all generators take turns, so that other work slows all of them, and the share of the time that this process had
its processors is told with them: well below 1, they say little.

Every finished part is kept in the output folder, and the same command goes on where an earlier one ended, in the middle
of a training too; with other settings it is refused, but for more drafters and seeds. Intervals are of 95 %, by drawing
whole prompts with all of their seeds; the column "seeds" gives the least and the most of the seeds' own lengths.
Written: ``comparison.json`` and ``comparison.md``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from modelopt_eagle.common.acceptance import bootstrap_interval, pooled_length
from modelopt_eagle.common.files import write_whole
from modelopt_eagle.errors import EagleError, RecipeError

DRAFTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle3": ("quickstart", {}),
    "peagle": ("quickstart_peagle", {}),
    "dflash4": ("quickstart_dflash", {"dflash": {"block_size": 4}}),
    "dflash8": ("quickstart_dflash", {"dflash": {"block_size": 8}}),
    "medusa": ("quickstart_dflash", {"algorithm": "medusa", "dflash": None, "medusa": {"heads": 3},
                                     "eagle": {"draft_vocab_size": 6144, "init": "target"}}),
}  # fmt: skip
"""Name to the shipped recipe, and the sections that replace its own (``None``: leave out)."""
TREE = (2, 3, 7)
PLANS: dict[str, tuple[tuple[int, ...], ...]] = {
    "eagle3": ((3,), TREE),
    "peagle": ((3,), TREE),
    "dflash4": ((3,), TREE),
    "dflash8": ((7,), (3,)),
    "medusa": ((3,),),
}
"""Drafted tokens of a chain, or branching, depth and nodes of a tree."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of heads, parts and the table")
    parser.add_argument("--drafters", nargs="+", default=list(DRAFTERS), choices=DRAFTERS, help="default: all")
    parser.add_argument("--minutes", type=float, default=5.0, help="budget of a training (default 5)")
    parser.add_argument(
        "--clock", choices=("processor", "wall"), default="processor", help="of the budget (default processor)"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="a training each (default 0 1 2)")
    parser.add_argument("--base_model", default="quickstart", help="the target (default quickstart)")
    parser.add_argument("--data", nargs="+", default=["quickstart"], help="text to train on (default quickstart)")
    parser.add_argument("--prompts", default="quickstart", help="questions to answer (default: the 80 shipped)")
    parser.add_argument("--num_samples", type=int, default=24, help="of them, spread evenly (default 24)")
    parser.add_argument("--max_new_tokens", type=int, default=96, help="of an answer (default 96)")
    parser.add_argument("--turns", type=int, default=2, help="asked of each prompt (default 2)")
    parser.add_argument("--speedup_prompts", type=int, default=6, help="timed against plain decoding (default 6)")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="recipe options for all drafters alike"
    )
    return parser


def plan_name(plan: Sequence[int]) -> str:
    """``chain 3`` or ``tree 2x3, 7 nodes``."""
    return f"chain {plan[0]}" if len(plan) == 1 else f"tree {plan[0]}x{plan[1]}, {plan[2]} nodes"


def file_name(plan: Sequence[int]) -> str:
    """The plan as part of a file's name."""
    return "-".join(map(str, ("chain" if len(plan) == 1 else "tree", *plan)))


def options_of(plan: Sequence[int]) -> dict[str, Any]:
    """The plan as the generator takes it."""
    if len(plan) == 1:
        return {"mode": "chain", "num_steps": plan[0]}
    return {"mode": "tree", "topk": plan[0], "depth": plan[1], "num_nodes": plan[2]}


def recipe_of(name: str, seed: int, arguments: argparse.Namespace) -> Any:
    """What a drafter is trained by.

    Raises:
        RecipeError: an option that does not fit this drafter.
    """
    from modelopt_eagle.recipe import load_recipe
    from modelopt_eagle.recipe.loader import find_recipe

    shipped, changes = DRAFTERS[name]
    sections = {**yaml.safe_load(find_recipe(shipped).read_text(encoding="utf-8")), **changes}
    sections = {key: value for key, value in sections.items() if value is not None}
    sections["model"] = {**sections["model"], "base_model": arguments.base_model}
    sections["data"] = {**sections["data"], "train_path": arguments.data}
    sections["training"] = {
        **sections["training"],
        "output_dir": str(run_folder(arguments, name, seed)),
        "run_budget_minutes": None,
        "time_budget_minutes": arguments.minutes,
        "time_budget_clock": arguments.clock,
        "epochs": 1000,  # the budget ends it
        "seed": seed,
        "save_steps": 200,
        "report_to": "none",
    }
    sections["validation"] = {"num_steps": PLANS[name][0][0]}  # of held-out evaluations; prompts are answered here
    return load_recipe(sections, arguments.set)


def run_folder(arguments: argparse.Namespace, name: str, seed: int) -> Path:
    """Where a head is trained."""
    return arguments.output / f"{name}-seed{seed}"


def train_head(name: str, seed: int, target: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train a head, or go on with it; features lie in a folder that all drafters of the same layers share.

    Returns:
        ``checkpoint``, ``steps`` and ``seconds`` by the clock of the budget.
    """
    from modelopt_eagle.draft.algorithm import find_algorithm
    from modelopt_eagle.training import train

    recipe = recipe_of(name, seed, arguments)
    layers = find_algorithm(recipe.drafter.algorithm).default_layers(target.num_layers)
    shared = arguments.output / ("features-" + "-".join(map(str, layers)))
    run = run_folder(arguments, name, seed)
    for folder in (shared, run):
        folder.mkdir(parents=True, exist_ok=True)
    link = run / "features"
    if not link.is_symlink():
        link.symlink_to(shared.resolve(), target_is_directory=True)
    result = train(recipe)
    if not result.finished:
        raise KeyboardInterrupt  # asked for in the training, which has said so
    return {"checkpoint": str(result.best_checkpoint), "steps": result.steps, "seconds": result.seconds}


def answers_of(head: Any, plan: Sequence[int], target: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Prompts answered with a head: of each, its category and the accepted tokens of every round."""
    from modelopt_eagle.data import load_prompts
    from modelopt_eagle.validation import measure_acceptance

    prompts = load_prompts(arguments.prompts, arguments.num_samples)
    report = measure_acceptance(
        target, head, prompts, max_new_tokens=arguments.max_new_tokens, max_turns=arguments.turns, speedup_prompts=0,
        **options_of(plan),
    )  # fmt: skip
    rows = [
        {"id": each.prompt.id, "category": each.prompt.category, "accepted": each.accepted} for each in report.dialogues
    ]
    return {"commit": report.commit, "rows": rows}


def speeds_of(heads: dict[str, Any], target: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """All generators of a seed in turns beside plain decoding: numbers by drafter and plan."""
    from modelopt_eagle.data import load_prompts
    from modelopt_eagle.decoding import PseudoSpeculativeGenerator
    from modelopt_eagle.validation.measure import time_generators

    prompts = load_prompts(arguments.prompts, arguments.num_samples)
    pairs = [(name, plan) for name in heads for plan in PLANS[name]]
    generators = [PseudoSpeculativeGenerator(target, heads[name], **options_of(plan)) for name, plan in pairs]
    speeds = time_generators(generators, prompts, arguments.speedup_prompts, arguments.max_new_tokens)
    return {
        f"{name} {plan_name(plan)}": {
            "speedup": speed.speedup,
            "draft_cost": speed.draft_step / speed.plain_step,
            "round_cost": speed.break_even,
            "processor_share": speed.processor_share,
            "unreliable": speed.implausible,
            "texts_that_part": len(speed.divergences),
        }
        for (name, plan), speed in zip(pairs, speeds, strict=True)
    }


def kept(path: Path, make: Any) -> Any:
    """What an earlier start wrote into a file, or what ``make`` gives, written there."""
    if not path.is_file():
        write_whole(path, json.dumps(make(), indent=1) + "\n")
    return json.loads(path.read_text(encoding="utf-8"))


def claim(arguments: argparse.Namespace) -> None:
    """Write the settings down, or hold them against those of an earlier start; drafters and seeds may be added.

    Raises:
        RecipeError: other settings; budget, counts or seeds that are none.
    """
    for name, least in (("minutes", 0.0), ("num_samples", 0), ("max_new_tokens", 1), ("turns", 0)):
        if not getattr(arguments, name) > least:
            raise RecipeError(f"--{name} must be above {least:g}, found {getattr(arguments, name)}")
    if arguments.speedup_prompts < 1 or min(arguments.seeds) < 0 or len({*arguments.seeds}) < len(arguments.seeds):
        raise RecipeError("--speedup_prompts must be at least 1, and --seeds different numbers from 0 on")
    settings = {key: value for key, value in vars(arguments).items() if key not in ("output", "drafters", "seeds")}
    found = kept(arguments.output / "settings.json", lambda: settings)
    if other := [key for key in settings if found.get(key) != settings[key]]:
        raise RecipeError(
            f"{arguments.output} holds a comparison with another {', '.join(other)} "
            f"({', '.join(str(found.get(key)) for key in other)}): give the same, or another --output"
        )


def by_prompt(parts: Sequence[dict[str, Any]], category: str | None = None) -> list[list[int]]:
    """Accepted tokens of every round, a list a prompt over all seeds; of one category, or of all."""
    rows: dict[str, list[int]] = {}
    for part in parts:
        for row in part["rows"]:
            if category in (None, row["category"]):
                rows.setdefault(row["id"], []).extend(row["accepted"])
    return list(rows.values())


def mean(values: Sequence[float]) -> float:
    """Of numbers, at least one."""
    return sum(values) / len(values)


def compare(found: dict[str, Any], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row a drafter and plan, from the parts by ``(drafter, plan)`` and seed."""
    rows = []
    for name in arguments.drafters:
        for plan in PLANS[name]:
            key = f"{name} {plan_name(plan)}"
            parts = [found["answers"][key][seed] for seed in arguments.seeds]
            accepted = by_prompt(parts)
            lengths = [pooled_length([row["accepted"] for row in part["rows"]]) for part in parts]
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
                    each: {"acceptance_length": pooled_length(by_prompt(parts, each)),
                           "ci95": bootstrap_interval(by_prompt(parts, each))}
                    for each in categories
                },
            })  # fmt: skip
    return rows


def page(rows: Sequence[dict[str, Any]], settings: dict[str, Any], seeds: Sequence[int], commits: Sequence[str]) -> str:
    """The comparison as Markdown."""
    told = "minutes of processor time, over the threads" if settings["clock"] == "processor" else "minutes"
    lines = [
        f"Target {settings['base_model']}; {settings['minutes']:g} {told} of training each, seeds "
        f"{', '.join(map(str, seeds))}; {settings['num_samples']} prompts, answers of up to "
        f"{settings['max_new_tokens']} tokens, greedy; commit {', '.join(sorted({*map(str, commits)}))}. Times of "
        f"{settings['speedup_prompts']} prompts in turns, in which this process had its processors for "
        f"{min(row['processor_share'] for row in rows):.2f} of the time.",
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
    arguments = build_parser().parse_args(argv)
    try:
        return run(arguments)
    except EagleError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command goes on from there", file=sys.stderr)
        return 130


def run(arguments: argparse.Namespace) -> int:
    """See :func:`main`."""
    for name in arguments.drafters:  # what does not fit is told before anything is done
        recipe_of(name, arguments.seeds[0], arguments)
    arguments.output.mkdir(parents=True, exist_ok=True)
    claim(arguments)
    from modelopt_eagle.export import load_draft
    from modelopt_eagle.target import load_target

    target = load_target(arguments.base_model, dtype="float32")
    found: dict[str, Any] = {"heads": {}, "answers": {}, "speeds": {}}
    for seed in arguments.seeds:
        heads = {}
        for name in arguments.drafters:
            run_path = run_folder(arguments, name, seed)
            made = kept(
                arguments.output / f"{name}-seed{seed}.json",
                lambda name=name, seed=seed: train_head(name, seed, target, arguments),
            )
            found["heads"].setdefault(name, {})[seed] = made
            heads[name] = load_draft(made["checkpoint"]).eval()
            for plan in PLANS[name]:
                answers = kept(
                    run_path / f"answers-{file_name(plan)}.json",
                    lambda head=heads[name], plan=plan: answers_of(head, plan, target, arguments),
                )
                found["answers"].setdefault(f"{name} {plan_name(plan)}", {})[seed] = answers
                length = pooled_length([row["accepted"] for row in answers["rows"]])
                print(f"seed {seed}, {name} {plan_name(plan)}: acceptance length {length:.3f}", flush=True)
        names = "-".join(arguments.drafters)
        found["speeds"][seed] = kept(
            arguments.output / f"speeds-seed{seed}-{names}.json",
            lambda heads=heads: speeds_of(heads, target, arguments),
        )
    rows = compare(found, arguments)
    settings = json.loads((arguments.output / "settings.json").read_text(encoding="utf-8"))
    commits = [part["commit"] for parts in found["answers"].values() for part in parts.values()]
    text = page(rows, settings, arguments.seeds, commits)
    data = {"settings": settings, "seeds": arguments.seeds, "commits": sorted({*map(str, commits)}), "rows": rows}
    write_whole(arguments.output / "comparison.json", json.dumps(data, indent=1) + "\n")
    write_whole(arguments.output / "comparison.md", text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
