"""The kernels of a training step: sizes, bytes, arithmetic and floor of each, and on a GPU its time beside others.

    python scripts/benchmark/training_kernels.py                        # no GPU: the floors on an H200's data sheet
    python scripts/benchmark/training_kernels.py --json times.json      # on a CUDA machine: measured times, too
    python scripts/benchmark/training_kernels.py --dry_run              # small sizes on the CPU, without Triton

A contestant is another way to compute the same: the plain code, a library's kernel. Before one is timed its result is
held against the plain reference, values and gradients, at a small size of the case; one that differs or fails is named
and not timed. The floor is the longer of bytes over bandwidth and arithmetic over the matrix rate: on a GPU both
are measured in the same run (a copy, a product of two square bf16 matrices), elsewhere they are the data sheet's.

Exit codes: 0 all right, 1 a kernel of ours fails or differs, 3 no CUDA device here.

To add a kernel: a ``TrainingKernel`` in ``KERNELS``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import kernels as benchmark  # scripts/benchmark/kernels.py

from modelopt_eagle.draft.attention import QueryPlan, column_attention, dense_column_attention
from modelopt_eagle.kernels import MACHINES, Machine, Work, column_attention_work

OK, WRONG, NO_CUDA = 0, 1, 3

Passes = dict[str, Callable[[], Sequence[Tensor]]]
"""What a contestant does, by pass (``forward``, ``backward``); each returns what is compared."""


@dataclass(frozen=True)
class Case:
    """One size.

    Attributes:
        shape: the sizes in words.
        work: the least each pass does.
        inputs: makes the inputs on a device.
        small: the same kind of case at a size that the plain code holds whole, for the comparison.
    """

    shape: str
    work: dict[str, Work]
    inputs: Callable[[str], Any]
    small: Callable[[str], Any]


@dataclass(frozen=True)
class Contestant:
    """One way to compute it.

    Attributes:
        passes: makes the passes from the inputs.
        ours: whether it is this package's kernel: then failing is wrong.
        cpu: whether it runs on CPU tensors, in a dry run.
    """

    passes: Callable[[Any], Passes]
    ours: bool = False
    cpu: bool = True


@dataclass(frozen=True)
class TrainingKernel:
    """A kernel, what it is measured beside, and where.

    Attributes:
        reference: the plain code that every contestant is held against, at the small sizes.
        contestants: by name.
        tolerance: largest difference of two results over the largest value of the plain one, in bf16.
    """

    name: str
    cases: Callable[[], list[Case]]
    reference: Callable[[Any], Passes]
    contestants: dict[str, Contestant]
    tolerance: float


@dataclass(frozen=True)
class Attention:
    """Inputs of the rollout attention at one step.

    Attributes:
        tensors: q, keys, values, column keys, column values, with gradients.
        plan: which keys each query sees.
        scale: factor on the scores.
        upstream: gradient of the output.
        lengths: tokens of each packed document.
    """

    tensors: list[Tensor]
    plan: QueryPlan
    scale: float
    upstream: Tensor
    lengths: list[int]


@dataclass(frozen=True)
class AttentionSizes:
    """Sizes of :class:`Attention`: documents of ``length`` tokens, of which a ``share`` asks, at step ``columns``."""

    documents: int
    length: int
    share: float
    heads: int
    groups: int
    dk: int
    dv: int
    columns: int

    def rows(self) -> tuple[Tensor, Tensor]:
        """``[n]`` flat indices of the tokens that ask, and of the first token of their documents."""
        tokens = self.documents * self.length
        asks = torch.rand(tokens, generator=torch.Generator().manual_seed(0)) < self.share
        rows = asks.nonzero()[:, 0] if self.share < 1 else torch.arange(tokens)  # [n]
        return rows, rows // self.length * self.length

    def make(self, device: str) -> Attention:
        """Random bf16 inputs on a GPU, float32 elsewhere."""
        dtype = torch.bfloat16 if device != "cpu" else torch.float32
        generator = torch.Generator(device).manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device).to(dtype).requires_grad_()

        rows, starts = (part.to(device) for part in self.rows())
        tokens, asking = self.documents * self.length, len(rows)
        tensors = [
            random(asking, self.heads, self.dk),
            random(tokens, self.groups, self.dk),
            random(tokens, self.groups, self.dv),
            random(asking, self.columns, self.groups, self.dk),
            random(asking, self.columns, self.groups, self.dv),
        ]
        upstream = random(asking, self.heads, self.dv).detach()
        lengths = [self.length] * self.documents
        return Attention(tensors, QueryPlan.make(rows, starts), self.dk**-0.5, upstream, lengths)

    def work(self) -> dict[str, Work]:
        """The least of both passes in bf16."""
        rows, starts = self.rows()
        return column_attention_work(
            int((rows - starts + 1).sum()), self.documents * self.length, len(rows), self.columns,
            self.heads, self.groups, self.dk, self.dv, size=2,
        )  # fmt: skip

    def case(self) -> Case:
        """The case of these sizes."""
        width = f"{self.dk}" if self.dk == self.dv else f"{self.dk}/{self.dv}"
        shape = (
            f"{self.documents}x{self.length} tokens, {self.share:.0%} ask, "
            f"{self.heads}/{self.groups} heads of {width}, k={self.columns}"
        )
        small = AttentionSizes(3, 150, self.share, 2 * (self.heads // self.groups), 2, self.dk, self.dv, self.columns)
        return Case(shape, self.work(), self.make, small.make)


def attention_cases() -> list[Case]:
    """A row of an 8B target's length, packed rows, half supervised, a long row, and latent attention."""
    sizes = [
        AttentionSizes(1, 4096, 1.0, 32, 8, 128, 128, 6),
        AttentionSizes(1, 4096, 0.5, 32, 8, 128, 128, 6),
        AttentionSizes(16, 1024, 1.0, 32, 8, 128, 128, 2),
        AttentionSizes(1, 32768, 0.5, 32, 8, 128, 128, 2),
        AttentionSizes(1, 8192, 1.0, 64, 8, 64, 64, 2),
        AttentionSizes(1, 4096, 1.0, 64, 64, 192, 128, 2),
        AttentionSizes(1, 4096, 1.0, 16, 8, 256, 256, 2),
    ]
    return [size.case() for size in sizes]


