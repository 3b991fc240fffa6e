"""What a training step costs beside the target: time over the target's forward, and memory for each added token.

    python scripts/benchmark/training_step.py                 quick-start target, B=2, S=512, K=3, Vd=8192, float32
    python scripts/benchmark/training_step.py --supervised 1  every token supervised (default: the data's own mask)
    python scripts/benchmark/training_step.py --compile       also the step with training.torch_compile, in turn

Both ratios come from one run: target and step are timed in turn, so that another load on the machine meets both. The
step is everything but the target's forward: counting, rollout, loss, backward, clipping, optimiser. The memory part
runs one step for each length in a process of its own and reads its peak resident size.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import gc
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from modelopt_eagle.data import prepare_dataset
from modelopt_eagle.draft import DraftConfig, DraftVocab
from modelopt_eagle.draft.algorithm import random_module
from modelopt_eagle.features import FeatureBatch, FeatureContract, predicting_positions
from modelopt_eagle.features.compute import teacher_predictions
from modelopt_eagle.recipe import load_recipe
from modelopt_eagle.target import load_target
from modelopt_eagle.target.head import TargetHead
from modelopt_eagle.target.tiny import make_tiny_target
from modelopt_eagle.training.optimizer import build_optimizers
from modelopt_eagle.training.step import TeacherTables, TrainingStep, compile_layers

MEMORY_LENGTHS = (256, 512, 1024, 2048)


def build_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="quickstart", help="hub id, folder, GGUF file, quickstart, or tiny")
    parser.add_argument("--data", default="quickstart", help="conversations whose tokens and masks are used")
    parser.add_argument("--batch", type=int, default=2, help="B, rows of a step")
    parser.add_argument("--length", type=int, default=512, help="S, tokens of a row")
    parser.add_argument("--steps", type=int, default=3, help="K, rollout steps")
    parser.add_argument("--draft_vocab_size", type=int, default=8192)
    parser.add_argument("--supervised", type=float, help="share of supervised tokens in place of the data's own mask")
    parser.add_argument("--repeats", type=int, default=7, help="timings of each; the median counts")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--compile", action="store_true", help="time the step with compiled layers beside the plain one"
    )
    parser.add_argument("--no-memory", action="store_true", help="time only")
    parser.add_argument("--csv", type=Path, help="append a row")
    parser.add_argument("--memory-of", type=int, metavar="S", help=argparse.SUPPRESS)
    parser.add_argument("--sizes", help=argparse.SUPPRESS)
    return parser


def take_rows(args, tokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    """``[B, S]`` token ids and supervised flags: conversations joined to full rows."""
    wanted = args.batch * args.length
    ids: list[int] = []
    flags: list[bool] = []
    rows = prepare_dataset(tokenizer, args.data).rows
    while len(ids) < wanted:
        for row in rows:
            ids += row.input_ids
            flags += row.supervised
    shape = (args.batch, args.length)
    supervised = torch.tensor(flags[:wanted]).view(shape)
    if args.supervised is not None:
        supervised = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < args.supervised
    return torch.tensor(ids[:wanted]).view(shape), supervised


def make_step(config: DraftConfig, embedding, head, steps: int, device: str):
    """``(step, optimisers, settings)`` as the trainer builds them."""
    recipe = load_recipe(None, [f"eagle.ttt_steps={steps}"])
    vocab = DraftVocab.from_counts(torch.zeros(config.vocab_size), config.draft_vocab_size)
    module = random_module(config, vocab, seed=0).to(device)
    tables = TeacherTables.make(embedding, head, module.target_ids, device)
    return TrainingStep(module, tables, recipe.eagle), build_optimizers(module, recipe.training), recipe.training


def pack(ids, supervised, aux, final, top1, contract) -> FeatureBatch:
    """A feature batch of B documents from ``[B, S, ...]`` tensors."""
    documents = torch.arange(len(ids), device=ids.device)[:, None].expand_as(ids)  # [B,S]
    flat = [tensor.reshape(1, -1, *tensor.shape[2:]) for tensor in (ids, supervised, documents, aux, final, top1)]
    return FeatureBatch(*flat, None, [str(row) for row in range(len(ids))], contract)


def run_step(step: TrainingStep, optimizers, settings, batch: FeatureBatch) -> None:
    """One optimiser step, as the trainer does it."""
    normalizers = step.normalisers(step.count_positions(batch), batch.num_tokens)
    step(batch, normalizers).loss.backward()
    torch.nn.utils.clip_grad_norm_(step.parameters(), settings.max_grad_norm)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def timed(function, device: str) -> float:
    """Seconds of one call."""
    if device != "cpu":
        torch.accelerator.synchronize()
    begun = time.perf_counter()
    function()
    if device != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - begun


def measure_time(args, target) -> dict:
    """Medians of the target's forward (with and without its output head) and of the step, timed in turn."""
    ids, supervised = (tensor.to(args.device) for tensor in take_rows(args, target.tokenizer))
    config = DraftConfig.from_target(target.config, args.draft_vocab_size)
    step, optimizers, settings = make_step(config, target.embedding.weight, target.head, args.steps, args.device)
    with torch.no_grad():
        output = target.features(ids, None, config.aux_layer_ids)
    top1 = torch.full_like(ids, -1)
    at = predicting_positions(supervised)
    top1[at] = teacher_predictions(target.head, output.final_hidden[at])[0]
    contract = FeatureContract.from_target(target, config.aux_layer_ids)
    batch = pack(ids, supervised, output.aux_hidden.float(), output.final_hidden, top1, contract)

    def forward():
        with torch.no_grad():
            target.model(input_ids=ids, use_cache=False)

    parts = {
        "target_forward": forward,
        "target_backbone": lambda: target.features(ids, None, config.aux_layer_ids),
        "step": lambda: run_step(step, optimizers, settings, batch),
    }
    if args.compile:
        built = make_step(config, target.embedding.weight, target.head, args.steps, args.device)
        compile_layers(built[0].module)
        parts["compiled_step"] = lambda: run_step(*built, batch)
    times: dict[str, list[float]] = {name: [] for name in parts}
    for repeat in range(args.repeats + 1):
        for name, function in parts.items():
            seconds = timed(function, args.device)
            if repeat:  # the first warms up
                times[name].append(seconds)
    medians = {name: statistics.median(values) for name, values in times.items()}
    ratios = [step / full for step, full in zip(times["step"], times["target_forward"], strict=True)]
    found = {}
    if args.compile:
        gains = [fast / plain for fast, plain in zip(times["compiled_step"], times["step"], strict=True)]
        found["compiled_ratio"] = statistics.median(gains)
    return {
        **found,
        **{f"{name}_s": value for name, value in medians.items()},
        "supervised_share": float(supervised.float().mean()),
        "ratio": statistics.median(ratios),
        "ratio_backbone": medians["step"] / medians["target_backbone"],
    }


