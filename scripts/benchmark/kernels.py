"""Time of every tree operation, bytes it moves, and its share of the machine's copy bandwidth; reference and kernel.

    python scripts/benchmark/kernels.py [--device cpu|cuda] [--batch 8] [--num_nodes 64] [--csv results.csv]

The copy bandwidth is measured in the same run by ``Tensor.copy_`` over a block larger than the caches. Times are the
median of several runs; on CUDA the calls are captured in a graph, so that they hold the device's work and not
Python's. On the CPU the kernels would run in Triton's interpreter, whose time says nothing: only the reference is
timed. Bytes are what the operation must read and write once, so the share is against the best possible.
"""

from __future__ import annotations

import argparse
import csv
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from modelopt_eagle import kernels
from modelopt_eagle.kernels.parity import Cases

CALLS_IN_GRAPH = 20


@dataclass(frozen=True)
class Workload:
    """One operation at one size: ``run(backend)`` performs it, ``bytes_moved`` is what it must read and write."""

    name: str
    shape: str
    bytes_moved: int
    run: Callable[[str], object]


@dataclass(frozen=True)
class Timing:
    """Seconds a call of the reference and of the kernel (None: not timed here), and how the kernel was timed."""

    reference: float
    kernel: float | None
    how: str


def size_of(*tensors: torch.Tensor) -> int:
    """Bytes of the tensors' elements."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def tree_workloads(device: str, batch: int, nodes: int, topk: int, depth: int, vocabulary: int) -> list[Workload]:
    """Selection, linking and the walks, over trees with paths that the target accepts to half of the depth."""
    scores, tokens, parent_list = (part.to(device) for part in Cases(0, "cpu").history(batch, topk, depth))
    tree = kernels.build_tree(scores, tokens, parent_list, nodes, topk, backend="reference")
    made = [getattr(tree, name) for name in vars(tree) if name != "max_depth"]
    child = tree.first_child.long()  # [B,N]
    follow = tree.tokens.long().gather(1, child.clamp(min=0))  # [B,N] the first child's token
    predict = torch.where((child >= 0) & (tree.depths < (depth + 1) // 2), follow, -2).to(torch.int32)  # [B,N]
    probs = torch.full((batch, nodes, vocabulary), 0.1 / vocabulary, device=device)  # [B,N,V]
    probs.scatter_add_(2, predict.clamp(min=0).long()[:, :, None], torch.full((batch, nodes, 1), 0.9, device=device))
    uniforms = torch.rand(batch, depth + 1, device=device)
    visited = int(kernels.sample_and_match(tree, probs, uniforms, backend="reference").num_accepted.sum()) + batch
    shape = f"B={batch} T={topk} D={depth} N={nodes}"
    history, links = size_of(scores, tokens, parent_list), size_of(tree.tokens, tree.parents, predict)
    accepted = 4 * batch * (2 * depth + 3)

    def build(backend: str) -> kernels.DraftTree:
        return kernels.build_tree(scores, tokens, parent_list, nodes, topk, backend=backend)

    return [
        Workload("select_nodes", shape, size_of(scores, tree.flat_ids),
                 lambda b: kernels.select_nodes(scores, nodes - 1, backend=b)),
        Workload("build_tree", shape, history + size_of(*made), build),
        Workload("verify_greedy", shape, links + accepted, lambda b: kernels.verify_greedy(tree, predict, backend=b)),
        Workload("build+verify", shape, history + size_of(*made) + links + accepted,
                 lambda b: kernels.verify_greedy(build(b), predict, backend=b)),
        Workload("sample_and_match", f"{shape} V={vocabulary}", links + accepted + visited * vocabulary * 4,
                 lambda b: kernels.sample_and_match(tree, probs, uniforms, backend=b)),
        Workload("reject_target_only", f"{shape} V={vocabulary}", links + accepted + batch * vocabulary * 4,
                 lambda b: kernels.reject_target_only(tree, probs, uniforms[:, 1:], uniforms[:, 0], backend=b)),
    ]  # fmt: skip


def mask_workloads(device: str, batch: int, nodes: int) -> list[Workload]:
    """Packing, unpacking and repacking of masks."""
    mask = torch.rand(batch, nodes, nodes, device=device) < 0.5  # [B,N,N]
    words = kernels.pack_mask(mask, backend="reference")  # [B,N,W]
    rows = torch.full((batch,), nodes - 1, dtype=torch.int32, device=device)
    shape = f"B={batch} N={nodes}"
    return [
        Workload("pack_mask", shape, size_of(mask, words), lambda b: kernels.pack_mask(mask, backend=b)),
        Workload("unpack_mask", shape, size_of(mask, words), lambda b: kernels.unpack_mask(words, backend=b)),
        Workload("repack_mask", shape, 2 * size_of(words), lambda b: kernels.repack_mask(words, rows, backend=b)),
    ]


def row_workloads(device: str, batch: int, heads: int, width: int, features: int) -> list[Workload]:
    """Gathering accepted rows and moving keys; every row accepts 15 nodes, of which 15 lie out of place."""
    dtype = torch.bfloat16
    steps, nodes, room = 16, 32, 64
    path = (2 * torch.arange(steps, dtype=torch.int32, device=device)).expand(batch, -1).contiguous()  # [B,16]
    counts = torch.full((batch,), steps - 1, dtype=torch.int32, device=device)
    lengths = torch.full((batch,), 16, dtype=torch.int32, device=device)
    hidden = torch.zeros(batch, nodes, features, dtype=dtype, device=device)
    cache = torch.zeros(batch, heads, room, width, dtype=dtype, device=device)
    paged = torch.zeros(batch * room // 16, 16, heads, width, dtype=dtype, device=device)
    table = torch.randperm(batch * room // 16, device=device).to(torch.int32).view(batch, -1)
    moved = 2 * batch * (steps - 1) * heads * width * cache.element_size()
    shape = f"B={batch} heads={heads} d={width} path={steps}"
    return [
        Workload("repack_accepted", f"B={batch} F={features} path={steps}", 2 * batch * steps * features * 2,
                 lambda b: kernels.repack_accepted(hidden, path, counts, backend=b)),
        Workload("relocate_kv", shape, moved, lambda b: kernels.relocate_kv(cache, path, counts, lengths, backend=b)),
        Workload("relocate_kv paged", shape, moved,
                 lambda b: kernels.relocate_kv(paged, path, counts, lengths, block_table=table, backend=b)),
    ]  # fmt: skip


def all_workloads(device: str, batch: int = 8, nodes: int = 64, topk: int = 10, depth: int = 7) -> list[Workload]:
    """Every operation at a size that fits the device: small on the CPU, beyond the caches on a GPU."""
    large = device != "cpu"
    return [
        *tree_workloads(device, batch, nodes, topk, depth, vocabulary=128_000 if large else 8_000),
        *mask_workloads(device, 64 if large else 8, 1024 if large else 256),
        *row_workloads(device, 2048 if large else 64, heads=8, width=128, features=4096 if large else 512),
    ]


def copy_bandwidth(device: str) -> float:
    """Bytes a second that ``copy_`` reads and writes together, over 512 MiB on a GPU or 64 MiB on the CPU."""
    source = torch.zeros((512 if device != "cpu" else 64) << 20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * source.numel() / median_seconds(lambda: target.copy_(source), device)


def median_seconds(call: Callable[[], object], device: str, runs: int = 11, calls: int = 1) -> float:
    """Median over ``runs`` of the seconds of ``call``, divided by the ``calls`` that it stands for."""
    seconds = []
    for _ in range(runs):
        if device == "cpu":
            begin = time.perf_counter()
            call()
            seconds.append((time.perf_counter() - begin) / calls)
            continue
        begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin_event.record()
        call()
        end_event.record()
        end_event.synchronize()
        seconds.append(begin_event.elapsed_time(end_event) / 1e3 / calls)
    return statistics.median(seconds)


def graph_seconds(call: Callable[[], object]) -> float:
    """Device seconds of one ``call``, CALLS_IN_GRAPH of them captured in a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles and fills the caches before the capture
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS_IN_GRAPH):
            call()
    graph.replay()
    return median_seconds(graph.replay, "cuda", calls=CALLS_IN_GRAPH)


