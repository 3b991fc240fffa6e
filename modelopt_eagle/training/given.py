"""What a program hands over in place of what a recipe names: a loaded target, rows in memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from modelopt_eagle.data.files import IN_MEMORY
from modelopt_eagle.errors import RecipeError, TargetError
from modelopt_eagle.recipe import ModelSection, Recipe, replaced
from modelopt_eagle.target import RunningTarget, TableTarget, Target
from modelopt_eagle.target.load import load_tokenizer
from modelopt_eagle.target.vision import vision_of

LOADING_KEYS = ("revision", "attn_implementation", "trust_remote_code", "chat_template", "parallel", "shards")
"""Keys of ``model`` that say how a target is loaded, and so nothing about one that is loaded."""


@dataclass(frozen=True)
class Given:
    """What was handed over; ``None`` leaves it to the recipe.

    Attributes:
        target: to train for.
        data: rows to train on, see :func:`~modelopt_eagle.data.files.rows_in_memory`.
        eval_data: rows to evaluate on.
    """

    target: TableTarget | None = None
    data: Iterable[Any] | None = None
    eval_data: Iterable[Any] | None = None


def take(recipe: Recipe, target: Any = None, data: Any = None, eval_data: Any = None) -> tuple[Recipe, Given]:
    """Check what is handed over against a recipe, and write into a copy of it what is used instead.

    Args:
        recipe: of the run; it stays as it is.
        target: see :func:`as_target`.
        data, eval_data: rows in memory, or the paths of files.

    Returns:
        the recipe that is recorded, and what does not stand in it.

    Raises:
        RecipeError: it does not fit to what the recipe says.
        TargetError: ``target`` is none.
    """
    changes: dict[str, Any] = {}
    held = None if target is None else as_target(target)
    if held is not None:
        changes |= target_changes(recipe, held)
    rows = {}
    for name, key, value in (("data", "train_path", data), ("eval_data", "eval_path", eval_data)):
        if value is None:
            continue
        check_rows(recipe, name, key)
        paths = as_paths(value)
        changes[f"data.{key}"] = IN_MEMORY if paths is None else paths
        if paths is None:
            rows[name] = value
    return (replaced(recipe, changes) if changes else recipe), Given(held, **rows)


def target_changes(recipe: Recipe, target: TableTarget) -> dict[str, Any]:
    """What a recipe records of a target that was given.

    Raises:
        RecipeError: the recipe names another target, says how to load one, or needs what this one cannot do.
    """
    model, default = recipe.model, ModelSection()
    names = {default.base_model, target.name, target.identity().model}
    if model.base_model not in names and Path(model.base_model).expanduser() != Path(target.name).expanduser():
        raise RecipeError(
            f"model.base_model is {model.base_model} ({recipe.origin['model.base_model']}), and the target given is "
            f"{target.name}: leave model.base_model out, or give the target that it names"
        )
    said = [key for key in LOADING_KEYS if getattr(model, key) != getattr(default, key)]
    if said:
        raise RecipeError(
            f"{', '.join(f'model.{key}' for key in said)} says how a target is loaded, and the target given is loaded "
            "already: leave it out, and load the target accordingly"
        )
    if recipe.target_lora.rank:
        raise RecipeError(
            "target_lora trains adapters inside the target, which would stay in the one given: name it as "
            "model.base_model instead, so that validation and export find it unchanged"
        )
    if not isinstance(target, RunningTarget) and recipe.data.runs_target:
        raise RecipeError(
            f"the features of this run are made by the target, and {target.name} was given as tables only: give the "
            "loaded model, or data.offline_data_path"
        )
    found = target.embedding_weight
    if model.dtype != "auto" and getattr(torch, model.dtype) != found.dtype:
        raise RecipeError(f"model.dtype is {model.dtype}, the target given is in {found.dtype}: leave model.dtype out")
    if model.device != "auto" and torch.device(model.device).type != found.device.type:
        raise RecipeError(f"model.device is {model.device}, the target given is on {found.device}: leave it out")
    return {"model.base_model": target.name, "model.device": str(found.device)}


def check_rows(recipe: Recipe, name: str, key: str) -> None:
    """Refuse rows beside files, and rows for a run that reads none.

    Raises:
        RecipeError: see above.
    """
    named = getattr(recipe.data, key)
    if named not in (None, "quickstart", IN_MEMORY):
        raise RecipeError(
            f"data.{key} is {named} ({recipe.origin[f'data.{key}']}), and {name}= was given: leave one of them out"
        )
    stored = recipe.data.offline_data_path is not None
    if stored and recipe.data.on_missing == "fail":
        raise RecipeError(f"{name}= was given, and data.offline_data_path holds the rows: leave one of them out")
    if name == "eval_data" and (stored or recipe.data.asks_servers):
        raise RecipeError("eval_data= needs the features of a loaded target: leave it out, and rows are held out")


def as_target(given: Any) -> TableTarget:
    """The target that was given.

    A model of transformers is frozen and put into evaluation mode, as :class:`~modelopt_eagle.target.Target` does; its
    identity is taken from the weights in memory, not from the folder that they once came from.

    Args:
        given: a ``Target``, ``TargetTables`` or what has their members; a transformers model; or a pair
            ``(model, tokenizer)``. The tokenizer of a model alone is loaded from the place that the model names.

    Returns:
        it, or a ``Target`` around it.

    Raises:
        TargetError: something else, a model that names no place for its tokenizer, or one that a head cannot be
            trained for, see :meth:`~modelopt_eagle.target.model.Target.check_usable`.
    """
    if isinstance(given, Target):
        given.check_usable()
    if isinstance(given, (RunningTarget, TableTarget)):
        return given
    model, tokenizer = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
    if not isinstance(model, nn.Module) or not hasattr(getattr(model, "config", None), "get_text_config"):
        raise TargetError(
            "target: expected a loaded transformers model, a pair (model, tokenizer), or what load_target returns; "
            f"found {type(given).__name__}"
        )
    place = str(getattr(model, "name_or_path", "") or "")
    if tokenizer is None:
        if not place:
            raise TargetError("target: the model does not say where its tokenizer is: give target=(model, tokenizer)")
        tokenizer = load_tokenizer(place)
    vision = vision_of(tokenizer, Path(place) if Path(place).is_dir() else place, model.config) if place else None
    target = Target(model, tokenizer, name=place or type(model).__name__, vision=vision)
    target.check_usable()
    return target


def as_paths(value: Any) -> str | list[str] | None:
    """Text for the recipe where file names were given, ``None`` where rows were."""
    if isinstance(value, (str, Path)):
        return str(value)
    if isinstance(value, (list, tuple)) and value and all(isinstance(part, (str, Path)) for part in value):
        return [str(part) for part in value]
    return None