def measure_memory(args, config: DraftConfig) -> list[dict]:
    """Peak resident bytes of a step for each length, each in a process of its own, and the growth between them."""
    rows = []
    for length in MEMORY_LENGTHS:
        command = [sys.executable, __file__, "--memory-of", str(length), "--sizes", json.dumps(config.to_dict()),
                   "--batch", str(args.batch), "--steps", str(args.steps)]  # fmt: skip
        if args.supervised is not None:
            command += ["--supervised", str(args.supervised)]
        # every larger block goes back to the system when it is freed, so that the peak is what was in use at once
        settings = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
        peak = int(subprocess.run(command, check=True, capture_output=True, text=True, env=settings).stdout)
        row = {"length": length, "peak_bytes": peak}
        if rows:
            added = args.batch * (length - rows[-1]["length"])
            row["bytes_per_added_token"] = (peak - rows[-1]["peak_bytes"]) / added
        rows.append(row)
    return rows


def peak_of_one_step(args) -> int:
    """In the child process: bytes at the peak of one step on random features, without a target."""
    config = DraftConfig.from_dict(json.loads(args.sizes))
    generator = torch.Generator().manual_seed(0)
    width, batch, length = config.target_hidden_size, args.batch, args.memory_of
    table = torch.randn(config.vocab_size, width, generator=generator)
    step, optimizers, settings = make_step(config, table, TargetHead(table), args.steps, "cpu")
    contract = FeatureContract(
        "random", None, config.aux_layer_ids, True, "float32", None, None, width, config.vocab_size
    )

    def features(size: int) -> FeatureBatch:
        share = 0.8 if args.supervised is None else args.supervised
        ids = torch.randint(0, config.vocab_size, (batch, size), generator=generator)
        supervised = torch.rand(batch, size, generator=generator) < share
        aux = torch.randn(batch, size, config.fc_input_size, generator=generator)
        return pack(ids, supervised, aux, torch.randn(batch, size, width, generator=generator), ids, contract)

    run_step(step, optimizers, settings, features(16))  # optimiser states and libraries
    gc.collect()
    forget_peak()
    run_step(step, optimizers, settings, features(length))
    return peak_bytes()


def forget_peak() -> None:
    """Begin the peak of this process anew, where the system can (Linux)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Peak resident size since :func:`forget_peak`."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main() -> int:
    """Measure and print."""
    args = build_parser().parse_args()
    if args.memory_of is not None:
        print(peak_of_one_step(args))
        return 0
    target = make_tiny_target() if args.target == "tiny" else load_target(args.target, device=args.device)
    if args.target == "tiny":
        args.draft_vocab_size = min(args.draft_vocab_size, target.vocab_size)
    print(f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"{target.name}, B={args.batch} S={args.length} K={args.steps} Vd={args.draft_vocab_size} float32")
    found = measure_time(args, target)
    print(f"target's forward            {found['target_forward_s']:8.3f} s   (without its output head "
          f"{found['target_backbone_s']:.3f} s)")  # fmt: skip
    share = found["supervised_share"]
    print(f"step without it             {found['step_s']:8.3f} s   ({share:.0%} of the tokens supervised)")
    print(f"step / target's forward     {found['ratio']:8.3f}     (/ backbone alone {found['ratio_backbone']:.3f})")
    if args.compile:
        print(f"compiled / plain step       {found['compiled_ratio']:8.3f}     (compilation itself is not counted)")
    if not args.no_memory and args.device == "cpu":
        memory = measure_memory(args, DraftConfig.from_target(target.config, args.draft_vocab_size))
        for row in memory:
            growth = row.get("bytes_per_added_token")
            text = "" if growth is None else f"   {growth / 1024:8.1f} KiB for each added token"
            print(f"peak at S={row['length']:<5} {row['peak_bytes'] / 2**20:10.0f} MiB{text}")
        growths = [row["bytes_per_added_token"] for row in memory[1:]]
        found["growth_ratio"] = max(growths) / max(1.0, min(growths))
        print(f"largest over smallest growth {found['growth_ratio']:7.3f}")
    if args.csv is not None:
        write_row(args, found)
    return 0


def write_row(args, found: dict) -> None:
    """Append a row with the options and what was found."""
    row = {
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        **{name: getattr(args, name) for name in ("target", "batch", "length", "steps", "draft_vocab_size")},
        **{name: round(value, 5) for name, value in found.items()},
    }
    new = not args.csv.exists()
    with args.csv.open("a", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, row.keys())
        if new:
            writer.writeheader()
        writer.writerow(row)


if __name__ == "__main__":
    sys.exit(main())