def measure(work: Workload, device: str) -> Timing:
    """Time the reference, and on CUDA the kernel: in a graph, or call by call if it cannot be captured."""
    work.run("reference")
    reference = median_seconds(lambda: work.run("reference"), device)
    if device == "cpu":
        return Timing(reference, None, "not timed")
    try:
        return Timing(reference, graph_seconds(lambda: work.run("triton")), "graph")
    except RuntimeError as error:
        torch.cuda.synchronize()
        work.run("triton")
        reason = str(error).splitlines()[0][:60]
        return Timing(reference, median_seconds(lambda: work.run("triton"), device), f"eager ({reason})")


def row_of(work: Workload, timing: Timing, bandwidth: float) -> dict[str, str]:
    """One line of the table: microseconds, megabytes, and shares of the copy bandwidth in percent."""

    def share(seconds: float | None) -> str:
        return "-" if seconds is None else f"{100 * work.bytes_moved / seconds / bandwidth:.2f}"

    return {
        "kernel": work.name,
        "shape": work.shape,
        "MB": f"{work.bytes_moved / 1e6:.4g}",
        "reference_us": f"{timing.reference * 1e6:.1f}",
        "reference_%": share(timing.reference),
        "kernel_us": "-" if timing.kernel is None else f"{timing.kernel * 1e6:.2f}",
        "kernel_%": share(timing.kernel),
        "timed": timing.how,
    }


def machine(device: str) -> str:
    """Processor or GPU, threads and versions, for the head of a table."""
    name = torch.cuda.get_device_name() if device != "cpu" else f"{platform.machine()} CPU"
    return f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def print_table(rows: list[dict[str, str]]) -> None:
    """Print the rows in columns."""
    widths = {key: max(len(key), *(len(row[key]) for row in rows)) for key in rows[0]}
    for row in [dict.fromkeys(rows[0]), *rows]:
        print("  ".join((row[key] or key).ljust(width) for key, width in widths.items()).rstrip())


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--batch", type=int, default=8, help="rows of the tree operations")
    parser.add_argument("--num_nodes", type=int, default=64, help="nodes of a tree, the root included")
    parser.add_argument("--topk", type=int, default=10, help="branching of the expansion")
    parser.add_argument("--depth", type=int, default=7, help="layers of the expansion")
    parser.add_argument("--csv", type=Path, help="append the rows to this file, with machine and versions")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    bandwidth = copy_bandwidth(options.device)
    print(f"{machine(options.device)}; copy bandwidth {bandwidth / 1e9:.1f} GB/s (read + written)")
    work_list = all_workloads(options.device, options.batch, options.num_nodes, options.topk, options.depth)
    rows = [row_of(work, measure(work, options.device), bandwidth) for work in work_list]
    print_table(rows)
    if options.csv:
        fresh = not options.csv.exists()
        with options.csv.open("a", newline="") as file:
            writer = csv.DictWriter(file, ["machine", "copy_GB/s", *rows[0]])
            if fresh:
                writer.writeheader()
            common = {"machine": machine(options.device), "copy_GB/s": f"{bandwidth / 1e9:.1f}"}
            writer.writerows({**common, **row} for row in rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
