"""Which rows each process takes in each step of an epoch."""

import random
from collections.abc import Sequence

from modelopt_eagle.errors import DataError


def plan_batches(
    lengths: Sequence[int],
    *,
    batch_size: int,
    seed: int,
    epoch: int,
    rank: int = 0,
    world_size: int = 1,
    shuffle: bool = True,
) -> list[list[int]]:
    """Row numbers of each batch of one process in one epoch.

    The order depends on ``seed``, ``epoch`` and the number of rows only; the batches of an epoch are the same for every
    ``world_size``, dealt to the processes in turn. Every row comes exactly once in an epoch.

    Args:
        lengths: tokens of each row; its size is the number of rows.
        batch_size: rows of a batch; the last one may hold fewer.
        rank, world_size: the process, and how many there are.
        shuffle: False keeps the order of the file in every epoch.

    Returns:
        as many batches on every rank; an empty one where there is nothing for this rank in that step.

    Raises:
        DataError: no rows, or a number out of range.
    """
    if not len(lengths):
        raise DataError("no rows to plan batches of")
    if batch_size < 1:
        raise DataError(f"batch_size must be at least 1, found {batch_size}")
    if not 0 <= rank < world_size:
        raise DataError(f"rank must lie in [0, {world_size}), found {rank}")
    order = list(range(len(lengths)))
    if shuffle:
        random.Random(f"{seed}/{epoch}").shuffle(order)
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    batches += [[] for _ in range(-len(batches) % world_size)]
    return batches[rank::world_size]
