"""Train a draft head from a recipe: checkpoints only, no validation and no export."""

from __future__ import annotations

import json
import os

from modelopt_eagle.cli._options import begin, metrics_printer
from modelopt_eagle.recipe.command_line import TRAIN, train_arguments

INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """Run the command; its flags are those of train-and-export. Returns 130 if it was interrupted."""
    recipe, arguments = train_arguments(argv, TRAIN)
    begin(recipe, arguments)
    from modelopt_eagle.common.console import warn
    from modelopt_eagle.decoding.verifiable import refusal
    from modelopt_eagle.training import train

    if (reason := refusal(recipe)) is not None:
        warn(f"the head of this target could not be measured or decoded with as validation.* says: {reason}")
    result = train(recipe, on_step=metrics_printer(arguments), quiet=arguments.quiet)
    if int(os.environ.get("RANK", "0")) != 0:
        pass  # of several processes the first one says it
    elif arguments.json:
        facts = {"checkpoint": str(result.best_checkpoint), "steps": result.steps, "finished": result.finished}
        print(json.dumps({"result": {**facts, "acceptance_length": result.acceptance_length}}))
    else:
        print(f"checkpoint: {result.best_checkpoint}")
        if result.acceptance_length is not None:
            print(f"acceptance length on held-out rows: {result.acceptance_length:.3f}")
    return 0 if result.finished or recipe.training.dry_run else INTERRUPTED
