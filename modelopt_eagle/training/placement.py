"""How the processes of a run hold the target: a copy in each, or one copy in slices."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from modelopt_eagle.draft.algorithm import find_algorithm
from modelopt_eagle.errors import EagleError, RecipeError
from modelopt_eagle.recipe import Recipe
from modelopt_eagle.target.load import causal_class, load_config, resolve
from modelopt_eagle.target.shards import Shards
from modelopt_eagle.target.split import layer_shares, tensor_shares, weight_bytes

ROOM = 0.8
"""Share of a device's memory that the target and what is trained may take; the rest is for features and a step."""


@dataclass(frozen=True)
class Placement:
    """Where the target of a run lies.

    Attributes:
        shards: the processes that hold a copy together; ``None``: each has its own.
        reason: why, where the recipe left it open.
    """

    shards: Shards | None = None
    reason: str | None = None


def place_target(recipe: Recipe, accelerator: Any, given: bool = False) -> Placement:
    """Choose as ``model.parallel`` says; every process of the launch calls this, and all choose the same.

    Args:
        recipe: of the run.
        accelerator: of accelerate.
        given: the target is loaded already.

    Returns:
        the processes that share a copy, if it is split.

    Raises:
        RecipeError: one process, a number of them that ``model.shards`` does not divide, or ``model.shards`` where no
            target is split.
    """
    kind, world = recipe.model.parallel, accelerator.num_processes
    check_shards(recipe, world, given)
    if kind == "none" or given or not recipe.data.runs_target:
        return Placement()
    check_several(recipe, world)
    if world == 1:
        return Placement()
    reason = None
    if kind == "auto":
        fits, reason = whole_fits(recipe, accelerator.device)
        fits = bool(accelerator.reduce(torch.tensor([int(fits)], device=accelerator.device), "sum") == world)
        if not fits and (against := not_split(recipe)):
            fits, reason = True, f"{reason}, and {against}"
        if fits:
            unread = "" if recipe.model.shards is None else f", so model.shards: {recipe.model.shards} has no effect"
            return Placement(None, f"{reason}{unread}")
        kind = "fsdp"
    size = recipe.model.shards or world
    return Placement(Shards.make(kind, size, accelerator.device.type), reason)


def check_shards(recipe: Recipe, processes: int, given: bool = False) -> None:
    """Refuse a ``model.shards`` that nothing reads, or that so many processes cannot be grouped by.

    Raises:
        RecipeError: no target is split, or the number does not divide the processes.
    """
    size, asked = recipe.model.shards, recipe.model.parallel in ("fsdp", "tensor")
    if size is None:
        return
    if given or not recipe.data.runs_target or (processes == 1 and not asked):
        one = "there is one" if processes == 1 else "this run does not load the target"
        why = "the target is given" if given and processes > 1 else one
        raise RecipeError(
            f"model.shards is {size}, which says how many processes hold a split target, and {why}: leave it out"
        )
    if processes > 1 and (processes % size or size == 1):
        raise RecipeError(
            f"model.shards is {size}, and there are {processes} processes: choose a divisor of that above 1"
        )


LAUNCH = "start several (torchrun --nproc_per_node N, or accelerate launch --num_processes N)"


def check_several(recipe: Recipe, processes: int, how: str = LAUNCH) -> None:
    """Refuse to split a target over one process.

    Args:
        recipe: of a run that loads its target.
        processes: how many there are.
        how: to have several.

    Raises:
        RecipeError: there is one, and ``model.parallel`` asks for a split.
    """
    kind = recipe.model.parallel
    if processes == 1 and kind in ("fsdp", "tensor"):
        raise RecipeError(
            f"model.parallel: {kind} splits the target over processes, and there is one: {how}, or leave it out: in "
            "one process model.device: auto spreads the target over all devices"
        )


