"""The conversations of a recipe, tokenised for its target without reading the target's weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from modelopt_eagle.data import TokenizedDataset
from modelopt_eagle.recipe import Recipe


@dataclass(frozen=True)
class TokenizerSource:
    """What of a target reads conversations; see ``TableTarget`` for the names."""

    name: str
    tokenizer: Any
    config: Any
    end_token_ids: tuple[int, ...]
    vision: Any


def tokenizer_source(recipe: Recipe) -> TokenizerSource:
    """Tokenizer, configs and processor of a recipe's target.

    Raises:
        TargetError: the target is not there, or has no tokenizer.
    """
    from modelopt_eagle.target.chat import asks_for_date, set_chat_settings, today
    from modelopt_eagle.target.load import load_config, load_tokenizer, resolve
    from modelopt_eagle.target.stops import find_end_token_ids, read_generation_config
    from modelopt_eagle.target.vision import vision_of

    model, data = recipe.model, recipe.data
    place, options = resolve(model.base_model), (model.revision, model.trust_remote_code)
    tokenizer, config = load_tokenizer(place, *options, model.chat_template), load_config(place, *options)
    text = config.get_text_config()
    ends = find_end_token_ids(tokenizer, read_generation_config(place, model.revision), config, text)
    date = data.template_date
    if date is None and getattr(tokenizer, "chat_template", None) and asks_for_date(tokenizer.get_chat_template()):
        date = today()
    set_chat_settings(tokenizer, data.template_arguments, date)
    return TokenizerSource(model.base_model, tokenizer, text, ends, vision_of(tokenizer, place, config, *options))


def tokenised(recipe: Recipe, paths=None) -> tuple[TokenizedDataset, TokenizerSource]:
    """The rows of ``data.train_path``, or of other paths, and what tokenised them.

    Raises:
        EagleError: a path or a target that is not there, or rows that cannot be used.
    """
    from modelopt_eagle.data.files import check_sources
    from modelopt_eagle.recipe import replaced
    from modelopt_eagle.training.data import read_data

    paths = recipe.data.train_path if paths is None else paths
    check_sources(paths)
    source = tokenizer_source(recipe)
    return read_data(replaced(recipe, {"data.min_used_share": 0.0}), source, paths), source  # type: ignore[arg-type]
