"""Run by test_kill.py: fork a writer fifty times, kill -9 it at random moments, look at the store after each.

usage: kill_writer.py STORE KILLS; prints one number a line: the rows stored after each kill.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

torch.set_num_threads(1)

from modelopt_eagle.features.store import StoreReader  # noqa: E402
from tests.features.rows import make_row, open_writer  # noqa: E402

ROWS = 400


def write(folder, pace):
    """Write what is missing; ``pace`` seconds a row stand for the target."""
    with open_writer(folder, rows=ROWS, shard_bytes=4000) as writer:
        for index in range(ROWS):
            if index not in writer.done:
                time.sleep(pace)
                writer.add(index, make_row(index))


def main(folder, kills):
    draw = random.Random(7)
    for _ in range(kills):
        child = os.fork()
        if child == 0:
            write(folder, pace=0.0005)
            os._exit(0)
        time.sleep(draw.uniform(0.0, 0.06))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        begun = any(folder.glob("manifest*.json"))
        print(len(StoreReader(folder)) if begun else 0, flush=True)
    write(folder, pace=0.0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