def by_autograd(run: Callable[[Attention], Tensor]) -> Callable[[Attention], Passes]:
    """Both passes of a differentiable function."""

    def passes(given: Attention) -> Passes:
        out = run(given)

        def backward() -> Sequence[Tensor]:
            return torch.autograd.grad(out, given.tensors, given.upstream, retain_graph=True)

        return {"forward": lambda: [run(given)], "backward": backward}

    return passes


def dense(given: Attention) -> Tensor:
    """The plain reference: every score at once."""
    return dense_column_attention(*given.tensors, given.plan, given.scale)


def chunked(given: Attention) -> Tensor:
    """The plain code of training: chunk by chunk with torch's operations."""
    return column_attention(*given.tensors, given.plan, given.scale)


ATTENTION = TrainingKernel(
    name="column_attention",
    cases=attention_cases,
    reference=by_autograd(dense),
    contestants={"chunks": Contestant(by_autograd(chunked))},
    tolerance=2e-2,
)

KERNELS = (ATTENTION,)


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
        print(
            f"  {line['pass']:9} {line['MB']:10.1f} MB {line['GFLOP']:10.1f} GFLOP   "
            f"floor {line['floor_us']:10.1f} us ({line['bound']})"
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


def measure(kernel: TrainingKernel, device: str, machine: Machine) -> tuple[list[dict[str, Any]], bool]:
    """A row for each case, pass and contestant, printed as it is found, and whether all kernels of ours are right."""
    lines, right = [], True
    for case in kernel.cases():
        print(f"{kernel.name}: {case.shape}", flush=True)
        for name, contestant in kernel.contestants.items():
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
                print(f"  {name}: equal")
                lines.append({**common, "equal": True})
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
            found, good = measure(kernel, "cuda" if cuda else "cpu", machine)
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
