"""Heads trained for equal minutes on the same features, then decoded with: what drafters.py and choices.py share.

Equal minutes on a busy machine: ``--clock processor`` (the default) counts the time that the processors worked for the
training, over its threads (recipe key ``training.time_budget_clock``), so what else runs changes nothing but how long
it takes. ``--clock wall`` counts what a watch shows and wants a quiet machine. Speed-ups are of the wall clock either
way; all generators take turns, so that other work slows all of them, and the share of the time that this process had
its processors is told with them: well below 1, they say little.

Every finished part is kept in the output folder, and the same command goes on where an earlier one ended, in the middle
of a training too; with other settings it is refused, but for more heads and seeds. Both scripts may work on one folder,
one after the other: heads of the same name, features and answers are made once.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from modelopt_eagle.cli._options import add_prompt_options
from modelopt_eagle.common.acceptance import pooled_length
from modelopt_eagle.common.files import disk_trouble, write_whole
from modelopt_eagle.errors import EagleError, RecipeError
from modelopt_eagle.recipe.loader import override_name

Plan = tuple[int, ...]
"""Drafted tokens of a chain, or branching, depth and nodes of a tree."""
CHAIN: Plan = (3,)
SETTINGS = (
    "minutes", "clock", "base_model", "data", "prompts", "num_samples", "max_new_tokens", "turns", "speedup_prompts",
    "set",
)  # fmt: skip
"""Options that all heads of an output folder share; ``settings.json`` holds them."""


OWN = {
    "model.base_model": "--base_model names it",
    "data.train_path": "--data names it",
    "drafter.algorithm": "each head has its own",
    "training.output_dir": "--output names the folder of all heads",
    "training.seed": "--seeds are trained one after the other",
    "training.time_budget_minutes": "--minutes says it",
    "training.time_budget_clock": "--clock says it",
    **dict.fromkeys(
        ("training.run_budget_minutes", "training.epochs", "training.max_steps"), "--minutes ends every training"
    ),
}
"""Keys that the comparison itself sets, and why ``--set`` may not."""


@dataclass(frozen=True)
class Contestant:
    """A head that takes part.

    Attributes:
        recipe: the shipped one that it is trained by.
        sections: replace the recipe's own (``None``: leave out).
        overrides: ``section.key=value``, put over it last.
        plans: what it drafts; a chain of the first one's length is walked after training.
    """

    recipe: str = "quickstart"
    sections: dict[str, Any] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    plans: tuple[Plan, ...] = (CHAIN,)


def make_parser(text: str | None) -> argparse.ArgumentParser:
    """A parser with the options that both scripts have, :data:`SETTINGS` among them."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of heads, parts and the table")
    parser.add_argument("--minutes", type=float, default=5.0, help="budget of a training (default 5)")
    parser.add_argument(
        "--clock", choices=("processor", "wall"), default="processor", help="of the budget (default processor)"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="a training each (default 0 1 2)")
    parser.add_argument("--base_model", default="quickstart", help="the target (default quickstart)")
    parser.add_argument("--data", nargs="+", default=["quickstart"], help="text to train on (default quickstart)")
    add_prompt_options(parser, num_samples=24, max_new_tokens=96)
    parser.add_argument("--turns", type=int, default=2, help="asked of each prompt (default 2)")
    parser.add_argument("--speedup_prompts", type=int, default=6, help="timed against plain decoding (default 6)")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="recipe options for all heads alike")
    return parser


def plan_name(plan: Plan) -> str:
    """``chain 3`` or ``tree 2x3, 7 nodes``."""
    return f"chain {plan[0]}" if len(plan) == 1 else f"tree {plan[0]}x{plan[1]}, {plan[2]} nodes"


def file_name(plan: Plan) -> str:
    """The plan as part of a file's name."""
    return "-".join(map(str, ("chain" if len(plan) == 1 else "tree", *plan)))


def options_of(plan: Plan) -> dict[str, Any]:
    """The plan as the generator takes it."""
    if len(plan) == 1:
        return {"mode": "chain", "num_steps": plan[0]}
    return {"mode": "tree", "topk": plan[0], "depth": plan[1], "num_nodes": plan[2]}


def run_folder(arguments: argparse.Namespace, name: str, seed: int) -> Path:
    """Where a head is trained."""
    return arguments.output / f"{name}-seed{seed}"


