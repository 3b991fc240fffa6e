"""Linear layers of few rows on the CPU: ``nn.Linear``, oneDNN on weights as they lie, and on packed copies.

    python scripts/benchmark/cpu_linear.py [--shapes 576x576 576x1536 1536x576 576x49152] [--rows 1 2 3 4 5 9 16]

The shapes are those of the quick-start target (in x out). Prints microseconds, and gigabytes a second of weights read,
the best of several passes over 64 MiB of weights, more than the caches hold.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import nn

from modelopt_eagle.decoding.cpu_linear import FastLinears


def main() -> None:
    """Print a line a shape and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["576x576", "576x1536", "1536x576", "576x49152"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 3, 4, 5, 9, 16])
    arguments = parser.parse_args()
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}; microseconds (GB/s of weights)")
    for shape in arguments.shapes:
        width, out = (int(part) for part in shape.split("x"))
        count = max(1, (64 << 20) // (4 * width * out))
        model = nn.Sequential(*(nn.Linear(width, out, bias=False) for _ in range(count)))
        for rows in arguments.rows:
            cells = []
            for name, fast in (("nn.Linear", None), ("oneDNN", False), ("oneDNN packed", True)):
                seconds = best_seconds(model, torch.randn(rows, width), fast)
                cells.append(f"{name} {1e6 * seconds:6.0f} ({4e-9 * width * out / seconds:4.1f})")
            print(f"{shape:>10}, {rows:2} rows: " + ", ".join(cells), flush=True)


@torch.inference_mode()
def best_seconds(model: nn.Sequential, x: torch.Tensor, pack: bool | None, turns: int = 9) -> float:
    """Seconds a layer of the fastest of ``turns`` passes over all layers, each fed with ``x``."""

    def run(layers: Callable[[], None]) -> float:
        begun = time.perf_counter()
        layers()
        return (time.perf_counter() - begun) / len(model)

    def layers() -> None:
        for layer in model:
            layer(x)

    if pack is None:
        return min(run(layers) for _ in range(turns))
    with FastLinears(model, pack).use():
        return min(run(layers) for _ in range(turns))


if __name__ == "__main__":
    main()