def not_split(recipe: Recipe) -> str | None:
    """Why ``auto`` does not split a target that is too large, ``None`` if it can."""
    model = recipe.model
    if recipe.target_lora.rank:
        return "target_lora needs it whole"
    if recipe.data.fills_store:
        return "data.on_missing: generate needs it whole"
    if recipe.training.run_budget_minutes is not None and recipe.data.cache_features == "disk":
        return "training.run_budget_minutes with data.cache_features: disk needs it whole"
    if ":" in model.device:
        return f"model.device is {model.device} for all"
    return None


def quantised(config: Any) -> bool:
    """Whether a target's weights are."""
    return getattr(config, "quantization_config", None) is not None


def whole_fits(recipe: Recipe, device: torch.device, alone: bool = False) -> tuple[bool, str]:
    """Whether a whole copy of the target fits beside the training of the head, and a line with the numbers.

    Counted are the weights of both, and the head's gradients and moments; true also where sizes are not known.

    Args:
        recipe: of the run.
        device: of this process.
        alone: to decode with, in one process, instead of training in all.

    Returns:
        whether it fits, and the numbers in words.
    """
    local = 1 if alone else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    memory, model = device_memory(device, local), recipe.model
    config = load_config(resolve(model.base_model), model.revision, model.trust_remote_code)
    if quantised(config):
        return True, "the target is quantised, and its size is not known from its configuration"
    named = model.load_arguments()["dtype"]
    text = config.get_text_config(decoder=True)
    dtype = getattr(torch, named) if named != "auto" else getattr(text, "dtype", None) or torch.float32
    try:
        kind = causal_class(config, model.base_model, model.trust_remote_code)
        target = weight_bytes(kind, config, dtype, model.trust_remote_code)
        weights = head_weights(recipe, config)
    except EagleError:
        raise
    except Exception as error:  # code of a model that is built without memory
        return True, f"its size is not known from its configuration ({type(error).__name__})"
    head = (4 if alone else 16) * weights
    needed = target + head
    if memory is None:
        return True, f"a copy takes {gib(target)}, and the memory of {device.type} is not known"
    fits = needed <= ROOM * memory
    return fits, (
        f"a copy takes {gib(target)} and the head {gib(head)} of {gib(memory)} {'here' if alone else 'each'}, of which "
        f"{ROOM:.0%} may be used"
    )


def split_share(recipe: Recipe, config: Any, target: int, shards: int) -> int:
    """Bytes of a split target on a device: its slices of the layers and all that is not cut.

    With FSDP2 two whole layers are there beside the slices: one runs, and the next is gathered.

    Args:
        recipe: of the run.
        config: the target's, of transformers.
        target: bytes of a whole copy.
        shards: the processes that hold a copy together.

    Raises:
        TargetError: ``model.parallel`` is ``tensor``, and transformers has no plan for so many processes.
    """
    model = recipe.model
    kind = causal_class(config, model.base_model, model.trust_remote_code)
    if model.parallel == "tensor":
        parts, every = tensor_shares(model.base_model, kind, config, shards, model.trust_remote_code)
        return round(target * (every - parts + parts / shards) / every)
    layers, largest, every = layer_shares(kind, config, model.trust_remote_code)
    gathered = layers / shards + min(2 * largest, layers)
    return round(target * min(1.0, (every - layers + gathered) / every))


def head_weights(recipe: Recipe, config: Any) -> int:
    """Parameters of the recipe's head for a target of this configuration; of a continued one those in its file."""
    if recipe.model.draft_init is not None:
        files = Path(recipe.model.draft_init).expanduser().glob("*.safetensors")
        return sum(file.stat().st_size for file in files) // 2  # mostly bfloat16; an upper bound for float32
    algorithm, eagle = find_algorithm(recipe.drafter.algorithm), recipe.eagle
    cost = algorithm.cost(algorithm.head_config(recipe, config, eagle.draft_vocab_size, eagle.aux_layer_ids))
    return cost.every_token + cost.output if cost.parameters is None else cost.parameters


def device_memory(device: torch.device, processes: int) -> int | None:
    """Bytes for one of so many processes: of its accelerator, or its part of main memory; ``None`` where unknown."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if device.type != "cpu":
        return None
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
    return memory // processes


def gib(count: float) -> str:
    """Bytes as text."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
