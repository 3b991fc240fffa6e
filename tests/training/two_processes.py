"""Entry of the launched processes in ``test_distributed.py``: trains one small run.

torchrun ... tests/training/two_processes.py TARGET DATA OUTPUT [--stop-at STEP] [OVERRIDE ...]
"""

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from modelopt_eagle.errors import EagleError
from modelopt_eagle.training import budget, train
from modelopt_eagle.training.trainer import Trainer
from tests.training.runs import small_recipe


def stop_at(step: int) -> None:
    """Only the second process gets the signal; both must stop."""
    original = Trainer.optimise

    def optimise(self, index, window):
        original(self, index, window)
        if self.state.step == step and self.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    Trainer.optimise = optimise


def main() -> None:
    target, data, output, *rest = sys.argv[1:]
    budget.PART_TOKENS = 200
    if rest[:1] == ["--stop-at"]:
        stop_at(int(rest[1]))
        rest = rest[2:]
    try:
        train(small_recipe(target, data, output, *rest))
    except EagleError as error:
        print(f"refused: {error}")


if __name__ == "__main__":
    main()
