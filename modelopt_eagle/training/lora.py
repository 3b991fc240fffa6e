"""Adapters on the target as a recipe asks for them."""

from __future__ import annotations

from modelopt_eagle.common.package import require_extra
from modelopt_eagle.errors import RecipeError
from modelopt_eagle.target.lora import TargetAdapter, find_modules


def check_adapters(recipe, target) -> None:
    """Refuse before features are made what :func:`make_adapter` would refuse after it: a missing package, module names.

    Raises:
        MissingExtraError, TargetError: see :class:`TargetAdapter`.
    """
    require_extra("peft", "lora")
    find_modules(target, recipe.target_lora.target_modules, recipe.target_lora.first_layer)


def make_adapter(recipe, target, device) -> TargetAdapter:
    """Adapters as a recipe's ``target_lora`` section says.

    Raises:
        RecipeError: the target is spread over devices, or lies on another one than the head.
        TargetError: module names or a layer that the target does not have.
    """
    lora = recipe.target_lora
    adapter = TargetAdapter(
        target,
        rank=lora.rank,
        alpha=lora.alpha,
        target_modules=lora.target_modules,
        first_layer=lora.first_layer,
        seed=recipe.training.seed,
    )
    there = adapter.device
    if there is None or (there.type, there.index or 0) != (device.type, device.index or 0):
        raise RecipeError(
            f"target_lora trains the target beside the head on {device}, and the target lies "
            f"{'on several devices' if there is None else f'on {there}'}: name that one in model.device, or start one "
            "process for each device"
        )
    return adapter
