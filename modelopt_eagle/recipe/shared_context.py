"""What can be trained with each batch shared over several processes."""

from __future__ import annotations

from modelopt_eagle.recipe.bounds import need


def check_shared(size: int, eagle, target_lora) -> None:
    """Refuse options that look at more of a batch than one process holds.

    Args:
        size: ``training.context_parallel``.
        eagle, target_lora: sections of the recipe.

    Raises:
        ValueError: what does not go together.
    """
    where = f"training.context_parallel: {size}"
    need(
        target_lora.rank == 0,
        f"{where} shares what the head computes, and target_lora trains the target, which runs whole in each process: "
        "set one of them to its default",
    )
    need(
        eagle.loss == "kl",
        f"{where}: eagle.loss: lk blends by the mean acceptance of a whole micro-batch, which no process holds: set "
        "loss: kl",
    )
    need(
        eagle.convention == "served" or not eagle.counts_by_target_choice,
        f"{where}: convention: {eagle.convention} counts by target choices that features do not come with, from final "
        "states which no process holds whole: set convention: served",
    )
