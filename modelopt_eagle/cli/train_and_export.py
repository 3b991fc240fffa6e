"""Train a head, measure its acceptance length, export it: the command behind `train_eagle3_and_export.sh`.

Each stage that is complete is passed over, so the same command goes on after Ctrl-C at any moment.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

from modelopt_eagle.cli._options import begin, metrics_printer
from modelopt_eagle.recipe.command_line import train_arguments

if TYPE_CHECKING:
    from modelopt_eagle.pipeline import RunResult

INTERRUPTED, BELOW_BOUND = 130, 1


def main(argv: list[str] | None = None) -> int:
    """Run the command.

    Returns:
        0; 1 when the acceptance length is below ``validation.ar_lower_bound``; 130 when training was interrupted.

    Raises:
        EagleError: bad input (exit code 2 through the dispatcher).
    """
    recipe, arguments = train_arguments(argv)
    begin(recipe, arguments)
    from modelopt_eagle.pipeline import run

    result = run(recipe, on_step=metrics_printer(arguments), quiet=arguments.quiet)
    if not (result.training.finished or result.recipe.training.dry_run):
        return INTERRUPTED
    if int(os.environ.get("RANK", "0")) != 0:
        return 0
    print(json.dumps({"result": facts(result)}) if arguments.json else "\n" + summary(result))
    if result.below_bound and not arguments.json:
        bound = result.recipe.validation.ar_lower_bound
        print(f"acceptance length {result.acceptance_length:.3f} is below validation.ar_lower_bound {bound}")
    return BELOW_BOUND if result.below_bound else 0


def facts(whole: RunResult) -> dict[str, Any]:
    """The result for machines: where things lie, and ``acceptance.json``."""
    training = whole.training
    return {
        "steps": training.steps,
        "seconds": training.seconds,
        "finished": training.finished,
        "checkpoint": str(training.best_checkpoint),
        "acceptance": whole.acceptance,
        "export": None if whole.export_path is None else str(whole.export_path),
    }


def summary(whole: RunResult) -> str:
    """The table at the end: what was trained on, what was reached, where things lie, how to serve it."""
    recipe, result, measured = whole.recipe, whole.training, whole.acceptance
    rows = [("trained on", result.header[0].removeprefix("data: ") if result.header else "not recorded")]
    rows.append(("", f"{result.steps} steps in {result.seconds / 60:.1f} min"))
    if measured is not None:
        low, high = measured["ci95"]
        prompts = f"{measured['prompts']} prompts, {recipe.validation.num_steps} drafted tokens"
        if recipe.validation.mode == "tree":
            prompts = f"{measured['prompts']} prompts, tree of {recipe.validation.tree_nodes} nodes"
        rows.append(("acceptance length", f"{measured['acceptance_length']:.3f} [{low:.3f}, {high:.3f}] ({prompts})"))
        rows.append(("per position", " ".join(f"{share:.3f}" for share in measured["per_position"])))
        speedup = measured["speedup"]
        rows.append(("speed-up", "not measured" if speedup is None else f"{speedup:.2f} over plain decoding, same run"))
    elif whole.unmeasured is not None:
        rows.append(("acceptance length", f"not measured ({whole.unmeasured})"))
    rows.append(("checkpoint", str(result.best_checkpoint)))
    if measured is not None:
        rows.append(("report", str(result.output_dir / "report" / "acceptance.json")))
    rows.append(("export", str(recipe.export_path)))
    width = max(len(name) for name, _ in rows) + 2
    lines = [f"{name:<{width}}{value}" for name, value in rows]
    return "\n".join([*lines, "", "serve it:", *(f"  {line}" for line in serving_lines(whole))])


def serving_lines(whole: RunResult) -> list[str]:
    """The commands of the model card with this run's target and folder in place."""
    from modelopt_eagle.common.text import argument
    from modelopt_eagle.export.card import serve_lines
    from modelopt_eagle.export.load import load_draft
    from modelopt_eagle.target.load import resolve

    path = whole.recipe.export_path
    config = load_draft(path).config
    data = json.loads((path / "config.json").read_text(encoding="utf-8"))
    place, name = str(resolve(whole.recipe.model.base_model)), config.target_name or "TARGET"
    lines = [line for line in serve_lines(config, data) if line and not line.startswith("```")]
    return [
        f"{line} ".replace(f" {argument(name)} ", f" {argument(place)} ")
        .replace("THIS_FOLDER", argument(str(path.resolve())))
        .removesuffix(" ")
        for line in lines
    ]


if __name__ == "__main__":
    sys.exit(main())
