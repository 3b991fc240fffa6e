"""Speed of reading a feature store: MB/s of training batches against a raw read of the same bytes, in one run.

Writes a store of random rows (no target needed), reads every shard's bytes once to warm the page cache, then measures

* raw: ``read`` of all shard files into memory,
* store: ``OfflineSource.batches`` over one epoch in random order, batches packed and ready, without a consumer,
* waiting: seconds that a trainer with a given step time waits for a batch, prefetch on.

Example: ``python scripts/benchmark/feature_store.py --dtype bfloat16 --hidden 2048 --tokens 200000``
"""

from __future__ import annotations

import argparse
import platform
import tempfile
import time
from pathlib import Path

import torch

from modelopt_eagle.features import FeatureContract, FeatureRow, OfflineSource, predicting_positions
from modelopt_eagle.features.store import STORAGE_DTYPES, StoreReader, StoreWriter


def write_store(folder: Path, args: argparse.Namespace) -> int:
    """Rows of random states, a third of the tokens supervised; returns the bytes of all shards."""
    contract = FeatureContract("random", None, (1, 2, 3), True, args.dtype, None, None, args.hidden, 1000)
    count = -(-args.tokens // args.length)
    aux = torch.randn(args.length, 3 * args.hidden)  # [s,A*Ht], the same in every row: only its bytes matter
    final = torch.randn(args.length, args.hidden)  # [s,Ht]
    with StoreWriter(folder, contract, dataset_hash="random", dataset_rows=count) as writer:
        for index in range(count):
            supervised = torch.arange(args.length) % 3 == 0
            top1 = torch.where(predicting_positions(supervised), 1, -1)
            ids = torch.randint(1000, (args.length,))
            writer.add(index, FeatureRow(f"{index}", "", ids, supervised, aux, final, top1, torch.zeros(args.length)))
    return sum(entry.bytes for entry in StoreReader(folder, verify="read").shards)


def raw_seconds(folder: Path) -> float:
    """Seconds to read the bytes of all shards into memory."""
    paths = sorted(folder.glob("*.safetensors"))
    buffer = bytearray(max(path.stat().st_size for path in paths))  # one for all, so that no fresh page is timed
    begun = time.perf_counter()
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            file.readinto(buffer)
    return time.perf_counter() - begun


def batch_seconds(source: OfflineSource, epoch: int, batch_size: int, step: float) -> tuple[float, int]:
    """Seconds of one epoch with a consumer that works ``step`` seconds on each batch, and the number of batches."""
    begun, batches = time.perf_counter(), 0
    for _ in source.batches(epoch, batch_size=batch_size, seed=0):
        batches += 1
        if step:
            time.sleep(step)
    return time.perf_counter() - begun, batches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=2048, help="width of a state")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--tokens", type=int, default=100_000, help="tokens of the store")
    parser.add_argument("--dtype", default="bfloat16", choices=list(STORAGE_DTYPES))
    parser.add_argument("--batch-size", type=int, default=4, help="rows of a batch")
    parser.add_argument("--step", type=float, default=0.1, help="seconds that the pretended trainer works on a batch")
    parser.add_argument("--folder", help="where to write the store (default: a temporary folder)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        begun = time.perf_counter()
        size = write_store(folder, args)
        written = time.perf_counter() - begun
        begun = time.perf_counter()
        StoreReader(folder, verify="open")
        checked = time.perf_counter() - begun
        source = OfflineSource(folder, verify="read")
        raw_seconds(folder)
        batch_seconds(source, 0, args.batch_size, 0.0)  # every shard is checked once at its first read
        raw = min(raw_seconds(folder) for _ in range(3))
        store = min(batch_seconds(source, epoch, args.batch_size, 0.0)[0] for epoch in range(1, 4))
        before = source.wait_seconds
        _, batches = batch_seconds(source, 4, args.batch_size, args.step)
        waited = (source.wait_seconds - before) / batches
    mib = size / 2**20
    print(f"machine     {platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"store       {mib:,.0f} MiB, {args.dtype}, Ht {args.hidden}, rows of {args.length} tokens")
    print(f"write       {mib / written:,.0f} MiB/s (encoded, hashed, flushed)")
    print(f"open        {mib / checked:,.0f} MiB/s (every checksum)")
    print(f"raw read    {mib / raw:,.0f} MiB/s")
    print(f"batches     {mib / store:,.0f} MiB/s, {raw / store:.0%} of the raw read")
    print(f"waiting     {1000 * waited:.1f} ms a step of {1000 * args.step:.0f} ms (batch of {args.batch_size} rows)")


if __name__ == "__main__":
    main()
