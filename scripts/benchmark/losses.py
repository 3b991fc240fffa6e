"""The loss ``lk`` against ``kl``: heads trained on the same stored features by equal steps, acceptance at T = 0 and 1.

    python scripts/benchmark/losses.py --output_dir ckpts/losses --steps 300 --seeds 0 1

The target's features are stored once a seed (``output_dir/store-SEED``); both losses train from them, with the recipe's
values otherwise, so that two runs of a seed differ in their loss only. Acceptance is measured by decoding the prompts:
greedily at T = 0, and with drawn answers and drawn drafts (exact rejection) above. Prints a row a run and the means of
each loss, with the processor minutes that training took, and writes them to ``output_dir/losses.json`` after every
run; the same command goes on where it was stopped. Other values of the recipe are given as ``section.key=value``.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="values in place of the recipe's")
    parser.add_argument("--recipe", default="quickstart", help="recipe (default quickstart)")
    parser.add_argument("--output_dir", type=Path, required=True, help="stores, runs and results")
    parser.add_argument("--losses", nargs="+", choices=("kl", "lk"), default=["kl", "lk"], help="(default kl lk)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="of weights and order (default 0 1)")
    parser.add_argument("--steps", type=int, default=300, help="optimiser steps of each run (default 300)")
    parser.add_argument("--rows", type=int, default=800, help="conversations stored (default 800)")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0], help="(default 0 1)")
    parser.add_argument("--prompts", default="quickstart", help="JSONL of prompts (default: the shipped ones)")
    parser.add_argument("--num_prompts", type=int, default=48, help="prompts decoded (default 48)")
    parser.add_argument("--max_new_tokens", type=int, default=96, help="limit of an answer (default 96)")
    return parser


def main() -> None:
    """Run the benchmark."""
    arguments = build_parser().parse_intermixed_args()
    from modelopt_eagle.common.files import write_whole
    from modelopt_eagle.common.package import package_commit
    from modelopt_eagle.data import load_prompts
    from modelopt_eagle.recipe import load_recipe
    from modelopt_eagle.target import load_target
    from modelopt_eagle.validation.report import format_table

    out = arguments.output_dir
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    target = load_target(**recipe.model.decoding_arguments())
    prompts = load_prompts(arguments.prompts, arguments.num_prompts)
    file = out / "losses.json"
    done = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []
    for seed in arguments.seeds:
        for loss in arguments.losses:
            if any((row["loss"], row["seed"], row["steps"]) == (loss, seed, arguments.steps) for row in done):
                continue
            done.append(one_run(arguments, target, prompts, loss, seed))
            write_whole(file, json.dumps(done, indent=1) + "\n")
    names = [f"T = {temperature:g}" for temperature in arguments.temperatures]
    rows = [("loss", "seed", "steps", "processor minutes", *names)]
    for row in done:
        lengths = (f"{row['acceptance_length'][name]:.3f}" for name in names)
        rows.append((row["loss"], str(row["seed"]), str(row["steps"]), f"{row['seconds'] / 60:.1f}", *lengths))
    for loss in arguments.losses:
        of = [row for row in done if row["loss"] == loss and row["steps"] == arguments.steps]
        means = (sum(row["acceptance_length"][name] for row in of) / len(of) for name in names)
        minutes = sum(row["seconds"] for row in of) / len(of) / 60
        rows.append((loss, "mean", str(arguments.steps), f"{minutes:.1f}", *(f"{mean:.3f}" for mean in means)))
    print(f"{target.name}; {package_commit()}; acceptance length of chains of {recipe.validation.num_steps}")
    print(format_table(rows))


def one_run(arguments, target, prompts, loss: str, seed: int) -> dict:
    """Train a head with a loss and a seed, and measure it at each temperature."""
    from modelopt_eagle.decoding import SamplingOptions
    from modelopt_eagle.export import load_draft
    from modelopt_eagle.recipe import load_recipe
    from modelopt_eagle.training import train
    from modelopt_eagle.validation import measure_acceptance

    run = arguments.output_dir / f"{loss}-{seed}-{arguments.steps}"
    run.mkdir(parents=True, exist_ok=True)
    for name in ("features", "evaluation_features"):  # where a run keeps them
        store = (arguments.output_dir / f"store-{seed}" / name).resolve()
        store.mkdir(parents=True, exist_ok=True)
        if not (run / name).exists():
            (run / name).symlink_to(store)
    fixed = {
        "data.max_rows": arguments.rows,
        "data.cache_features": "disk",
        "training.output_dir": run,
        "training.max_steps": arguments.steps,
        "training.epochs": 1000,
        "training.time_budget_minutes": "null",
        "training.run_budget_minutes": "null",
        "training.seed": seed,
        "eagle.loss": loss,
    }
    overrides = [*arguments.overrides, *(f"{key}={value}" for key, value in fixed.items())]
    recipe = load_recipe(arguments.recipe, overrides)
    clock = Clock()
    result = train(recipe, target=target, on_step=clock, quiet=True)
    seconds = clock.seconds * result.steps / max(1, result.steps - 1)
    head = load_draft(result.best_checkpoint, dtype=target.dtype).to(target.device).eval()
    lengths = {}
    for temperature in arguments.temperatures:
        report = measure_acceptance(
            target, head, prompts, num_steps=recipe.validation.num_steps, max_new_tokens=arguments.max_new_tokens,
            speedup_prompts=0, seed=seed, sampling=SamplingOptions(temperature), sample_drafts=temperature > 0,
        )  # fmt: skip
        lengths[f"T = {temperature:g}"] = report.acceptance_length
    return {"loss": loss, "seed": seed, "steps": result.steps, "seconds": seconds, "acceptance_length": lengths}


class Clock:
    """Processor seconds from the first step's end to the last's: features and loading left out."""

    def __init__(self):
        self.begun: float | None = None
        self.seconds = 0.0

    def __call__(self, *step) -> None:
        if self.begun is None:
            self.begun = time.process_time()
        self.seconds = time.process_time() - self.begun


if __name__ == "__main__":
    main()
