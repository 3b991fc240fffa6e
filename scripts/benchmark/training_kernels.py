"""The kernels of a training step: sizes, bytes, arithmetic and floor of each, and on a GPU its time beside others.

    python scripts/benchmark/training_kernels.py                        # no GPU: the floors on an H200's data sheet
    python scripts/benchmark/training_kernels.py --json times.json      # on a CUDA machine: measured times, too
    python scripts/benchmark/training_kernels.py --dry_run              # small sizes on the CPU, without Triton

A contestant is another way to compute the same: the plain code, a library's kernel (those of the attention stand in
attention_contestants.py). Before one is timed its result is held against the plain reference, values and gradients, at
a small size of the case; one that differs, fails or is not to be had here is named and not timed. The floor is the
longer of bytes over bandwidth and arithmetic over the matrix rate: on a GPU both are measured in the same run (a copy,
a product of two square bf16 matrices), elsewhere they are the data sheet's. Where a kernel replaces several operations
of torch, what these move, each by itself, stands beside the floor.

Exit codes: 0 all right, 1 a kernel of ours fails or differs, 3 no CUDA device here.

The kernels, their cases and contestants are in ``training_cases.py`` and ``layer_cases.py``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import kernels as benchmark  # scripts/benchmark/kernels.py
import training_cases  # scripts/benchmark/training_cases.py
from layer_cases import LAYER_KERNELS  # scripts/benchmark/layer_cases.py
from training_cases import Case, Contestant, Passes, TrainingKernel

from modelopt_eagle.kernels import MACHINES, Machine

OK, WRONG, NO_CUDA = 0, 1, 3
KERNELS = (*training_cases.KERNELS, *LAYER_KERNELS)


def floor_lines(kernel: TrainingKernel, machine: Machine) -> list[dict[str, Any]]:
    """A row for each case and pass: what it cannot do without."""
    return [
        {
            "kernel": kernel.name,
            "case": case.shape,
            "pass": name,
            "MB": work.bytes / 1e6,
            "GFLOP": work.flops / 1e9,
            "floor_us": 1e6 * work.floor(machine),
            "bound": "memory" if work.bytes / machine.bandwidth > work.flops / machine.flops else "arithmetic",
            **({"apart_MB": case.apart[name] / 1e6} if name in case.apart else {}),
        }
        for case in kernel.cases()
        for name, work in case.work.items()
    ]


def print_floors(lines: Sequence[dict[str, Any]]) -> None:
    """Print the rows, the case above its passes."""
    case = None
    for line in lines:
        if (line["kernel"], line["case"]) != case:
            case = (line["kernel"], line["case"])
            print(f"{case[0]}: {case[1]}")
        apart = f"; torch's operations one by one: {line['apart_MB']:.1f} MB" if "apart_MB" in line else ""
        print(
            f"  {line['pass']:9} {line['MB']:10.1f} MB {line['GFLOP']:10.1f} GFLOP   "
            f"floor {line['floor_us']:10.1f} us ({line['bound']}){apart}"
        )


def difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Largest difference of two results, over the largest value of the expected one."""
    if [part.shape for part in found] != [part.shape for part in expected]:
        raise AssertionError(f"shapes {[list(p.shape) for p in found]}, expected {[list(p.shape) for p in expected]}")
    worst = 0.0
    for one, other in zip(found, expected, strict=True):
        if other.numel():
            top = max(float(other.detach().float().abs().max()), 1e-6)
            off = (one.detach().float() - other.detach().float()).abs().max()
            worst = max(worst, float("inf") if torch.isnan(off) else float(off) / top)
    return worst


def check(kernel: TrainingKernel, case: Case, contestant: Contestant, device: str) -> str | None:
    """Why a contestant must not be timed: it fails, or differs from the plain code at the small size."""
    try:
        plain = kernel.reference(case.small(device))
        other = contestant.passes(case.small(device))
        for name, run in plain.items():
            if device == "cpu" and name in contestant.unavailable:
                continue
            off = difference(other[name](), run())
            if not off <= kernel.tolerance:
                return f"{name} differs from the reference by {off:.3g} of the largest value"
    except Exception as error:  # a contestant that does not run must not hide the others
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None


def time_passes(passes: Passes, device: str) -> dict[str, float]:
    """Seconds of each pass."""
    for run in passes.values():
        for _ in range(2):
            run()
    return {name: benchmark.median_seconds(run, device, runs=7) for name, run in passes.items()}


