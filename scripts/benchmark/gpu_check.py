"""One command for a CUDA machine: every kernel against its reference, then its time against its floor.

    python scripts/benchmark/gpu_check.py [--cases 40] [--json report.json]

Steps, each of which reports and lets the next one run: random cases of every operation (``kernels/parity.py``), large
batches that would show a race, a CUDA graph that is replayed on new inputs, and the table of ``kernels.py`` with its
targets: build plus verify under 20 us for batch 8 and 64 nodes, relocation at 70 % of the copy bandwidth.

Exit codes: 0 all right, 1 a kernel fails or differs, 3 no CUDA device here, 4 correct but a speed target is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import kernels as benchmark  # noqa: E402  (scripts/benchmark/kernels.py)

from modelopt_eagle import kernels  # noqa: E402
from modelopt_eagle.kernels import parity  # noqa: E402

OK, WRONG, NO_CUDA, SLOW = 0, 1, 3, 4
BUILD_AND_VERIFY_SECONDS, RELOCATION_SHARE = 20e-6, 0.70


def random_cases(count: int) -> dict[str, list[str]]:
    """Failures of every operation over ``count`` random cases on the GPU."""
    failures: dict[str, list[str]] = {}
    for name in parity.CHECKS:
        failures.update(parity.run_checks("cuda", "triton", count, names=[name]))
        print(f"  {name:20} {count - len(failures[name])} of {count} cases equal", flush=True)
        for line in failures[name][:2]:
            print(f"    {line}")
    return failures


def large_trees() -> None:
    """Trees of 1025 nodes in a batch of 64, twenty times: threads of one program read what others wrote."""
    history = [part.cuda() for part in parity.Cases(1, "cpu").history(64, 11, 10)]
    expected = kernels.build_tree(*history, 1025, 11, backend="reference")
    predict = torch.where(
        expected.first_child >= 0, expected.tokens.gather(1, expected.first_child.clamp(min=0).long()), 0
    )
    path = kernels.verify_greedy(expected, predict, backend="reference")
    for _ in range(20):
        tree = kernels.build_tree(*history, 1025, 11, backend="triton", debug=False)
        for field in ("flat_ids", "tokens", "parents", "depths", "mask", "first_child", "next_sibling"):
            parity.compare(field, getattr(tree, field), getattr(expected, field))
        accepted = kernels.verify_greedy(tree, predict, backend="triton")
        parity.compare("nodes", accepted.nodes, path.nodes)


def large_moves() -> None:
    """Keys of 512 rows whose accepted paths overlap their destinations, and a mask of 64 requests, in place."""
    cases = parity.Cases(2, "cpu")
    paths, counts = (part.cuda() for part in cases.accepted(512, 40, 24))
    lengths = torch.arange(512, device="cuda") % 50
    cache = torch.randn(512, 8, 96, 128, device="cuda", dtype=torch.bfloat16)
    other = cache.clone()
    kernels.relocate_kv(cache, paths, counts, lengths, debug=True, backend="triton")
    kernels.relocate_kv(other, paths, counts, lengths, backend="reference")
    parity.compare("keys", cache, other)
    buffer = torch.randint(-(2**31), 2**31 - 1, (64, 1025, 33), device="cuda", dtype=torch.int64).to(torch.int32)
    twin, rows = buffer.clone(), torch.randint(0, 1026, (64,), device="cuda")
    used = int(rows.sum())
    tight = kernels.repack_mask(buffer, rows, 32, backend="triton")[:used]
    parity.compare("mask rows", tight, kernels.repack_mask(twin, rows, 32, backend="reference")[:used])


def graph_replay() -> None:
    """A captured build and verify must follow inputs that change in place."""
    first, second = ([part.cuda() for part in parity.Cases(seed, "cpu").history(8, 10, 7)] for seed in (3, 4))
    second = [new.to(old.dtype) for new, old in zip(second, first, strict=True)]
    inputs = [part.clone() for part in first]
    predict = torch.randint(0, 610, (8, 64), device="cuda", dtype=torch.int32)

    def step(backend: str):
        tree = kernels.build_tree(*inputs, 64, 10, backend=backend)
        return tree, kernels.verify_greedy(tree, predict, backend=backend)

    step("triton")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tree, accepted = step("triton")
    for history in (second, first):
        for place, part in zip(inputs, history, strict=True):
            place.copy_(part)
        graph.replay()
        torch.cuda.synchronize()
        expected_tree, expected = step("reference")
        parity.compare("replayed flat ids", tree.flat_ids, expected_tree.flat_ids)
        parity.compare("replayed mask", tree.mask, expected_tree.mask)
        parity.compare("replayed nodes", accepted.nodes, expected.nodes)


def compiled_step() -> None:
    """torch.compile with its default backend takes build and verify as one graph."""
    history = [part.cuda() for part in parity.Cases(5, "cpu").history(8, 10, 7)]
    predict = torch.randint(0, 610, (8, 64), device="cuda", dtype=torch.int32)

    def step(scores, tokens, parent_list):
        tree = kernels.build_tree(scores, tokens, parent_list, 64, 10)
        return kernels.verify_greedy(tree, predict).nodes

    parity.compare("compiled nodes", torch.compile(step, fullgraph=True)(*history), step(*history))


def speed(report: dict) -> bool:
    """Time every workload, print the table, fill ``report``; whether all targets are met."""
    bandwidth = benchmark.copy_bandwidth("cuda")
    print(f"  {benchmark.machine('cuda')}; copy bandwidth {bandwidth / 1e9:.0f} GB/s (read + written)")
    rows, verdicts = [], {}
    for work in benchmark.all_workloads("cuda"):
        try:
            timing = benchmark.measure(work, "cuda")
        except Exception as error:  # one workload that does not run must not hide the others
            print(f"  {work.name}: {type(error).__name__}: {error}")
            verdicts[work.name] = False
            continue
        rows.append(benchmark.row_of(work, timing, bandwidth))
        if work.name == "build+verify":
            verdicts[f"build+verify {timing.kernel * 1e6:.1f} us < 20 us"] = timing.kernel < BUILD_AND_VERIFY_SECONDS
        if work.name.startswith("relocate_kv"):
            share = work.bytes_moved / timing.kernel / bandwidth
            verdicts[f"{work.name} {100 * share:.0f} % >= 70 % of copy bandwidth"] = share >= RELOCATION_SHARE
    if rows:
        benchmark.print_table(rows)
    for target, met in verdicts.items():
        print(f"  {'met   ' if met else 'MISSED'}  {target}")
    report.update(copy_bandwidth=bandwidth, rows=rows, targets=verdicts)
    return all(verdicts.values())


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=40, help="random cases of every operation")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("gpu_check: no CUDA device here, nothing was checked. On a CPU the references run; the kernels run only")
        print("interpreted: TRITON_INTERPRET=1 python -m modelopt_eagle.kernels.parity --device cpu")
        return NO_CUDA
    torch.manual_seed(0)
    report: dict = {"machine": benchmark.machine("cuda")}
    print("random cases")
    report["random_cases"] = random_cases(options.cases)
    wrong = any(report["random_cases"].values())
    steps: list[Callable[[], None]] = [large_trees, large_moves, graph_replay, compiled_step]
    for step in steps:
        try:
            step()
            report[step.__name__] = "equal"
        except Exception as error:
            wrong = True
            report[step.__name__] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        print(f"{step.__name__}: {report[step.__name__]}", flush=True)
    fast = False
    print("speed")
    try:
        fast = speed(report)
    except Exception:
        wrong = True
        report["speed"] = traceback.format_exc()
        traceback.print_exc()
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))
    code = WRONG if wrong else OK if fast else SLOW
    print(
        f"gpu_check: {({OK: 'all right', WRONG: 'a kernel failed or differs', SLOW: 'correct, a target missed'})[code]}"
    )
    return code


if __name__ == "__main__":
    sys.exit(main())
