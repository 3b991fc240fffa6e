"""Which rows each process takes in each step of an epoch: so many rows a batch, or so many tokens."""

import bisect
import heapq
import random
from collections.abc import Collection, Sequence

from modelopt_eagle.errors import DataError

OPEN_BATCHES = 64
"""Batches of tokens that are filled at a time: more lie closer together, and mix rows from further apart."""

ROOM = 0.97
"""Share of ``max_tokens`` that is filled where several processes are to be levelled: full batches cannot be."""


def plan_batches(
    lengths: Sequence[int],
    *,
    batch_size: int,
    seed: int,
    epoch: int,
    rank: int = 0,
    world_size: int = 1,
    shuffle: bool = True,
    max_tokens: int | None = None,
    window: int = 1,
    supervised: Sequence[int] | None = None,
    without: Collection[int] = (),
) -> list[list[int]]:
    """Row numbers of each batch of one process in one epoch.

    A pure function of its arguments; every row comes exactly once in an epoch. With ``batch_size`` the order depends on
    ``seed``, ``epoch`` and the number of rows only; the batches of an epoch are the same for every ``world_size``,
    dealt to the processes in turn. With ``max_tokens`` a batch is filled with rows until no more fit, and the rows of
    an optimiser step are dealt so that its batches, over all processes, have about the same to do; the number of
    batches then differs a little from epoch to epoch.

    Args:
        lengths: tokens of each row; its size is the number of rows.
        batch_size: rows of a batch; the last one may hold fewer. Not read with ``max_tokens``.
        rank, world_size: the process, and how many there are.
        shuffle: False keeps the order of the file in every epoch.
        max_tokens: tokens that a batch holds at most; ``None``: ``batch_size`` counts.
        window: batches of a process in an optimiser step, within which ``max_tokens`` levels them.
        supervised: tokens of each row that are learned, which cost more than the others; ``None``: all alike.
        without: row numbers that this epoch has had already; the others keep their order.

    Returns:
        as many batches on every rank; an empty one where there is nothing for this rank in that step.

    Raises:
        DataError: no rows, a number out of range, or a row longer than ``max_tokens``.
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
    if without:
        order = [row for row in order if row not in without]
    if max_tokens is not None:
        if (longest := max(lengths)) > max_tokens:
            raise DataError(f"a row of {longest} tokens does not fit into a batch of max_tokens {max_tokens}")
        fill = max_tokens if world_size == 1 else int(ROOM * max_tokens)
        filled = fill_batches(order, lengths, fill, OPEN_BATCHES if shuffle else 1)
        work = lengths if supervised is None else [a + b for a, b in zip(lengths, supervised, strict=True)]
        batches = _levelled(filled, lengths, work, max_tokens, world_size, window)
    else:
        batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
        batches += [[] for _ in range(-len(batches) % world_size)]
    return batches[rank::world_size]


def fill_batches(order: Sequence[int], lengths: Sequence[int], tokens: int, most_open: int) -> list[list[int]]:
    """Batches of at most so many tokens: each row goes where it leaves the least room, a longer one alone.

    Args:
        order: row numbers.
        lengths: tokens of each row.
        tokens: of a batch.
        most_open: batches that may still take rows; beyond, the fullest is closed. 1 keeps the order of the rows.

    Returns:
        the batches, in the order in which they were closed.
    """
    closed: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (tokens left, number), ascending
    filling: dict[int, list[int]] = {}
    for number, row in enumerate(order):
        place = bisect.bisect_left(rooms, (lengths[row], -1))
        if place == len(rooms):
            if len(rooms) == most_open:
                closed.append(filling.pop(rooms.pop(0)[1]))
            filling[number] = [row]
            bisect.insort(rooms, (tokens - lengths[row], number))
        else:
            room, batch = rooms.pop(place)
            filling[batch].append(row)
            bisect.insort(rooms, (room - lengths[row], batch))
    return closed + [filling[batch] for _, batch in rooms]


def _levelled(
    filled: list[list[int]],
    lengths: Sequence[int],
    work: Sequence[int],
    max_tokens: int,
    world_size: int,
    window: int,
) -> list[list[int]]:
    """The same rows, levelled within each optimiser step; batch ``i`` is for process ``i % world_size``."""
    if world_size == 1:
        return filled
    result: list[list[int]] = []
    for start in range(0, len(filled), world_size * window):
        group = filled[start : start + world_size * window]
        group += [[] for _ in range(-len(group) % world_size)]
        group = _dealt([row for batch in group for row in batch], len(group), lengths, work, max_tokens) or group
        group.sort(key=lambda batch: -sum(work[row] for row in batch))
        for turn in range(0, len(group), world_size):  # there and back, so that the sums of the processes are level too
            part = group[turn : turn + world_size]
            result += part if turn // world_size % 2 == 0 else part[::-1]
    return result


def _dealt(
    rows: list[int], count: int, lengths: Sequence[int], work: Sequence[int], max_tokens: int
) -> list[list[int]] | None:
    """Rows dealt to ``count`` batches, those with most work first, each to the batch that has least.

    Returns:
        the batches; ``None`` if a row found no room, which happens where the batches are nearly full.
    """
    batches: list[list[int]] = [[] for _ in range(count)]
    tokens = [0] * count
    heap = [(0, number) for number in range(count)]
    for row in sorted(rows, key=lambda row: -work[row]):  # stable: rows alike stay in their drawn order
        passed = []
        while heap and tokens[heap[0][1]] + lengths[row] > max_tokens:
            passed.append(heapq.heappop(heap))
        if not heap:
            return None
        load, number = heapq.heappop(heap)
        batches[number].append(row)
        tokens[number] += lengths[row]
        for entry in (*passed, (load + work[row], number)):
            heapq.heappush(heap, entry)
    return batches
