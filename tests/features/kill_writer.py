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


def write(folder, told=None):
    """Write what is missing; a byte for each row goes into the pipe ``told``."""
    with open_writer(folder, rows=ROWS, shard_bytes=4000) as writer:
        for index in range(ROWS):
            if index not in writer.done:
                writer.add(index, make_row(index))
                if told is not None:
                    os.write(told, b".")


def main(folder, kills):
    draw = random.Random(7)
    for _ in range(kills):
        hear, told = os.pipe()
        child = os.fork()
        if child == 0:
            write(folder, told)
            os._exit(0)
        os.close(told)
        rows = draw.randint(0, 24)  # a slow machine is killed at the same places as a fast one
        while rows > 0 and (heard := os.read(hear, rows)):
            rows -= len(heard)
        time.sleep(draw.uniform(0.0, 0.004))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(hear)
        begun = any(folder.glob("manifest*.json"))
        print(len(StoreReader(folder)) if begun else 0, flush=True)
    write(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
