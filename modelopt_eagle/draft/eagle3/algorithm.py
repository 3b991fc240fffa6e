"""EAGLE-3 as the toolkit asks for it, see :class:`~modelopt_eagle.draft.algorithm.Algorithm`."""

from __future__ import annotations

from typing import Any

from torch import nn

from modelopt_eagle.draft.algorithm import Algorithm, Cost, Drafter, cost_of_every_weight
from modelopt_eagle.draft.config import DraftConfig
from modelopt_eagle.draft.eagle3.draft_loop import EagerDrafter
from modelopt_eagle.draft.eagle3.graphs import DraftGraphs
from modelopt_eagle.draft.eagle3.initialise import start_from_target
from modelopt_eagle.draft.eagle3.probe import probe
from modelopt_eagle.draft.eagle3.rollout import plan_rollout, rollout_drafts, rollout_states
from modelopt_eagle.draft.module import EagleModule
from modelopt_eagle.draft.plan import DraftPlan
from modelopt_eagle.kernels.recorder import Recorder


def make_drafter(module: EagleModule, embedding: nn.Module, plan: DraftPlan, recorder: Recorder | None) -> Drafter:
    """The draft loops of a generator: call by call, or with the later steps recorded and replayed."""
    if recorder is None:
        return EagerDrafter(module, embedding, plan)
    return DraftGraphs(module, embedding, plan, recorder)


def training_cost(config: DraftConfig) -> Cost:
    """Every token runs through the head at the first step, and each counted prediction of a later step once more."""
    return cost_of_every_weight(EagleModule, config)


STRUCTURE = {
    "decoder_type": "decoder_type",
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
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "attention_bias": "attention_bias",
    "norm_before_residual": "norm_before_residual",
    "norm_before_fc": "norm_before_fc",
    "fc_norm": "fc_norm",
    "norm_output": "norm_output",
    "qk_norm": "qk_norm",
    "sliding_window": "sliding_window",
}
"""Recipe key in ``eagle`` → field of :class:`DraftConfig`."""


def head_config(recipe: Any, target_config: Any, size: int | None, aux_layer_ids: Any, **fields: Any) -> DraftConfig:
    """The configuration of a new head with a vocabulary of ``size`` tokens (``None``: the target's)."""
    own = {name: getattr(recipe.eagle, key) for key, name in STRUCTURE.items()}
    return DraftConfig.from_target(target_config, size, aux_layer_ids, **{**own, **fields})


def settings_of(recipe: Any) -> Any:
    """The section ``eagle``."""
    return recipe.eagle


def trained_depths(eagle: Any) -> int:
    """K, the rollout steps."""
    return int(eagle.ttt_steps)


ALGORITHM = Algorithm(
    name="eagle3",
    title="EAGLE-3",
    config=DraftConfig,
    module=EagleModule,
    head_config=head_config,
    settings=settings_of,
    depths=trained_depths,
    plan=plan_rollout,
    states=rollout_states,
    drafts=rollout_drafts,
    drafter=make_drafter,
    cost=training_cost,
    recipe="eagle3",
    probe=probe,
    structure=STRUCTURE,
    from_target=start_from_target,
    draws=True,
)
