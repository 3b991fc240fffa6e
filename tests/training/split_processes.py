"""Entry of the launched processes in ``test_split.py``: several things that two processes do with one split target.

torchrun ... tests/training/split_processes.py TARGET DATA FOLDER
"""

import json
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "target"))

import torch
import torch.distributed as dist
from target_families import make_family, make_vision_wrapper
from transformers import LlamaConfig

from modelopt_eagle.cli.dump import main as dump
from modelopt_eagle.errors import EagleError, TargetError
from modelopt_eagle.target import Target, load_target
from modelopt_eagle.target.shards import Shards, local_bytes, together, whole_layers
from modelopt_eagle.target.tensor_parallel import check_plan, check_slices, cut
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


def states(target, kind) -> dict:
    """The split target against a whole copy, and what lies in this process."""
    split = load_target(target, shards=Shards.make(kind, 2, "cpu"))
    whole = load_target(target)
    ids = torch.arange(20, 60)[None]
    ours, theirs = split.features(ids), whole.features(ids)
    layers = [local_bytes(layer) for layer in split.layers]
    cut = [p.to_local() for layer in split.layers for p in layer.parameters() if hasattr(p, "to_local")]
    memory = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in cut}
    return {
        "difference": max(
            apart(ours.aux_hidden, theirs.aux_hidden),
            apart(ours.final_hidden, theirs.final_hidden),
            apart(split.model(ids).logits, whole.model(ids).logits),
        ),
        "memory": sum(memory.values()),
        "last": whole_again(split, whole),
        "own": of_its_own(split, whole),
        "same": torch.equal(ours.aux_hidden, theirs.aux_hidden) and torch.equal(ours.final_hidden, theirs.final_hidden),
        "logits": torch.equal(split.model(ids).logits, whole.model(ids).logits),
        "identity": split.identity().as_dict() == whole.identity().as_dict(),
        "ends": list(split.end_token_ids) == list(whole.end_token_ids),
        "layers": [sum(own for own, _ in layers), sum(all_of for _, all_of in layers)],
        "model": list(local_bytes(split.model)),
        "uneven": uneven(split),
        "failed": failing(split),
    }


def apart(ours, theirs) -> float:
    """The largest difference, as a share of the largest value."""
    return float((ours - theirs).abs().max() / theirs.abs().max())


def whole_again(split, whole) -> bool:
    """Whether the last layer is that of the whole target where a head starts from it, and in parts behind it."""
    before = local_bytes(split.layers[-1])
    with whole_layers(split.layers[-1:]):
        pairs = zip(split.layers[-1].parameters(), whole.layers[-1].parameters(), strict=True)
        same = all(torch.equal(ours, theirs) for ours, theirs in pairs)
    return same and local_bytes(split.layers[-1]) == before


def of_its_own(split, whole) -> dict:
    """Each process runs a text of its own, then both the same one; how far off, and passes through the layers."""
    rank, passes, worst = dist.get_rank(), [], 0.0
    texts = [torch.arange(20, 60 + 9 * rank)[None], torch.arange(30, 50)[None]]
    handle = split.layers[0].register_forward_hook(lambda *given: passes.append(1))
    with together(split):
        for ids in texts:
            ours, theirs = split.features(ids), whole.features(ids)
            worst = max(worst, apart(ours.aux_hidden, theirs.aux_hidden), apart(ours.final_hidden, theirs.final_hidden))
    handle.remove()
    return {"difference": worst, "passes": len(passes)}


def families() -> dict[str, list[float]]:
    """Of small models of other families in tensor parts: how far off their states are, and the share of the layers."""
    shards, found = Shards.make("tensor", 2, "cpu"), {}
    makers = {name: partial(make_family, name) for name in ("phi", "qwen3_moe", "gpt_neox")}
    for name, make in (makers | {"gemma3 with images": make_vision_wrapper}).items():
        whole, parts = Target(make(), None, name=name), make().requires_grad_(False)
        config = parts.config.get_text_config(decoder=True)
        cut(parts, check_plan(name, parts, config, whole.parts.names["layers"], 2), shards.mesh)
        split = Target(parts, None, name=name, shards=shards)
        check_slices(split)
        ids = torch.arange(3, 40)[None]
        ours, theirs = split.features(ids), whole.features(ids)
        worst = max(apart(ours.aux_hidden, theirs.aux_hidden), apart(ours.final_hidden, theirs.final_hidden))
        own, every = map(sum, zip(*map(local_bytes, split.layers), strict=True))
        found[name] = [worst, own / every]
    return found


def wrong_plans(target) -> list[str]:
    """What is said where a family's plan does not run, and where it gives other states."""
    said, right = [], LlamaConfig.base_model_tp_plan
    shards = Shards.make("tensor", 2, "cpu")
    norm, up = "layers.*.input_layernorm", "layers.*.mlp.up_proj"
    for plan in ({name: style for name, style in right.items() if name != up}, right | {norm: "all_reduce"}):
        LlamaConfig.base_model_tp_plan = plan
        try:
            load_target(target, shards=shards)
        except TargetError as error:
            said.append(str(error))
    LlamaConfig.base_model_tp_plan = right
    return said


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
    dist.init_process_group("gloo", timeout=timedelta(minutes=15))
    found = {"states": states(target, "fsdp"), "parts": states(target, "tensor"), "wrong": wrong_plans(target)}
    found["families"] = families()
    made = {
        "whole": ("training.gradient_accumulation_steps=2", "model.parallel=none"),
        "split": ("training.gradient_accumulation_steps=2", "model.parallel=fsdp"),
        "tensor": ("training.gradient_accumulation_steps=2", "model.parallel=tensor"),
        "shared": ("model.parallel=tensor", "training.context_parallel=2", "training.max_steps=6"),
        "adapted": ("training.context_parallel=2", "target_lora.rank=2", "training.max_steps=6"),
        "stored": ("training.gradient_accumulation_steps=2", "model.parallel=fsdp", "data.cache_features=disk"),
    }
    for name, more in made.items():
        result = train(recipe(target, data, folder / name, *more))
        found[name] = {"header": result.header, "history": result.history, "evaluations": result.evaluations}
    stopped = recipe(target, data, folder / "stopped", *made["tensor"])
    found["stopped"] = train(stopped, on_step=lambda metrics: metrics["step"] == 3).steps
    train(stopped)
    for name in ("fsdp", "tensor", "none"):
        options = ["--dtype", "float32", *([] if name == "none" else ["--parallel", name])]
        dump(["--model", target, "--input-file", data, "--output-dir", str(folder / f"dump-{name}"), *options])
    (folder / f"found-{dist.get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
