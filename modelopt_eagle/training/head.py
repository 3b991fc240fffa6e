"""The head of a run: built for the target, or continued from a folder with its own vocabulary map."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from modelopt_eagle.data.vocab import coverage_of, load_draft_vocab, required_ids
from modelopt_eagle.draft import DraftConfig, DraftVocab
from modelopt_eagle.draft.algorithm import algorithm_of, find_algorithm, random_module
from modelopt_eagle.draft.base import DraftModule
from modelopt_eagle.errors import CheckpointError, RecipeError, TargetError
from modelopt_eagle.export.fitting import with_vocabulary, without_copy
from modelopt_eagle.recipe import Recipe
from modelopt_eagle.target import RunningTarget, TableTarget, TargetIdentity
from modelopt_eagle.target.shards import whole_layers
from modelopt_eagle.training.data import RunData
from modelopt_eagle.training.teacher_mass import teacher_mass


def new_head(recipe: Recipe, tables: TableTarget, data: RunData, aux_layer_ids) -> tuple[DraftModule, str]:
    """A head for a target, with its vocabulary and starting weights, and a line about its vocabulary.

    Args:
        tables: a ``Target`` or ``TargetTables``.
        data: gives the token counts and the longest row.

    Raises:
        RecipeError: ``eagle.init: target`` for a target of another build, or one whose last layer cannot be read.
        CheckpointError: sizes that contradict each other, a draft vocabulary larger than the target's.
    """
    vocab, line = choose_vocabulary(recipe, tables, data)
    config = head_config(recipe, tables, vocab.size, aux_layer_ids)
    config.training_length = max(data.train.lengths)
    algorithm_of(config).complete(config, recipe, tables, data.counts)
    module = random_module(config, vocab, recipe.training.seed)
    if recipe.eagle.init == "target":
        start = algorithm_of(config).from_target
        if start is not None:  # check_drafter has refused drafters without
            start_from(tables, module, start)
    return module, line


def start_from(tables: TableTarget, module: DraftModule, start: Callable[[Any, Any], None]) -> None:
    """Let a drafter start a head from a target's weights: of the loaded model, or of its last layers' files.

    Raises:
        RecipeError: the layers are not built like the head's, or their files cannot be read.
    """
    layers, count = getattr(tables, "layers", ()), module.config.num_hidden_layers
    if len(layers) < count:
        raise RecipeError(
            f"eagle.init: target copies the last {count} of the target's layers, and {tables.name} has {len(layers)}: "
            "set eagle.init: random"
        )
    try:
        with whole_layers(layers[-count:] if isinstance(tables, RunningTarget) else ()):
            start(module, tables)
    except TargetError as error:
        raise RecipeError(
            f"eagle.init: target reads the target's last layer from its files, which failed: {error}: set eagle.init: "
            "random"
        ) from error


def head_config(recipe: Recipe, tables: TableTarget, size: int | None, aux_layer_ids) -> DraftConfig:
    """The config of a new head with a vocabulary of ``size`` tokens (``None``: the target's)."""
    identity = tables.identity()
    return find_algorithm(recipe.drafter.algorithm).head_config(
        recipe,
        tables.config,
        size,
        aux_layer_ids,
        vocab_size=identity.vocab_size,
        target_name=identity.model,
        tokenizer_hash=identity.tokenizer_hash,
        extra=_recorded(identity),
    )


def _recorded(identity: TargetIdentity) -> dict[str, str]:
    """What a head keeps of the target it was trained for, beside its name, sizes and tokenizer."""
    return {"template_hash": identity.template_hash, "target_revision": identity.revision}


def check_head(recipe: Recipe, tables: TableTarget, aux_layer_ids) -> DraftConfig:
    """Refuse before features are made what :func:`new_head` would refuse after it: sizes, and a map on the disk.

    Returns:
        the configuration of the head that is to be made; what follows from the data is not in it yet.
    """
    vocab = given_vocabulary(recipe, tables.identity())
    return head_config(recipe, tables, recipe.eagle.draft_vocab_size if vocab is None else vocab.size, aux_layer_ids)


def continued_head(
    recipe: Recipe,
    identity: TargetIdentity,
    embedding: Tensor | None = None,
    lm_head: Tensor | None = None,
) -> DraftModule:
    """The head at ``model.draft_init``, of whatever tool; its sizes, layers and vocabulary map are kept.

    With ``model.draft_init_vocab: rebuild`` the map is replaced later, by :func:`rebuild_vocabulary`.

    Args:
        identity: of the target, see ``Target.identity()``; its depth tells the layers of heads that do not name them.
        embedding: the target's, ``[V, Ht]``; a copy of it in the head's folder is left out, not trained.
        lm_head: the target's, ``[V, Ht]``; a head without its own starts with its rows.

    Raises:
        RecipeError: the recipe asks for another structure than the head has.
        CheckpointError: the head cannot be read, or is for another vocabulary or tokenizer.
    """
    from modelopt_eagle.export import ReadOptions, load_draft

    try:
        module = load_draft(
            recipe.model.draft_init,
            vocab_size=identity.vocab_size,
            tokenizer_hash=identity.tokenizer_hash,
            dtype="float32",
            options=ReadOptions(target_layers=identity.num_layers, lm_head=lm_head),
        )
    except CheckpointError as error:
        if "answer with --" not in str(error):
            raise
        raise CheckpointError(
            f"{error}. The recipe has no such key: convert the head first with scripts/convert_checkpoint.py, which "
            "takes these answers, and give its output as model.draft_init"
        ) from error
    module = without_copy(module, embedding)
    if module.config.target_hidden_size != identity.hidden_size:
        raise RecipeError(
            f"{recipe.model.draft_init} reads hidden states {module.config.target_hidden_size} wide, the target's are "
            f"{identity.hidden_size}: it is a head for another target"
        )
    eagle, origin = recipe.eagle, recipe.origin
    differing, asked = [], recipe.drafter.algorithm
    if asked != module.config.algorithm:
        differing.append(f"algorithm is {asked}, the head is of {module.config.algorithm}")
    wanted = {"aux_layer_ids": "aux_layer_ids", **algorithm_of(module.config).structure}
    for key, name in wanted.items():
        asked, found = getattr(eagle, key), getattr(module.config, name)
        if origin[f"eagle.{key}"] == "default" or asked is None:
            continue
        if name == "rope_scaling" and found is None:
            found = {"rope_type": "default"}  # how a recipe asks for none
        if (tuple(asked) if isinstance(asked, list) else asked) != found:
            differing.append(f"eagle.{key} is {asked}, the head has {found}")
    if recipe.model.draft_init_vocab == "keep":
        differing += another_vocabulary(recipe, module.config.draft_vocab_size)
    else:
        given_vocabulary(recipe, identity)  # refused before features are made
    if differing:
        where = recipe.model.draft_init
        raise RecipeError(
            f"{where} is another head than the recipe describes: {'; '.join(differing)}. Leave these keys at null or "
            "give the head's values"
        )
    config = module.config  # what other tools' heads do not record, and this run's template
    config.target_name = config.target_name or identity.model
    config.tokenizer_hash = config.tokenizer_hash or identity.tokenizer_hash
    config.extra = {**config.extra, **_recorded(identity)}
    config.extra.pop("target_adapter", None)  # this run's target has none, or a new one
    return module


def another_vocabulary(recipe: Recipe, size: int) -> list[str]:
    """What the recipe asks of the vocabulary and a head that keeps its map of ``size`` tokens does not have."""
    eagle, found = recipe.eagle, []
    mends = " (model.draft_init_vocab: rebuild makes a new one)"
    if eagle.draft_vocab_size not in (None, size):
        found.append(f"eagle.draft_vocab_size is {eagle.draft_vocab_size}, the head keeps its map of {size}{mends}")
    if eagle.draft_vocab_path is not None:
        found.append(f"eagle.draft_vocab_path is {eagle.draft_vocab_path}, the head keeps the map it has{mends}")
    return found


def rebuild_vocabulary(recipe: Recipe, head: DraftModule, tables, data: RunData) -> tuple[DraftModule, str]:
    """A continued head with a vocabulary chosen as for a new one, and a line about it.

    Args:
        tables: a ``Target`` or ``TargetTables``.
        data: gives the token counts.

    Raises:
        EagleError: see :func:`choose_vocabulary`.
    """
    vocab, line = choose_vocabulary(recipe, tables, data)
    moved, carried = with_vocabulary(head, vocab)
    new = vocab.size - carried
    return moved, f"{line}; rebuilt: {carried} rows of {recipe.model.draft_init} moved with their tokens, {new} are new"


def choose_vocabulary(recipe: Recipe, tables: TableTarget, data: RunData) -> tuple[DraftVocab, str]:
    """The draft vocabulary of a new head and a line about it: a map on disk, counted from the data, or everything.

    Raises:
        EagleError: see :func:`given_vocabulary`; or a size that cannot hold the special tokens.
    """
    eagle, identity = recipe.eagle, tables.identity()
    total = identity.vocab_size
    vocab = given_vocabulary(recipe, identity)
    if vocab is None:
        counts = data.counts
        if eagle.draft_vocab_counts == "teacher" and hasattr(data.train, "load"):  # a streamed source has no rows yet
            counts = counts + teacher_mass(data.train, tables.head, total)
        needed = required_ids(tables.tokenizer, total, tables.end_token_ids, data.counts)
        vocab = DraftVocab.from_counts(counts, eagle.draft_vocab_size, needed)
    return vocab, check_coverage(recipe, data, vocab)


def check_coverage(recipe: Recipe, data: RunData, vocab: DraftVocab, name: str | None = None) -> str:
    """A line about how much of the data a draft vocabulary holds.

    Args:
        name: what to call it in place of its sizes.

    Raises:
        RecipeError: less than ``eagle.min_vocab_coverage``.
    """
    named = "draft vocabulary: " + (name or f"{vocab.size} of {vocab.t2d.numel()} tokens")
    if not int(data.counts.sum()):
        return f"{named}, none of the data is supervised"
    inside, least = coverage_of(data.counts, vocab), recipe.eagle.min_vocab_coverage
    if inside < least:
        raise RecipeError(
            f"{named}, and only {inside:.2%} of the supervised tokens are inside (eagle.min_vocab_coverage: {least}): "
            "the head could never draft the others. Is the map of other data? Choose a larger one, or leave "
            "eagle.draft_vocab_path at null"
        )
    return f"{named}, {inside:.2%} of the supervised tokens are inside"


def given_vocabulary(recipe: Recipe, identity: TargetIdentity) -> DraftVocab | None:
    """The vocabulary that needs no data: a map on the disk, or everything; ``None`` if it is to be counted.

    Raises:
        RecipeError: a map of another size than ``eagle.draft_vocab_size``.
        CheckpointError: a map of another tokenizer.
    """
    eagle, total = recipe.eagle, identity.vocab_size
    if eagle.draft_vocab_path is None:
        return DraftVocab.identity(total) if eagle.draft_vocab_size is None else None
    vocab = load_draft_vocab(eagle.draft_vocab_path, identity.tokenizer_hash, total)
    if eagle.draft_vocab_size not in (None, vocab.size):
        raise RecipeError(
            f"eagle.draft_vocab_size is {eagle.draft_vocab_size}, the map at {eagle.draft_vocab_path} has "
            f"{vocab.size} tokens: set the size to that, or to null"
        )
    return vocab
