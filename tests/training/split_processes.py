"""Entry of the launched processes in ``test_split.py``: several things that two processes do with one split target.

torchrun ... tests/training/split_processes.py TARGET DATA FOLDER
"""

import json
import sys
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

from modelopt_eagle.errors import EagleError
from modelopt_eagle.target import load_target
from modelopt_eagle.target.shards import Shards, local_bytes, together
from modelopt_eagle.training import train
from tests.training.runs import small_recipe

SETTINGS = (
    "training.batch_size=1",
    "training.learning_rate=3e-4",
    "training.log_steps=1",
    "eagle.init=target",
    "eagle.draft_vocab_counts=teacher",
)


def recipe(target, data, folder, *more):
    """Rows that do not divide by two, evaluated on others; the head starts from the target's last layer."""
    return small_recipe(target, data, folder, f"data.eval_path={data}", *SETTINGS, *more)


def states(target) -> dict:
    """The split target against a whole copy, and what lies in this process."""
    split = load_target(target, shards=Shards.make("fsdp", 2, "cpu"))
    whole = load_target(target)
    ids = torch.arange(20, 60)[None]
    ours, theirs = split.features(ids), whole.features(ids)
    layers = [local_bytes(layer) for layer in split.layers]
    return {
        "same": torch.equal(ours.aux_hidden, theirs.aux_hidden) and torch.equal(ours.final_hidden, theirs.final_hidden),
        "logits": torch.equal(split.model(ids).logits, whole.model(ids).logits),
        "identity": split.identity().as_dict() == whole.identity().as_dict(),
        "ends": list(split.end_token_ids) == list(whole.end_token_ids),
        "layers": [sum(own for own, _ in layers), sum(all_of for _, all_of in layers)],
        "model": list(local_bytes(split.model)),
        "uneven": uneven(split),
        "failed": failing(split),
    }


def uneven(target) -> int:
    """One process runs three passes, the other one; then both have left the block."""
    ids, passes = torch.arange(20, 30)[None], 3 if dist.get_rank() == 0 else 1
    counted: list[int] = []
    with together(target), target.capture() as captured:
        for _ in range(passes):
            target.features(ids)
            counted.append(captured.aux_hidden.shape[1])
    return len(counted)


def failing(target) -> str:
    """The second process fails between two passes; what each of them raises."""
    ids = torch.arange(20, 30)[None]
    try:
        with together(target):
            target.features(ids)
            if dist.get_rank() == 1:
                raise EagleError("row 7 is broken")
            target.features(ids)
    except EagleError as error:
        return str(error)
    return "nothing"


def main() -> None:
    target, data, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    dist.init_process_group("gloo", timeout=timedelta(minutes=4))
    found = {"states": states(target)}
    made = {
        "whole": ("training.gradient_accumulation_steps=2", "model.parallel=none"),
        "split": ("training.gradient_accumulation_steps=2", "model.parallel=fsdp"),
        "stored": ("training.gradient_accumulation_steps=2", "model.parallel=fsdp", "data.cache_features=disk"),
    }
    for name, more in made.items():
        result = train(recipe(target, data, folder / name, *more))
        found[name] = {"header": result.header, "history": result.history, "evaluations": result.evaluations}
    (folder / f"found-{dist.get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
