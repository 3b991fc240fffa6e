"""Loss of a head and drift of its target, over weights of the preservation term and chances to detach the teacher.

    python scripts/benchmark/target_lora.py [--base_model NAME] [--rows 64] [--epochs 4] [section.key=value ...]

Trains on the shipped conversations, once without adapters and once for each cell of the table; prints the loss of the
last log line and the preservation KL of it, in nats a position.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from modelopt_eagle.recipe import load_recipe
from modelopt_eagle.target.tiny import make_tiny_target
from modelopt_eagle.training import train

WEIGHTS, CHANCES = (0.1, 1, 5), (0, 0.5, 1)


def final(overrides: list[str]) -> tuple[float, float]:
    """``(loss, preservation KL)`` at the end of one run."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        last = train(load_recipe(None, [f"training.output_dir={folder}/run", *overrides])).history[-1]
    return last["loss"], last.get("preservation_kl", 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base_model", default="tiny", help="target; tiny: the random one of the tests")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--max_length", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as folder:
        name = arguments.base_model
        if name == "tiny":
            name = folder
            make_tiny_target(folder)
        common = [
            f"model.base_model={name}", f"data.max_rows={arguments.rows}", f"data.max_length={arguments.max_length}",
            f"training.epochs={arguments.epochs}", "training.learning_rate=3e-3", "training.report_to=none",
            "training.log_steps=16", "eagle.draft_vocab_size=128", *arguments.overrides,
        ]  # fmt: skip
        print(f"without adapters: loss {final(common)[0]:.2f}")
        for weight in WEIGHTS:
            cells = []
            for chance in CHANCES:
                lora = ["target_lora.rank=4", f"target_lora.preservation_weight={weight}"]
                loss, drift = final([*common, *lora, f"target_lora.detach_teacher={chance}"])
                cells.append(f"{loss:.2f}, KL {drift:.2g}")
            print(f"| {weight} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