def recipe_of(contestant: Contestant, name: str, seed: int, arguments: argparse.Namespace) -> Any:
    """What a head is trained by.

    Raises:
        RecipeError: an option that does not fit it.
    """
    from modelopt_eagle.recipe import load_recipe
    from modelopt_eagle.recipe.loader import find_recipe

    shipped = yaml.safe_load(find_recipe(contestant.recipe).read_text(encoding="utf-8"))
    sections = {key: value for key, value in {**shipped, **contestant.sections}.items() if value is not None}
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
    sections["validation"] = {"num_steps": contestant.plans[0][0]}  # of held-out rows; prompts are answered here
    return load_recipe(sections, [*arguments.set, *contestant.overrides])


def train_head(
    contestant: Contestant, name: str, seed: int, target: Any, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Train a head, or go on with it; features lie in a folder that all heads of the same layers and rows share.

    Returns:
        ``checkpoint``, ``steps`` and ``seconds`` by the clock of the budget.
    """
    from modelopt_eagle.draft.algorithm import find_algorithm
    from modelopt_eagle.training import train

    recipe = recipe_of(contestant, name, seed, arguments)
    layers = recipe.eagle.aux_layer_ids or find_algorithm(recipe.drafter.algorithm).default_layers(target.num_layers)
    rows = recipe.data.max_rows
    parts = ("features", *map(str, layers), *(() if rows is None else (f"rows{rows}",)))
    shared, run = arguments.output / "-".join(parts), run_folder(arguments, name, seed)
    for folder in (shared, run):
        folder.mkdir(parents=True, exist_ok=True)
    link = run / "features"
    if not link.is_symlink():
        link.symlink_to(shared.resolve(), target_is_directory=True)
    result = train(recipe)
    if not result.finished:
        raise KeyboardInterrupt  # asked for in the training, which has said so
    return {"checkpoint": str(result.best_checkpoint), "steps": result.steps, "seconds": result.seconds}


def trained(contestant: Contestant, name: str, seed: int, target: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """What :func:`train_head` gives, or gave an earlier start."""
    file = arguments.output / f"{name}-seed{seed}.json"
    return kept(file, lambda: train_head(contestant, name, seed, target, arguments))


def answered(
    head: Any, name: str, seed: int, plan: Plan, target: Any, arguments: argparse.Namespace, temperature: float = 0.0
) -> dict[str, Any]:
    """Prompts answered with a head, now or by an earlier start: of each, its category and the accepted tokens of every
    round. Above temperature 0 answers and drafts are drawn, by the head's seed."""
    from modelopt_eagle.data import load_prompts
    from modelopt_eagle.decoding import SamplingOptions
    from modelopt_eagle.validation import measure_acceptance

    def answer() -> dict[str, Any]:
        drawn = {} if temperature == 0 else {"sampling": SamplingOptions(temperature), "sample_drafts": True}
        report = measure_acceptance(
            target, head, load_prompts(arguments.prompts, arguments.num_samples), speedup_prompts=0, seed=seed,
            max_new_tokens=arguments.max_new_tokens, max_turns=arguments.turns, **options_of(plan), **drawn,
        )  # fmt: skip
        rows = [
            {"id": each.prompt.id, "category": each.prompt.category, "accepted": each.accepted}
            for each in report.dialogues
        ]
        return {"commit": report.commit, "rows": rows}

    ending = "" if temperature == 0 else f"-t{temperature:g}"
    found = kept(run_folder(arguments, name, seed) / f"answers-{file_name(plan)}{ending}.json", answer)
    told = "" if temperature == 0 else f" at temperature {temperature:g}"
    print(f"seed {seed}, {name} {plan_name(plan)}{told}: acceptance length {length_of(found):.3f}", flush=True)
    return found


def speeds_of(pairs: Sequence[tuple[str, Any, Plan]], target: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Heads under their names, with a plan each, in turns beside plain decoding: numbers by name and plan."""
    from modelopt_eagle.data import load_prompts
    from modelopt_eagle.decoding import PseudoSpeculativeGenerator
    from modelopt_eagle.validation.measure import time_generators

    prompts = load_prompts(arguments.prompts, arguments.num_samples)
    generators = [PseudoSpeculativeGenerator(target, head, **options_of(plan)) for _, head, plan in pairs]
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
        for (name, _, plan), speed in zip(pairs, speeds, strict=True)
    }


def kept(path: Path, make: Callable[[], Any]) -> Any:
    """What an earlier start wrote into a file, or what ``make`` gives, written there."""
    if not path.is_file():
        write_whole(path, json.dumps(make(), indent=1) + "\n")
    return json.loads(path.read_text(encoding="utf-8"))


def prepare(arguments: argparse.Namespace, contestants: Mapping[str, Contestant]) -> dict[str, Any]:
    """Look at everything that is asked for before anything is done, then claim the output folder.

    Returns:
        the settings, with ``prompts_answered`` and ``prompts_timed``.

    Raises:
        DataError: text or prompts that are missing or broken.
        RecipeError: an option that does not fit, a folder that cannot be written, or other settings in it.
    """
    from modelopt_eagle.data import load_prompts
    from modelopt_eagle.data.files import check_sources

    check_overrides(arguments.set, contestants)
    for name, contestant in contestants.items():
        recipe_of(contestant, name, arguments.seeds[0], arguments)
    check_sources(arguments.data)
    prompts = len(load_prompts(arguments.prompts, arguments.num_samples))
    settings = claim(arguments)
    return {**settings, "prompts_answered": prompts, "prompts_timed": min(prompts, arguments.speedup_prompts)}


def check_numbers(arguments: argparse.Namespace) -> None:
    """Refuse budget, counts and seeds that are none, by the names that they were given under.

    Raises:
        RecipeError: the first of them.
    """
    for name in ("minutes", "num_samples", "max_new_tokens", "turns", "speedup_prompts"):
        value, least = getattr(arguments, name), int(name == "max_new_tokens")
        if not least < value < math.inf:
            raise RecipeError(f"--{name} must be {'a number ' * (value == math.inf)}above {least}, found {value:g}")
    seeds = arguments.seeds
    if not all(0 <= seed < 2**32 for seed in seeds) or len({*seeds}) < len(seeds):
        raise RecipeError(f"--seeds must be different numbers from 0 to {2**32 - 1}, found {' '.join(map(str, seeds))}")


def check_overrides(texts: Sequence[str], contestants: Mapping[str, Contestant]) -> None:
    """Refuse what ``--set`` would change of the comparison itself.

    Raises:
        RecipeError: a key of :data:`OWN`, or one in which a head that takes part differs from the others.
    """
    changed = {override_name(text): head for head, each in contestants.items() for text in each.overrides}
    for text in texts:
        key = ".".join(override_name(text).split(".")[:2])
        if key in OWN:
            raise RecipeError(f"--set {text}: {key} is not an option here: {OWN[key]}")
        if key in changed:
            raise RecipeError(
                f"--set {text}: {key} is what {changed[key]} changes: leave it out, or compare without {changed[key]}"
            )


def claim(arguments: argparse.Namespace) -> dict[str, Any]:
    """Write the settings down, or hold them against those of an earlier start; heads and seeds may be added.

    Returns:
        the settings.

    Raises:
        RecipeError: other settings, or a folder that cannot be written.
    """
    settings = {key: getattr(arguments, key) for key in SETTINGS}
    try:
        arguments.output.mkdir(parents=True, exist_ok=True)
        found = kept(arguments.output / "settings.json", lambda: settings)
    except OSError as error:
        raise RecipeError(
            f"cannot write into {arguments.output}: {disk_trouble(error)}; name an --output that can be written"
        ) from error
    if other := [key for key in settings if found.get(key) != settings[key]]:
        raise RecipeError(
            f"{arguments.output} holds a comparison with another {', '.join(other)} "
            f"({', '.join(str(found.get(key)) for key in other)}): give the same, or another --output"
        )
    return settings


def by_prompt(parts: Sequence[dict[str, Any]], category: str | None = None) -> dict[str, list[int]]:
    """Accepted tokens of every round over all seeds, by the prompt's id; of one category, or of all."""
    rows: dict[str, list[int]] = {}
    for part in parts:
        for row in part["rows"]:
            if category in (None, row["category"]):
                rows.setdefault(row["id"], []).extend(row["accepted"])
    return rows


def length_of(part: dict[str, Any]) -> float:
    """The pooled acceptance length of one seed's answers."""
    return pooled_length([row["accepted"] for row in part["rows"]])


def mean(values: Sequence[float]) -> float:
    """Of numbers, at least one."""
    return sum(values) / len(values)


def commits_of(parts: Sequence[dict[str, Any]]) -> list[str]:
    """The commits that answers were made at."""
    return sorted({str(part["commit"]) for part in parts})


def told_settings(settings: dict[str, Any], seeds: Sequence[int], commits: Sequence[str]) -> str:
    """A sentence on what was held equal."""
    told = "minutes of processor time, over the threads" if settings["clock"] == "processor" else "minutes"
    return (
        f"Target {settings['base_model']}; {settings['minutes']:g} {told} of training each, seeds "
        f"{', '.join(map(str, seeds))}; {settings['prompts_answered']} prompts, answers of up to "
        f"{settings['max_new_tokens']} tokens; commit {', '.join(commits)}."
    )


def begin(run: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    """Run a comparison, or go on with it; returns the exit code."""
    try:
        check_numbers(arguments)
        return run(arguments)
    except EagleError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command goes on from there", file=sys.stderr)
        return 130
