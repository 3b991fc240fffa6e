"""``train``: one call from a recipe to checkpoints."""

from __future__ import annotations

from pathlib import Path

from modelopt_eagle.common.console import say, shown
from modelopt_eagle.recipe import Recipe
from modelopt_eagle.training.checkpoint import BEST
from modelopt_eagle.training.run import assemble, claim_output, finished_state, make_accelerator
from modelopt_eagle.training.trainer import Trainer, TrainingResult, make_result


def train(recipe: Recipe) -> TrainingResult:
    """Train a head, or go on where an earlier start of the same recipe stopped.

    Args:
        recipe: from :func:`modelopt_eagle.recipe.load_recipe`.

    Returns:
        where the checkpoints are and what was reached. A run that is finished already returns at once.

    Raises:
        RecipeError: the output folder holds a run of another recipe.
        EagleError: see the rooms of target, data, features and checkpoints.
    """
    accelerator = make_accelerator(recipe)
    claim_output(recipe, accelerator.is_main_process)
    folder = Path(recipe.training.output_dir)
    say_once = say if accelerator.is_main_process else lambda line: None
    with shown(accelerator.is_main_process):
        state = finished_state(recipe)
        if state is not None:
            say_once(f"{folder}: training is complete (step {state['step']})")
            return make_result(folder, state, (folder / BEST).resolve())
        return Trainer(recipe, assemble(recipe, accelerator, say_once), accelerator).fit()
