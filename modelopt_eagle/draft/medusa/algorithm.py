"""Medusa as the toolkit asks for it, see :class:`~modelopt_eagle.draft.algorithm.Algorithm`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from modelopt_eagle.draft.algorithm import Algorithm, Cost, Drafter, refuse_keys
from modelopt_eagle.draft.build import bare_head
from modelopt_eagle.draft.eagle3.algorithm import STRUCTURE as EAGLE_STRUCTURE
from modelopt_eagle.draft.medusa.config import MedusaConfig
from modelopt_eagle.draft.medusa.draft_loop import MedusaLoop
from modelopt_eagle.draft.medusa.layout import MedusaLayout
from modelopt_eagle.draft.medusa.module import MedusaModule
from modelopt_eagle.draft.medusa.states import MedusaSettings, head_drafts, head_states, plan_heads
from modelopt_eagle.draft.plan import DraftPlan
from modelopt_eagle.errors import DecodingError, RecipeError
from modelopt_eagle.kernels.recorder import Recorder

PROBED = 8
"""States that a probe reads."""
NOT_READ = (*EAGLE_STRUCTURE, "ttt_steps", "mix_hidden_states")
"""Keys of ``eagle`` that shape decoder layers or their steps; Medusa heads have none of these."""


def check_recipe(recipe: Any) -> None:
    """Refuse what shapes decoder layers, and longer drafts than there are heads.

    Raises:
        RecipeError: such a key, with what to set in its place.
    """
    refuse_keys(
        recipe,
        NOT_READ,
        "shapes a decoder layer or its steps, and Medusa heads have none: leave it out "
        "(medusa.heads is how many tokens are drafted)",
    )
    if recipe.export.rope_scaling is not None:
        raise RecipeError("export.rope_scaling: Medusa heads have no rotary positions: leave it out")
    if recipe.model.draft_init_vocab == "rebuild" and not recipe.medusa.shared_output:
        raise RecipeError(
            "model.draft_init_vocab: rebuild moves the rows of one output layer, and medusa.shared_output: false has "
            "one for each head: keep the vocabulary, or start new heads"
        )
    section, heads = recipe.validation, recipe.medusa.heads
    key = "tree_depth" if section.mode == "tree" else "num_steps"
    if (asked := getattr(section, key)) > heads:
        raise RecipeError(
            f"validation.{key} {asked} drafts more tokens than medusa.heads {heads}: lower it, or raise medusa.heads"
        )


def complete(config: MedusaConfig, recipe: Any, tables: Any, counts: Tensor) -> None:
    """Hold heads that are continued against the recipe's section.

    Raises:
        RecipeError: another number of heads or blocks, or another kind of output.
    """
    asked = {key: getattr(recipe.medusa, key) for key in ("heads", "blocks", "shared_output")}
    if other := [f"medusa.{key} is {value}, the heads have {getattr(config, key)}" for key, value in asked.items()
                 if value != getattr(config, key)]:  # fmt: skip
        raise RecipeError(f"{'; '.join(other)}: give the heads' values")


def check_plan(config: MedusaConfig, plan: DraftPlan) -> list[str]:
    """Refuse more tokens than there are heads.

    Returns:
        no notes.

    Raises:
        DecodingError: a plan that is deeper.
    """
    if plan.depth > config.heads:
        raise DecodingError(
            f"{plan.depth} drafted tokens were asked of {config.heads} Medusa heads: draft at most {config.heads}"
        )
    return []


def head_config(recipe: Any, target_config: Any, size: int | None, aux_layer_ids: Any, **fields: Any) -> MedusaConfig:
    """The configuration of new heads with a vocabulary of ``size`` tokens (``None``: the target's).

    Raises:
        RecipeError: captured layers other than the last one.
    """
    text = target_config.get_text_config() if hasattr(target_config, "get_text_config") else target_config
    medusa = recipe.medusa
    own = {"heads": medusa.heads, "blocks": medusa.blocks, "shared_output": medusa.shared_output}
    layers = last_layer(text.num_hidden_layers)
    if aux_layer_ids is not None and tuple(aux_layer_ids) != layers:
        raise RecipeError(
            f"eagle.aux_layer_ids is {list(aux_layer_ids)}, and Medusa heads read the last layer, {layers[0]}: leave "
            "it at null"
        )
    return MedusaConfig.from_target(target_config, size, layers, **{**own, **fields})


def last_layer(num_layers: int) -> tuple[int, ...]:
    """The target's last layer, whose normed output is the final state."""
    return (num_layers - 1,)


def settings_of(recipe: Any) -> MedusaSettings:
    """The number of heads, and which positions count."""
    return MedusaSettings(recipe.medusa.heads, recipe.eagle.convention)


def trained_depths(settings: MedusaSettings) -> int:
    """K."""
    return settings.heads


@torch.no_grad()
def start_from_target(module: MedusaModule, target: Any) -> None:
    """Begin as the target's own output layer over its own state: blocks that add nothing, its rows of the head."""
    for parameter in module.blocks.parameters():
        parameter.zero_()
    rows = target.head.rows(module.target_ids) * target.head.scale
    for weight in {id(weight): weight for weight in module.output_weights(module.config.heads)}.values():
        weight.copy_(rows)


def training_cost(config: MedusaConfig) -> Cost:
    """Each prediction runs through one head."""
    block, output = config.blocks * config.hidden_size**2, config.draft_vocab_size * config.hidden_size
    outputs = 1 if config.shared_output else config.heads
    return Cost(block, block, output, parameters=config.heads * block + outputs * output)


def make_drafter(module: MedusaModule, embedding: nn.Module, plan: DraftPlan, recorder: Recorder | None) -> Drafter:
    """The draft loops of a generator; a round is one small pass, so none is recorded."""
    return MedusaLoop(module, plan)


@torch.no_grad()
def probe(module: MedusaModule, seed: int = 0) -> Tensor:
    """Logits ``[8, K, Vd]`` float32 of random states, on the CPU."""
    tensors = {name: tensor.detach().cpu().clone() for name, tensor in module.state_dict().items()}
    copy = bare_head(MedusaModule, module.config, module.vocab, tensors).float().eval()
    states = torch.randn(PROBED, module.config.hidden_size, generator=torch.Generator().manual_seed(seed))
    return copy.logits(states, module.config.heads)


ALGORITHM = Algorithm(
    name="medusa",
    title="Medusa",
    config=MedusaConfig,
    module=MedusaModule,
    head_config=head_config,
    settings=settings_of,
    depths=trained_depths,
    plan=plan_heads,
    states=head_states,
    drafts=head_drafts,
    drafter=make_drafter,
    cost=training_cost,
    recipe="medusa",
    probe=probe,
    from_target=start_from_target,
    default_layers=last_layer,
    layout=MedusaLayout(),
    check_recipe=check_recipe,
    complete=complete,
    check_plan=check_plan,
    trained_length=lambda config: config.heads,
    final_state=True,
    shares_context=False,
)
