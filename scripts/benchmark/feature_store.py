"""Speed of reading a feature store: MB/s of training batches against a raw read of the same bytes, in one run.

Takes a store that is there (``--store DIR``), or writes one of random rows (no target needed), and measures in turn,
several times, so that whatever else the machine does meets both:

* raw: ``read`` of the bytes of all shard files into one buffer,
* store: ``OfflineSource.batches`` over one epoch in random order, batches packed and ready, without a consumer,
* waiting: seconds that a trainer waits for a batch while it computes ``--step`` seconds on each on the same processor.

Seconds of the processor are measured too: on a machine that others use they say more than seconds that pass. Every
file is read once before, so that both find it in the page cache; with ``--cold`` the system is asked to forget
the files before each measurement of either (a store larger than the memory does that by itself).

Example: ``python scripts/benchmark/feature_store.py --dtype bfloat16 --hidden 2048 --tokens 200000``
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from modelopt_eagle.features import FeatureContract, FeatureRow, OfflineSource, predicting_positions
from modelopt_eagle.features.store import STORAGE_DTYPES, StoreReader, StoreWriter


def build_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, help="measure this store, in place of one written here")
    parser.add_argument("--hidden", type=int, default=2048, help="width of a state")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--tokens", type=int, default=100_000, help="tokens of the store")
    parser.add_argument("--prefix", type=int, default=0, help="tokens that all rows begin with, stored once a shard")
    parser.add_argument("--dtype", default="bfloat16", choices=list(STORAGE_DTYPES))
    parser.add_argument("--batch-size", type=int, default=4, help="rows of a batch")
    parser.add_argument("--step", type=float, default=0.1, help="seconds that the pretended trainer computes a batch")
    parser.add_argument("--repeats", type=int, default=7, help="measurements of each; the median counts")
    parser.add_argument("--cold", action="store_true", help="forget the files before each measurement")
    parser.add_argument("--folder", help="where to write the store (default: a temporary folder)")
    return parser


def write_store(folder: Path, args: argparse.Namespace) -> float:
    """Rows of random states, a third of the tokens supervised; returns seconds spent writing."""
    contract = FeatureContract("random", None, (1, 2, 3), True, args.dtype, None, None, args.hidden, 1000)
    count = -(-args.tokens // args.length)
    aux = torch.randn(args.length, 3 * args.hidden)  # [s,A·Ht], the same in every row: only its bytes matter
    final = torch.randn(args.length, args.hidden)  # [s,Ht]
    prefix = torch.randint(1000, (args.prefix,))
    begun = time.perf_counter()
    with StoreWriter(folder, contract, dataset_hash="random", dataset_rows=count) as writer:
        for index in range(count):
            supervised = torch.arange(args.length) % 3 == 0
            top1 = torch.where(predicting_positions(supervised), 1, -1)
            ids = torch.cat([prefix, torch.randint(1000, (args.length - args.prefix,))])
            writer.add(index, FeatureRow(f"{index}", "", ids, supervised, aux, final, top1, torch.zeros(args.length)))
    return time.perf_counter() - begun


def forget(paths: list[Path]) -> None:
    """Ask the system to drop the files' pages."""
    for path in paths:
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_raw(paths: list[Path], buffer: bytearray) -> None:
    """Read the bytes of all shards into memory."""
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            file.readinto(buffer)


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds that pass, and seconds of the processor in all threads of this process."""
    begun, used = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - begun, time.process_time() - used


def read_batches(source: OfflineSource, epoch: int, batch_size: int, step: float) -> int:
    """One epoch with a consumer that computes ``step`` seconds on each batch; returns the number of batches."""
    work, batches = torch.randn(256, 256), 0
    for _ in source.batches(epoch, batch_size=batch_size, seed=0):
        batches += 1
        until = time.perf_counter() + step
        while time.perf_counter() < until:
            work @ work
    return batches


def measure(folder: Path, args: argparse.Namespace) -> list[str]:
    """Lines of the result."""
    begun = time.perf_counter()
    reader = StoreReader(folder, verify="open")
    checked = time.perf_counter() - begun
    paths = [folder / entry.file for entry in reader.shards]
    size = sum(entry.bytes for entry in reader.shards)
    buffer = bytearray(max(path.stat().st_size for path in paths))  # one for all, so that no fresh page is timed
    source = OfflineSource(reader)
    raw, store = [], []  # (seconds, seconds of the processor)
    for repeat in range(args.repeats + 1):
        if args.cold:
            forget(paths)
        raw.append(timed(lambda: read_raw(paths, buffer)))
        if args.cold:
            forget(paths)
        store.append(timed(lambda epoch=repeat: read_batches(source, epoch, args.batch_size, 0.0)))
    raw, store = raw[1:], store[1:]  # the first round warms up
    mb = size / 1e6

    def line(name: str, which: int, unit: str) -> str:
        ratios = sorted(a[which] / b[which] for a, b in zip(raw, store, strict=True))
        speeds = [mb / statistics.median(times[which] for times in measured) for measured in (raw, store)]
        return (
            f"{name:<12}raw {speeds[0]:,.0f}, batches {speeds[1]:,.0f} MB {unit}: {statistics.median(ratios):.0%} "
            f"of the raw read (median of {len(ratios)}, {ratios[0]:.0%} to {ratios[-1]:.0%})"
        )

    before = source.wait_seconds
    batches = read_batches(source, args.repeats + 1, args.batch_size, args.step)
    waited = (source.wait_seconds - before) / batches
    return [
        f"store       {mb:,.0f} MB, {reader.contract.dtype}, Ht {reader.contract.hidden_size}, "
        f"{sum(reader.lengths) / len(reader):,.0f} tokens a row",
        f"open        {mb / checked:,.0f} MB/s (every checksum)",
        line("time", 0, "a second"),
        line("processor", 1, "a second of the processor"),
        f"waiting     {1000 * waited:.1f} ms a step of {1000 * args.step:.0f} ms (batch of {args.batch_size} rows)",
    ]


def main() -> None:
    args = build_parser().parse_args()
    print(f"machine     {platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"page cache  {'dropped before' if args.cold else 'warm in'} every measurement")
    if args.store is not None:
        print("\n".join(measure(args.store, args)))
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        written = write_store(Path(name), args)
        lines = measure(Path(name), args)
        size = sum(path.stat().st_size for path in Path(name).glob("*.safetensors"))
        print("\n".join([*lines, f"write       {size / 1e6 / written:,.0f} MB/s (encoded, hashed, flushed)"]))


if __name__ == "__main__":
    main()
