"""Run by test_hybrid.py: two processes fill a store together for two epochs.

usage: hybrid_fillers.py STORE LOG [PACE]; every row made is a line in LOG, every batch served a JSON line on stdout.
"""

import json
import multiprocessing
import os
import sys
import time
from pathlib import Path

import torch

torch.set_num_threads(1)

from modelopt_eagle.data import TokenizedRow  # noqa: E402
from modelopt_eagle.features import HybridSource  # noqa: E402
from tests.features.rows import contract, make_row  # noqa: E402

ROWS, WORLD, EPOCHS = 60, 2, 2


def tokenised():
    rows = [make_row(index) for index in range(ROWS)]
    return [TokenizedRow(row.row_id, row.category, row.input_ids.tolist(), row.supervised.tolist(), 1) for row in rows]


def fill(folder, log, pace, rank, barrier):
    def make(rows):
        time.sleep(pace * len(rows))
        with open(log, "a") as file:
            file.writelines(f"{row.id}\n" for row in rows)
        return [make_row(int(row.id.removeprefix("row-"))) for row in rows]

    options = {"on_missing": "generate", "make": make, "shard_bytes": 3000}
    source = HybridSource(folder, tokenised(), contract(), rank=rank, world_size=WORLD, barrier=barrier.wait, **options)
    with source:
        for epoch in range(EPOCHS):
            for step, batch in enumerate(source.batches(epoch, batch_size=4, seed=3, rank=rank, world_size=WORLD)):
                rows = [] if batch is None else batch.row_ids
                total = 0.0 if batch is None else batch.aux_hidden.double().sum().item()
                line = json.dumps({"epoch": epoch, "step": step, "rank": rank, "rows": rows, "sum": total})
                os.write(1, f"{line}\n".encode())  # one write: lines of two processes do not mix
                barrier.wait()  # as a trainer's processes keep step
    assert source.repeated == 0


def main(folder, log, pace=0.0):
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(WORLD)
    processes = [context.Process(target=fill, args=(folder, log, pace, rank, barrier)) for rank in range(WORLD)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(max(process.exitcode for process in processes))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *map(float, sys.argv[3:]))
