"""A target that a program has loaded already, in place of a name to load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from modelopt_eagle.errors import TargetError
from modelopt_eagle.target.like import RunningTarget, TableTarget
from modelopt_eagle.target.load import load_tokenizer
from modelopt_eagle.target.model import Target
from modelopt_eagle.target.vision import vision_of


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
        TargetError: something else, or a model that names no place for its tokenizer.
    """
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
    return Target(model, tokenizer, name=place or type(model).__name__, vision=vision)


def is_running(target: TableTarget) -> bool:
    """Whether a target can make features, or gives its tables only."""
    return isinstance(target, RunningTarget)
