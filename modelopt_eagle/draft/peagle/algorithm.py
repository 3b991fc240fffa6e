"""P-EAGLE as the toolkit asks for it, see :class:`~modelopt_eagle.draft.algorithm.Algorithm`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from modelopt_eagle.draft.algorithm import Algorithm, Cost, Drafter, cost_of_every_weight, refuse_keys
from modelopt_eagle.draft.eagle3.algorithm import STRUCTURE as EAGLE_STRUCTURE
from modelopt_eagle.draft.eagle3.initialise import start_from_target
from modelopt_eagle.draft.mask_token import settle_mask_token
from modelopt_eagle.draft.peagle.config import PEagleConfig
from modelopt_eagle.draft.peagle.draft_loop import ParallelDrafter
from modelopt_eagle.draft.peagle.module import PEagleModule
from modelopt_eagle.draft.peagle.plan import ParallelSettings, plan_parallel
from modelopt_eagle.draft.peagle.probe import probe
from modelopt_eagle.draft.peagle.rows import parallel_drafts, parallel_states
from modelopt_eagle.draft.plan import DraftPlan
from modelopt_eagle.errors import RecipeError
from modelopt_eagle.kernels.recorder import Recorder

MASK_KEY = "peagle.mask_token_id"
STRUCTURE = {key: name for key, name in EAGLE_STRUCTURE.items() if key != "norm_output"}
"""Recipe key in ``eagle`` → field of :class:`PEagleConfig`."""
OF_A_NEXT_STEP = ("ttt_steps", "mix_hidden_states", "norm_output")
"""Keys of ``eagle`` that shape the steps of a rollout; a P-EAGLE head has none."""


def check_recipe(recipe: Any) -> None:
    """Refuse what shapes the steps of a rollout.

    Raises:
        RecipeError: such a key, with what to set in its place; or a depth beyond the window.
    """
    refuse_keys(
        recipe,
        OF_A_NEXT_STEP,
        "shapes the steps of a rollout, and algorithm peagle drafts in one pass: leave it out "
        "(peagle.depth is how many tokens are trained)",
    )
    window = recipe.eagle.sliding_window
    if window is not None and recipe.peagle.depth > window:
        raise RecipeError(
            f"peagle.depth {recipe.peagle.depth} does not fit into eagle.sliding_window {window}: a mask sees those "
            "before it; lower the one or raise the other"
        )


def head_config(recipe: Any, target_config: Any, size: int | None, aux_layer_ids: Any, **fields: Any) -> PEagleConfig:
    """The configuration of a new head with a vocabulary of ``size`` tokens (``None``: the target's)."""
    own = {name: getattr(recipe.eagle, key) for key, name in STRUCTURE.items()}
    more = {"mask_token_id": recipe.peagle.mask_token_id, "trained_depth": recipe.peagle.depth}
    return PEagleConfig.from_target(target_config, size, aux_layer_ids, **{**own, **more, **fields})


def complete(config: PEagleConfig, recipe: Any, tables: Any, counts: Tensor) -> None:
    """Choose the mask token of a new head, and hold a given one against the text.

    Args:
        counts: ``[V]`` how often each token is to be learned.

    Raises:
        RecipeError: a mask token that the text uses, or another one than a continued head has.
    """
    settle_mask_token(config, recipe.peagle.mask_token_id, tables, counts, MASK_KEY)
    config.trained_depth = recipe.peagle.depth


def check_plan(config: PEagleConfig, plan: DraftPlan) -> list[str]:
    """A line where more tokens are drafted than were trained: a P-EAGLE head can, and is less sure of them."""
    trained = config.trained_depth
    if trained is None or plan.depth <= trained:
        return []
    return [f"drafts of {plan.depth} tokens by a head that was trained for {trained}: the last ones are extrapolated"]


def settings_of(recipe: Any) -> ParallelSettings:
    """The section ``peagle``, and which positions count."""
    peagle = recipe.peagle
    return ParallelSettings(peagle.depth, peagle.depth_keep, peagle.depth_floor, recipe.eagle.convention)


def trained_depths(settings: ParallelSettings) -> int:
    """K."""
    return settings.depth


def training_cost(config: PEagleConfig) -> Cost:
    """Every token runs through the head, and each mask row once more."""
    return cost_of_every_weight(PEagleModule, config)


def make_drafter(module: PEagleModule, embedding: nn.Module, plan: DraftPlan, recorder: Recorder | None) -> Drafter:
    """The draft loops of a generator; a round is one pass whose shape follows what was accepted: none is recorded."""
    return ParallelDrafter(module, embedding, plan)


ALGORITHM = Algorithm(
    name="peagle",
    title="P-EAGLE",
    config=PEagleConfig,
    module=PEagleModule,
    head_config=head_config,
    settings=settings_of,
    depths=trained_depths,
    plan=plan_parallel,
    states=parallel_states,
    drafts=parallel_drafts,
    drafter=make_drafter,
    cost=training_cost,
    recipe="peagle",
    probe=probe,
    structure=STRUCTURE,
    trained_length=lambda config: config.trained_depth,
    from_target=start_from_target,
    check_recipe=check_recipe,
    complete=complete,
    check_plan=check_plan,
    shares=ParallelSettings.shares,
    file_keys=("mask_token_id",),
)
