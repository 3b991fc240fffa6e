"""DFlash as the toolkit asks for it, see :class:`~modelopt_eagle.draft.algorithm.Algorithm`."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from modelopt_eagle.draft.algorithm import Algorithm, Cost, Drafter, refuse_keys
from modelopt_eagle.draft.dflash.block import BlockSettings, block_drafts, block_states, dpace_weights, plan_blocks
from modelopt_eagle.draft.dflash.config import DFlashConfig
from modelopt_eagle.draft.dflash.draft_loop import BlockDrafter
from modelopt_eagle.draft.dflash.layout import DFlashLayout
from modelopt_eagle.draft.dflash.module import DFlashModule
from modelopt_eagle.draft.dflash.probe import probe
from modelopt_eagle.draft.eagle3.algorithm import STRUCTURE as EAGLE_STRUCTURE
from modelopt_eagle.draft.mask_token import settle_mask_token
from modelopt_eagle.draft.plan import DraftPlan
from modelopt_eagle.errors import DecodingError, RecipeError
from modelopt_eagle.kernels.recorder import Recorder

MASK_KEY = "dflash.mask_token_id"
STRUCTURE = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "rope_theta": "rope_theta",
    "rope_scaling": "rope_scaling",
    "hidden_act": "hidden_act",
    "rms_norm_eps": "rms_norm_eps",
    "attention_bias": "attention_bias",
}
"""Recipe key in ``eagle`` → field of :class:`DFlashConfig`."""
NOT_READ = (
    *(key for key in EAGLE_STRUCTURE if key not in (*STRUCTURE, "qk_norm")),
    *("ttt_steps", "ttt_warmup", "mix_hidden_states"),
)
"""Keys of ``eagle`` that shape what a DFlash head does not have; the norms of ``qk_norm`` it has always."""


def check_recipe(recipe: Any) -> None:
    """Refuse keys that nothing of a DFlash head reads, two decays, and an output layer that cannot be shared.

    Raises:
        RecipeError: such a key, with what to set in its place.
    """
    refuse_keys(
        recipe,
        NOT_READ,
        "shapes heads of another kind, and algorithm dflash drafts blocks: leave it out "
        "(dflash.block_size is how many tokens are trained)",
    )
    if recipe.eagle.loss_decay is not None and recipe.dflash.gamma is not None:
        raise RecipeError("eagle.loss_decay and dflash.gamma both say how the weights fall by slot: set one of them")
    if recipe.dflash.head == "target" and recipe.eagle.hidden_size is not None:
        raise RecipeError("dflash.head: target takes the target's output layer, so eagle.hidden_size follows: leave it")


def head_config(recipe: Any, target_config: Any, size: int | None, aux_layer_ids: Any, **fields: Any) -> DFlashConfig:
    """The configuration of a new head with a vocabulary of ``size`` tokens (``None``: the target's)."""
    own, section = {name: getattr(recipe.eagle, key) for key, name in STRUCTURE.items()}, recipe.dflash
    more = {
        "mask_token_id": section.mask_token_id,
        "block_size": section.block_size,
        "causal": section.causal,
        "shares_head": section.head == "target",
        "qk_norm": True,
    }
    return DFlashConfig.from_target(target_config, size, aux_layer_ids, **{**own, **more, **fields})


def complete(config: DFlashConfig, recipe: Any, tables: Any, counts: Tensor) -> None:
    """Choose the mask token of a new head, and hold a given one against the text.

    Args:
        counts: ``[V]`` how often each token is to be learned.

    Raises:
        RecipeError: a mask token that the text uses, or another one than a continued head has.
    """
    settle_mask_token(config, recipe.dflash.mask_token_id, tables, counts, MASK_KEY)
    changes = tables.head.bias is not None or tables.head.scale != 1.0 or tables.head.cap is not None
    if config.shares_head and changes:
        raise RecipeError(
            "dflash.head: target takes the target's output layer as it is, and this target adds a bias, a scale or a "
            "cap to its logits: set dflash.head: own"
        )
    if recipe.dflash.block_size != config.block_size or recipe.dflash.causal != config.causal:
        raise RecipeError(
            f"dflash.block_size and dflash.causal are {recipe.dflash.block_size} and {recipe.dflash.causal}, the head "
            f"has {config.block_size} and {config.causal}: give the head's values"
        )


def check_plan(config: DFlashConfig, plan: DraftPlan) -> list[str]:
    """What a plan makes of the trained block.

    Returns:
        notes for the user.

    Raises:
        DecodingError: more tokens than a bidirectional block was trained with.
    """
    trained = config.block_size - 1
    if plan.depth == trained:
        return []
    if config.causal:
        beyond = f"drafts of {plan.depth} tokens by blocks trained for {trained}: the last ones are extrapolated"
        return [beyond] if plan.depth > trained else []
    if plan.depth > trained:
        raise DecodingError(
            f"the head drafts bidirectional blocks of {trained} tokens, and {plan.depth} are asked for: draft {trained}"
        )
    return [f"drafts of {plan.depth} tokens by bidirectional blocks trained with {trained}: fewer masks than it knows"]


def settings_of(recipe: Any) -> BlockSettings:
    """The section ``dflash``, and which positions count."""
    own = recipe.dflash
    gamma = own.gamma if own.gamma is not None else max(1.0, (own.block_size - 1) / 2)
    return BlockSettings(
        own.block_size, own.anchors, gamma, own.weighting == "dpace", own.dpace_alpha, recipe.eagle.convention
    )


def trained_depths(settings: BlockSettings) -> int:
    """K, one less than the block."""
    return settings.block_size - 1


def decay_of(settings: BlockSettings) -> float:
    """Weight base of the depths: ``exp(−1/gamma)``, or 1 where D-PACE weighs."""
    return 1.0 if settings.dpace else math.exp(-1 / settings.gamma)


def training_cost(config: DFlashConfig) -> Cost:
    """Every token is fused and makes context keys and values; every slot runs through the layers."""
    width, kv = config.hidden_size, config.num_key_value_heads * config.head_dim
    context = config.fc_input_size * width + config.num_hidden_layers * 2 * width * kv
    queries = config.num_attention_heads * config.head_dim
    layer = 2 * width * kv + 2 * width * queries + 3 * width * config.intermediate_size
    return Cost(context, config.num_hidden_layers * layer, config.draft_vocab_size * width)


def make_drafter(module: DFlashModule, embedding: nn.Module, plan: DraftPlan, recorder: Recorder | None) -> Drafter:
    """The draft loops of a generator; a round is one pass: nothing is recorded."""
    return BlockDrafter(module, embedding, plan)


ALGORITHM = Algorithm(
    name="dflash",
    title="DFlash",
    config=DFlashConfig,
    module=DFlashModule,
    head_config=head_config,
    settings=settings_of,
    depths=trained_depths,
    plan=plan_blocks,
    states=block_states,
    drafts=block_drafts,
    drafter=make_drafter,
    cost=training_cost,
    recipe="dflash",
    probe=probe,
    structure=STRUCTURE,
    layout=DFlashLayout(),
    check_recipe=check_recipe,
    complete=complete,
    check_plan=check_plan,
    decay=decay_of,
    weigh=dpace_weights,
    trained_length=lambda config: config.block_size - 1,
    shares_context=False,
)
