"""``train``: one call from a recipe to checkpoints."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modelopt_eagle.common.console import say, shown
from modelopt_eagle.common.files import write_whole
from modelopt_eagle.common.machine import environment
from modelopt_eagle.recipe import Recipe, as_recipe
from modelopt_eagle.target.load import check_device
from modelopt_eagle.target.shards import ended_peers
from modelopt_eagle.training.checkpoint import BEST
from modelopt_eagle.training.given import take
from modelopt_eagle.training.prechecks import check_files, check_paths
from modelopt_eagle.training.provenance import check_given
from modelopt_eagle.training.run import Run, assemble, claim_output, finished_state, make_accelerator
from modelopt_eagle.training.run_folder import held, sweep
from modelopt_eagle.training.trainer import OnStep, Trainer, TrainingResult, make_result


def train(
    recipe: Recipe | Mapping[str, Any] | str | Path,
    *,
    target: Any = None,
    data: Any = None,
    eval_data: Any = None,
    on_step: OnStep | None = None,
    quiet: bool = False,
) -> TrainingResult:
    """Train a head, or go on where an earlier start of the same recipe stopped.

    Args:
        recipe: from :func:`modelopt_eagle.recipe.load_recipe`, or what that takes: a file, the name of a shipped one,
            sections as a mapping.
        target: the loaded target in place of ``model.base_model``: a transformers model, a pair ``(model, tokenizer)``,
            or what ``load_target`` returned. It is frozen and put into evaluation mode.
        data: conversations in place of ``data.train_path``: rows with ``messages`` or ``conversations``, or lists of
            messages, in a list, a generator, a ``datasets.Dataset``; or the paths of files.
        eval_data: the same in place of ``data.eval_path``.
        on_step: called on the first process with the metrics of each log line (``training.log_steps``): plain values
            ``step, epoch, elapsed, loss, per_step [K], accuracy [K], learning_rate, tokens_per_second``, ... What it
            returns, if true, asks to stop as Ctrl-C does: a checkpoint is written, and the same call goes on from it.
        quiet: print nothing; the lines still go to ``logging.getLogger("modelopt_eagle")``.

    Returns:
        where the checkpoints are and what was reached. A run that is finished already returns at once.

    Raises:
        RecipeError: the output folder holds a run of another recipe, or what was given does not fit to the recipe.
        CheckpointError: the output folder holds a run on another target or on other rows.
        TrainingError: another run writes into the output folder.
        EagleError: see the rooms of target, data, features and checkpoints.
    """
    recipe, given = take(as_recipe(recipe), target, data, eval_data)
    check_paths(recipe, given)
    if finished_state(recipe) is None:
        check_device(recipe.model.device)  # validation loads the target there, even if training does not
    accelerator = make_accelerator(recipe)
    main, folder = accelerator.is_main_process, Path(recipe.training.output_dir)
    say_once = say if main else lambda line: None
    with shown(main and not quiet), held(folder) if main else contextlib.nullcontext():
        claim_output(recipe, main, accelerator.num_processes)
        if main and (line := sweep(folder)) is not None:
            say(line)
        state = finished_state(recipe)
        if state is not None:
            check_files(recipe, state)
            check_given(recipe, given, state, accelerator.device)
            say_once(f"{folder}: training is complete (step {state['step']})")
            return make_result(folder, state, (folder / BEST).resolve())
        with ended_peers():
            run = assemble(recipe, accelerator, say_once, given)
            if accelerator.is_main_process:
                record(folder, run)
            return Trainer(recipe, run, accelerator, on_step).fit()


def record(folder: Path, run: Run) -> None:
    """Keep for the page of the run what is known now: the account of its data and the machine."""
    write_whole(folder / "data.json", json.dumps(run.data_account, indent=1) + "\n")
    write_whole(folder / "environment.json", json.dumps(environment(), indent=1) + "\n")
