"""What each storage dtype of a feature store costs: bytes a token, and acceptance length of a head trained from it.

One float32 store is written again in each dtype, the same recipe is trained on each (same start, seed, order and number
of steps), and every head walks the same held-out rows, whose features stay float32. The text of the held-out rows must
be the target's own (as the quick start's is): the walk then accepts what greedy decoding would accept.

    python scripts/benchmark/storage_dtypes.py --store ckpts/quickstart/features --steps 100

Intervals are 95 %, by drawing held-out conversations with replacement; the difference to float32 is drawn in pairs.
"""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from modelopt_eagle.common.acceptance import acceptance_length, bootstrap_interval
from modelopt_eagle.errors import FeatureError
from modelopt_eagle.export import load_draft
from modelopt_eagle.features import OfflineSource
from modelopt_eagle.features.store import STORAGE_DTYPES, StoreReader, StoreWriter, maintenance
from modelopt_eagle.recipe import load_recipe
from modelopt_eagle.target import load_target_tables
from modelopt_eagle.training import train
from modelopt_eagle.training.acceptance import evaluate
from modelopt_eagle.training.data import Rows
from modelopt_eagle.training.run import make_accelerator
from modelopt_eagle.training.step import TeacherTables, TrainingStep

ROUNDS = 2000


def build_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, required=True, help="a float32 store of the recipe's target")
    parser.add_argument("--recipe", default="quickstart", help="recipe of the training (default quickstart)")
    parser.add_argument("--steps", type=int, default=100, help="optimiser steps of each training")
    parser.add_argument("--held-out", type=int, default=96, help="rows walked and not trained on")
    parser.add_argument("--dtypes", nargs="+", default=list(STORAGE_DTYPES), choices=list(STORAGE_DTYPES))
    parser.add_argument("--folder", type=Path, help="where stores and heads are kept (default: a temporary folder)")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of the recipe")
    return parser


def split(count: int, held_out: int) -> tuple[list[int], list[int]]:
    """Row numbers to train on, and to walk, spread evenly."""
    held = {(2 * i + 1) * count // (2 * held_out) for i in range(held_out)}
    return [n for n in range(count) if n not in held], sorted(held)


def write_again(reader: StoreReader, numbers: list[int], folder: Path, dtype: str) -> float:
    """Write rows of a store into another; goes on where it stopped. Returns its seconds."""
    begun = time.perf_counter()
    contract = replace(reader.contract, dtype=dtype)
    name = f"{reader.dataset_hash} {numbers}"
    with StoreWriter(folder, contract, dataset_hash=name, dataset_rows=len(numbers)) as writer:
        for index, number in enumerate(numbers):
            if index not in writer.done:
                writer.add(index, reader.row(number))
    return time.perf_counter() - begun


def run_recipe(args: argparse.Namespace, output: Path, *overrides: str):
    """Train, or go on with, one run of the recipe."""
    fixed = [
        f"training.output_dir={output}", "training.time_budget_minutes=null", f"training.max_steps={args.steps}",
        "training.epochs=1000", "training.eval_steps=null", "training.save_steps=null", "training.report_to=none",
        "data.cache_features=none",
    ]  # fmt: skip
    return train(load_recipe(args.recipe, [*fixed, *args.overrides, *overrides]))


def walk(checkpoint: Path, source: OfflineSource, args: argparse.Namespace, accelerator) -> list[list[int]]:
    """Accepted drafted tokens of every step of every held-out answer."""
    recipe = load_recipe(args.recipe, args.overrides)
    arguments = recipe.model.load_arguments()
    del arguments["attn_implementation"]
    target = load_target_tables(**arguments)
    head = load_draft(checkpoint, dtype="float32")
    tables = TeacherTables.make(target.embedding_weight, target.head, head.target_ids, accelerator.device)
    step = TrainingStep(head.to(accelerator.device), tables, recipe.eagle)
    return evaluate(step, source, accelerator, batch_size=8, num_steps=recipe.validation.num_steps).accepted


def paired_interval(ours: list[list[int]], base: list[list[int]], seed: int = 0) -> tuple[float, float]:
    """95 % interval of the difference of two acceptance lengths on the same rows, drawn together."""
    counts = torch.tensor([[len(a), len(a) + sum(a), len(b), len(b) + sum(b)] for a, b in zip(ours, base, strict=True)])
    drawn = torch.randint(len(counts), (ROUNDS, len(counts)), generator=torch.Generator().manual_seed(seed))
    sums = counts.double()[drawn].sum(1)  # [rounds,4]
    difference = sums[:, 1] / sums[:, 0] - sums[:, 3] / sums[:, 2]  # [rounds]
    low, high = difference.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def compare(args: argparse.Namespace, folder: Path) -> list[str]:
    """Lines of a Markdown table."""
    reader = StoreReader(args.store, verify="read")
    if reader.contract.dtype != "float32":
        raise FeatureError(
            f"{args.store} is {reader.contract.dtype}; give a float32 store, the others are made from it"
        )
    numbers, held = split(len(reader), args.held_out)
    accelerator = make_accelerator(load_recipe(args.recipe, args.overrides))
    text_only = "eagle.draft_vocab_counts=text"
    start = run_recipe(args, folder / "start", "training.dry_run=true", text_only).last_checkpoint
    walked, lines = {}, ["| dtype | bytes a token | acceptance length | difference to float32 |", "|---|---|---|---|"]
    for dtype in args.dtypes:
        seconds = write_again(reader, numbers, folder / dtype, dtype)
        summary = maintenance.summarise(folder / dtype)
        begun = time.perf_counter()
        result = run_recipe(
            args, folder / f"run-{dtype}", text_only, f"data.offline_data_path={folder / dtype}", "eagle.init=random",
            f"model.draft_init={start}", "data.train_path=quickstart",  # the rows are the store's
        )  # fmt: skip
        trained = time.perf_counter() - begun
        source = OfflineSource(Rows(reader, held, max(reader.lengths)))
        walked[dtype] = walk(result.last_checkpoint, source, args, accelerator)
        print(f"{dtype}: written in {seconds:.0f} s, {result.steps} steps in {trained:.0f} s", file=sys.stderr)
        low, high = bootstrap_interval(walked[dtype])
        base = walked.get("float32", walked[args.dtypes[0]])
        away = acceptance_length(walked[dtype]) - acceptance_length(base)
        less, more = paired_interval(walked[dtype], base)
        gap = "" if base is walked[dtype] else f"{away:+.3f} ({less:+.3f} to {more:+.3f})"
        lines.append(
            f"| {dtype} | {summary.bytes / summary.tokens:,.0f} | {acceptance_length(walked[dtype]):.3f} "
            f"({low:.3f} to {high:.3f}) | {gap} |"
        )
    steps = sum(map(len, walked[args.dtypes[0]]))
    lines.append(f"\n{len(held)} held-out rows, {steps} steps walked; {args.steps} optimiser steps each")
    return lines


def main() -> None:
    args = build_parser().parse_args()
    print(f"machine: {platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    if args.folder is not None:
        args.folder.mkdir(parents=True, exist_ok=True)
        print("\n".join(compare(args, args.folder)))
        return
    with tempfile.TemporaryDirectory() as name:
        print("\n".join(compare(args, Path(name))))


if __name__ == "__main__":
    main()
