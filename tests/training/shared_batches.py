"""Entry of the launched processes in ``test_context.py``: each runs its share of some batches and writes what it got.

torchrun ... tests/training/shared_batches.py OUTPUT
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

from modelopt_eagle.data import TokenizedRow
from modelopt_eagle.draft import DraftVocab
from modelopt_eagle.draft.algorithm import find_algorithm, random_module
from modelopt_eagle.features import OnlineSource
from modelopt_eagle.features.unadapted import UnadaptedSource
from modelopt_eagle.recipe import load_recipe
from modelopt_eagle.target.lora import TargetAdapter
from modelopt_eagle.target.tiny import make_tiny_target
from modelopt_eagle.training.context import ByPosition, ContextGroup, SharedAxis
from modelopt_eagle.training.states import AdaptedStates
from modelopt_eagle.training.step import TeacherTables, TrainingStep

PARALLEL = ("algorithm=peagle", "peagle.depth_floor=0.1")
CASES = {
    "one row": ([(96, 20)], (), {}),
    "long row": ([(1024, 100)], (), {}),
    "packed": ([(40, 9), (7, 2), (3, 1), (61, 50)], ("eagle.ttt_steps=4",), {}),
    "answer in one piece": ([(120, 113)], (), {}),
    "two layers": ([(50, 10), (33, 5)], (), {"num_hidden_layers": 2}),
    "own embedding": ([(64, 16)], (), {"own_embedding": True}),
    "mla": ([(64, 16)], (), {"decoder_type": "kimik2"}),
    "labels": ([(64, 16)], ("eagle.self_logit_distillation=false",), {}),
    "in vocabulary": ([(64, 16)], ("eagle.in_vocab_only=true",), {}),
    "speculators": ([(64, 16)], ("eagle.convention=speculators",), {}),
    "in one pass": ([(96, 20), (33, 5)], (*PARALLEL, "peagle.depth=5"), {"num_hidden_layers": 2, "mask_token_id": 255}),
    "in one pass, adapted": ([(40, 9), (61, 30)], (*PARALLEL, "target_lora.rank=4"), {"mask_token_id": 255}),
    "three tokens": ([(3, 1)], (), {}),
    "nothing": ([(30, 30)], (), {}),
    "adapted": ([(40, 9), (61, 30)], ("target_lora.rank=4",), {}),
    "adapted, teacher learns": ([(64, 16), (20, 4)], ("target_lora.rank=4", "target_lora.preservation_weight=3"), {}),
    "adapted, warming up": ([(64, 16)], ("target_lora.rank=4",), {}),
}
SEED = 5
"""Of what a drafter draws for its plan."""
ADAPTED = {
    "in one pass, adapted": {"adapt": True, "detach": True},
    "adapted": {"adapt": True, "detach": True},
    "adapted, teacher learns": {"adapt": True, "detach": False},
}
"""Cases whose adapters learn, and how; in the other ones they stay as they are."""


def row(number: int, length: int, prompt: int) -> TokenizedRow:
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(4, 200, (length,), generator=generator).tolist()
    return TokenizedRow(str(number), "", ids, [place >= prompt for place in range(length)], prompt)


def make(name: str, group: ContextGroup | None = None):
    """The step of a case, whole or shared, and its batch."""
    shapes, overrides, flags = CASES[name]
    target = make_tiny_target()
    recipe = load_recipe(None, overrides)
    if flags.get("decoder_type") == "kimik2":
        flags = {**flags, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
                 "v_head_dim": 12}  # fmt: skip
    algorithm = find_algorithm(recipe.drafter.algorithm)
    config = algorithm.config.from_target(target.config, 96, **flags)
    module = random_module(config, DraftVocab.from_counts(torch.arange(256).flip(0), 96), seed=0)
    tables = TeacherTables.make(target.embedding.weight, target.head, module.target_ids)
    rows = [row(number, *shape) for number, shape in enumerate(shapes)]
    source, states = OnlineSource(target, rows), None
    if recipe.target_lora.rank:
        adapter = TargetAdapter(target, rank=4, alpha=8, target_modules=["q_proj", "down_proj"])
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in adapter.parameters():
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
        source, states = UnadaptedSource(source, adapter), AdaptedStates(adapter, recipe.target_lora)
    step = TrainingStep(
        module, tables, recipe.eagle, states=states, sharing=None if group is None else ByPosition(group),
        settings=algorithm.settings(recipe),
    )  # fmt: skip
    batch = source.load(range(len(rows)))
    return step.train(), step.place(step.share(batch), "cpu")


def measure(step, batch, normalizers, **options) -> dict:
    """Loss, metrics, gradients, and the numbers kept between forward and backward."""
    kept = 0

    def pack(tensor):
        nonlocal kept
        kept += tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = step(batch, normalizers, **options)
    output.loss.backward()
    return {
        "loss": output.loss.detach(),
        "per_step": output.per_step,
        "preservation": output.preservation if options.get("adapt") else None,
        "counts": output.valid_counts,
        "hits": output.top1_hits,
        "gradients": {
            name: parameter.grad for name, parameter in step.named_parameters() if parameter.grad is not None
        },
        "kept": kept,
        "features": 0 if batch is None else batch.aux_hidden.numel() + batch.final_hidden.numel(),
        "training": step.module.training,
    }


def options_of(name: str) -> dict:
    """What the step of a case is called with."""
    return ADAPTED.get(name, {"adapt": False} if "target_lora.rank=4" in CASES[name][1] else {})


def main() -> None:
    dist.init_process_group("gloo")
    group = ContextGroup.make(dist.get_world_size(), dist.get_rank(), dist.get_world_size())
    results = {}
    for name in CASES:
        step, batch = make(name, group)
        counts = step.count_positions(batch, torch.Generator().manual_seed(SEED))
        if counts is None:
            results[name] = None
            continue
        tokens = step.num_tokens(batch)
        total = torch.cat((counts, torch.tensor([tokens])))
        dist.all_reduce(total)
        results[name] = measure(step, batch, step.normalisers(total[:-1], int(total[-1])), **options_of(name))
        results[name]["total"] = total
    axis = SharedAxis(group, 11, "cpu")
    values = torch.arange(11.0)[axis.tokens, None].expand(-1, 3).clone().requires_grad_()
    gathered = axis.gather(values)
    (gathered * torch.arange(1.0, 12.0)[:, None] * (group.rank + 1)).sum().backward()
    results["gathered"] = (axis.tokens, gathered.detach(), values.grad)
    torch.save(results, Path(sys.argv[1]) / f"rank-{group.rank}.pt")


if __name__ == "__main__":
    main()
