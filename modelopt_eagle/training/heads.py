"""The head of a run: built for the target, or continued from a folder with its own vocabulary map."""

from __future__ import annotations

from modelopt_eagle.draft import DraftConfig, DraftVocab, EagleModule
from modelopt_eagle.errors import RecipeError
from modelopt_eagle.recipe import Recipe

from .initialise import random_module, start_from_target
from .sources import RunData

STRUCTURE = {
    "decoder_type": "decoder_type",
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "attention_bias": "attention_bias",
    "norm_before_residual": "norm_before_residual",
    "norm_before_fc": "norm_before_fc",
    "fc_norm": "fc_norm",
    "norm_output": "norm_output",
}
"""Recipe key in ``eagle`` → field of :class:`DraftConfig`."""


def new_head(recipe: Recipe, tables, data: RunData, aux_layer_ids, target) -> EagleModule:
    """A head for a target, with its vocabulary and starting weights.

    Args:
        tables: a ``Target`` or ``TargetTables``.
        data: gives the token counts and the longest row.
        target: the loaded target, or ``None`` in offline training.

    Raises:
        RecipeError: ``eagle.init: target`` without a loaded target, or for a target of another build.
        CheckpointError: sizes that contradict each other, a draft vocabulary larger than the target's.
    """
    eagle, identity = recipe.eagle, tables.identity()
    vocab = choose_vocabulary(recipe, tables, data)
    overrides = {name: getattr(eagle, key) for key, name in STRUCTURE.items()}
    config = DraftConfig.from_target(
        tables.config,
        vocab.size,
        aux_layer_ids,
        vocab_size=identity["vocab_size"],
        target_name=identity["model"],
        tokenizer_hash=identity["tokenizer_hash"],
        training_length=max(data.train.lengths),
        **overrides,
    )
    module = random_module(config, vocab, recipe.training.seed)
    if eagle.init == "target":
        if target is None:
            raise RecipeError(
                "eagle.init: target copies the target's last layer, and offline training reads only its tables: set "
                "eagle.init: random"
            )
        start_from_target(module, target)
    return module


def continued_head(recipe: Recipe) -> EagleModule:
    """The head at ``model.draft_init``; its sizes, layers and vocabulary map are kept.

    Raises:
        RecipeError: the recipe asks for another structure than the head has.
    """
    from modelopt_eagle.export import load_draft

    module = load_draft(recipe.model.draft_init, dtype="float32")
    eagle, origin = recipe.eagle, recipe.origin
    wanted = {"aux_layer_ids": "aux_layer_ids", **STRUCTURE}
    differing = []
    for key, name in wanted.items():
        asked, found = getattr(eagle, key), getattr(module.config, name)
        if origin[f"eagle.{key}"] == "default" or asked is None:
            continue
        if (tuple(asked) if isinstance(asked, list) else asked) != found:
            differing.append(f"eagle.{key} is {asked}, the head has {found}")
    if differing:
        raise RecipeError(f"{recipe.model.draft_init} is another head than the recipe describes: {'; '.join(differing)}")
    return module


def choose_vocabulary(recipe: Recipe, tables, data: RunData) -> DraftVocab:
    """The draft vocabulary of a new head: from ``eagle.draft_vocab_path``, counted from the data, or everything."""
    eagle, size = recipe.eagle, tables.identity()["vocab_size"]
    if eagle.draft_vocab_size is None:
        return DraftVocab.identity(size)
    return DraftVocab.from_counts(data.counts, eagle.draft_vocab_size, required_ids(tables))


def required_ids(tables) -> list[int]:
    """Special and end-of-turn tokens of a target: always in the draft vocabulary."""
    ids = set(tables.tokenizer.all_special_ids)
    for holder in (tables.config, getattr(getattr(tables, "model", None), "generation_config", None)):
        end = getattr(holder, "eos_token_id", None)
        ids.update(end if isinstance(end, (list, tuple)) else [] if end is None else [end])
    return sorted(ids)