def measure(
    kernel: TrainingKernel, device: str, machine: Machine, names: Collection[str]
) -> tuple[list[dict[str, Any]], bool]:
    """A row for each case, pass and contestant, printed as it is found, and whether all kernels of ours are right.

    Args:
        names: of the contestants to run.
    """
    lines, right = [], True
    for case in kernel.cases():
        print(f"{kernel.name}: {case.shape}", flush=True)
        for name, contestant in kernel.contestants.items():
            if name not in names:
                continue
            if device == "cpu" and not contestant.cpu:
                print(f"  {name}: not run on a CPU")
                continue
            common = {"kernel": kernel.name, "case": case.shape, "contestant": name}
            why = check(kernel, case, contestant, device)
            if why is not None:
                right = right and not contestant.ours
                print(f"  {name}: not timed: {why}", flush=True)
                lines.append({**common, "not_timed": why})
                continue
            if device == "cpu":
                missing = ", ".join(contestant.unavailable)
                print(f"  {name}: equal" + (f"; {missing} does not run on a CPU" if missing else ""))
                lines.append({**common, "equal": True, **({"not_run": missing} if missing else {})})
                continue
            try:
                seconds = time_passes(contestant.passes(case.inputs(device)), device)
            except Exception as error:  # out of memory, mostly
                right = right and not contestant.ours
                print(f"  {name}: failed at full size: {type(error).__name__}: {str(error).splitlines()[0]}")
                lines.append({**common, "not_timed": f"{type(error).__name__} at full size"})
                torch.cuda.empty_cache()
                continue
            for part, spent in seconds.items():
                floor = case.work[part].floor(machine)
                print(f"  {name:22} {part:9} {1e6 * spent:10.1f} us   {floor / spent:6.1%} of the floor's rate")
                lines.append({**common, "pass": part, "us": 1e6 * spent, "floor_us": 1e6 * floor})
    return lines, right


def measured_machine(device: str) -> Machine:
    """This GPU's own rates: of a copy, and of a product of two 8192 x 8192 bf16 matrices."""
    side = 8192
    left, right = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        left @ right
    seconds = statistics.median(benchmark.median_seconds(lambda: left @ right, device, runs=5) for _ in range(3))
    return Machine(benchmark.machine(device), 2 * side**3 / seconds, benchmark.copy_bandwidth(device))


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [kernel.name for kernel in KERNELS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="KERNEL", help=", ".join(names))
    parser.add_argument(
        "--machine", choices=list(MACHINES), default="H200", help="data sheet of the floors, no GPU here"
    )
    parser.add_argument("--dry_run", action="store_true", help="compare the contestants on the CPU at small sizes")
    everyone = sorted({name for kernel in KERNELS for name in kernel.contestants})
    parser.add_argument(
        "--contestants", nargs="+", choices=everyone, default=everyone, metavar="NAME", help=", ".join(everyone)
    )
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args(arguments)
    chosen = [kernel for kernel in KERNELS if kernel.name in options.only]
    cuda = torch.cuda.is_available() and not options.dry_run
    machine = measured_machine("cuda") if cuda else MACHINES[options.machine]
    how = "measured here" if cuda else "data sheet"
    print(f"{machine.name}: {machine.flops / 1e12:.0f} TFLOP/s, {machine.bandwidth / 1e12:.2f} TB/s ({how})")
    floors = [line for kernel in chosen for line in floor_lines(kernel, machine)]
    print_floors(floors)
    rows: list[dict[str, Any]] = []
    right = True
    if cuda or options.dry_run:
        for kernel in chosen:
            found, good = measure(kernel, "cuda" if cuda else "cpu", machine, options.contestants)
            rows, right = rows + found, right and good
    if not cuda:
        count = sum(len(kernel.cases()) * len(kernel.contestants) for kernel in chosen)
        print(f"no CUDA device used: nothing was timed, {count} times of {len(chosen)} kernels are missing")
    if options.json:
        report = {"machine": machine.name, "rates": how, "floors": floors, "rows": rows, "right": right}
        options.json.write_text(json.dumps(report, indent=1), encoding="utf-8")
    return WRONG if not right else OK if cuda else NO_CUDA


if __name__ == "__main__":
    sys.exit(main())
