"""What validation would refuse of a target, told by its configuration, before anything is loaded or trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from modelopt_eagle.decoding.supported import check_shape
from modelopt_eagle.decoding.target_runner import cache_argument, cache_name
from modelopt_eagle.errors import DecodingError
from modelopt_eagle.recipe import Recipe
from modelopt_eagle.target.like import RunningTarget
from modelopt_eagle.target.load import causal_class, load_config, resolve
from modelopt_eagle.target.parts import TargetParts, find_parts


@dataclass(frozen=True)
class Skeleton:
    """A target without weights: what ``supported.py`` looks at of one.

    Attributes:
        name: for messages.
        model: on the meta device.
        config: its text config.
        parts: of the model.
    """

    name: str
    model: Any
    config: Any
    parts: TargetParts


def refusal(recipe: Recipe, target: Any = None) -> str | None:
    """Why validation would refuse a recipe's target, or ``None``.

    What only a loaded target can tell (recurrent layers that take no cache of transformers) is not known without it.

    Args:
        recipe: of the run; ``validation.mode: none`` refuses nothing.
        target: the loaded target, if there is one.

    Raises:
        TargetError: there is no such target.
    """
    section = recipe.validation
    if section.mode == "none":
        return None
    ask = cache_argument
    if target is None:
        target, ask = skeleton(recipe), cache_name
    elif not isinstance(target, RunningTarget):
        return "drafts are verified by the model, and only the target's tables were given"
    siblings = section.mode == "tree" and (section.topk or 1) > 1
    try:
        ask(target)
        check_shape(target, siblings, section.batch_size > 1, None, "Set validation.batch_size=1")
    except DecodingError as error:
        return str(error)
    return None


def skeleton(recipe: Recipe) -> Skeleton:
    """The target of a recipe, built on the meta device from its configuration.

    Raises:
        TargetError: see :func:`~modelopt_eagle.target.load.load_config` and ``find_parts``.
    """
    model = recipe.model
    config = load_config(resolve(model.base_model), model.revision, model.trust_remote_code)
    own_code = {"trust_remote_code": True} if model.trust_remote_code else {}
    with torch.device("meta"):
        built = causal_class(config, model.base_model, model.trust_remote_code).from_config(config, **own_code)
    text = config.get_text_config()
    return Skeleton(model.base_model, built, text, find_parts(built, text))
