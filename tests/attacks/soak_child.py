"""Entry of the processes that ``test_soak.py`` kills: a training run or a dump, from its beginning or where it stopped.

python tests/attacks/soak_child.py train|dump TARGET DATA OUTPUT
"""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from modelopt_eagle.features.dump import TargetBackEnd, dump
from modelopt_eagle.target import load_target
from modelopt_eagle.training import train
from modelopt_eagle.training.data import read_data
from tests.training.runs import small_recipe


def main() -> None:
    what, target, data, output = sys.argv[1:]
    recipe = small_recipe(target, data, output, "training.save_steps=2", "training.epochs=4")
    if what == "train":
        print("begun", flush=True)
        train(recipe)
        return
    loaded = load_target(target)
    rows = read_data(recipe, loaded, data).rows
    rows = [replace(row, id=f"{row.id}-{copy}") for copy in range(20) for row in rows]
    print("begun", flush=True)
    dump(TargetBackEnd(loaded, batch_tokens=150), rows, output, dtype="float32", shard_bytes=100_000)


if __name__ == "__main__":
    main()
