"""Train a draft head from a recipe: checkpoints only, no validation and no export."""

from __future__ import annotations

from modelopt_eagle.recipe import train_recipe

INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """Run the command; its flags are those of train_eagle3_and_export.sh. Returns 130 if it was interrupted."""
    recipe = train_recipe(argv)
    from modelopt_eagle.training import train

    result = train(recipe)
    print(f"checkpoint: {result.best_checkpoint}")
    if result.acceptance_length is not None:
        print(f"acceptance length on held-out rows: {result.acceptance_length:.3f}")
    return 0 if result.finished or recipe.training.dry_run else INTERRUPTED
