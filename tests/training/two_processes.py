"""Entry of the launched processes in ``test_distributed.py``: trains one small run.

torchrun ... tests/training/two_processes.py TARGET DATA OUTPUT [--stop-at STEP | --fail-at CALL | --die-at CALL]
    [OVERRIDE ...]
"""

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from modelopt_eagle.errors import EagleError, FeatureError
from modelopt_eagle.features import OnlineSource
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


def fail_at(call: int, die: bool) -> None:
    """The second process meets an error of its own between two passes of the loop, or is gone without a word."""
    original, batches, calls = OnlineSource.load, OnlineSource._make_batches, []

    def load(self, indices):
        calls.append(indices)
        if len(calls) == call and os.environ["RANK"] == "1":
            if die:
                os._exit(9)
            raise FeatureError("row 7 is broken")
        return original(self, indices)

    def make_batches(self, plan):
        OnlineSource.load = load  # what is read before is read by both alike
        yield from batches(self, plan)

    OnlineSource._make_batches = make_batches


def main() -> None:
    target, data, output, *rest = sys.argv[1:]
    if rest[0] in ("--fail-at", "--die-at"):
        fail_at(int(rest[1]), rest[0] == "--die-at")
        rest = rest[2:]
    budget.PART_TOKENS = 200
    if rest[:1] == ["--stop-at"]:
        stop_at(int(rest[1]))
        rest = rest[2:]
    try:
        train(small_recipe(target, data, output, *rest))
    except EagleError as error:
        print(f"refused: {error}", flush=True)
        sys.exit(3 if "--fail" in " ".join(sys.argv) or "--die" in " ".join(sys.argv) else 0)


if __name__ == "__main__":
    main()
