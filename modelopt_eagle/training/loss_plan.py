"""What the loss works through, cut into chunks on the CPU, where the predictions are known: no device is asked."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from modelopt_eagle.draft.documents import upload
from modelopt_eagle.draft.predictions import Predictions
from modelopt_eagle.kernels.distill_rows import MAX_ROWS
from modelopt_eagle.training.teacher import Teacher

CHUNK = 512
"""Teacher positions a chunk of the plain loss: on a CPU its logits should stay near the caches."""

CHUNK_BYTES = 512 * 2**20
"""Logits of head and target in a chunk of the fused loss: enough for large products, bounded for large vocabularies."""


@dataclass(frozen=True)
class LossKind:
    """Which term a prediction adds.

    Attributes:
        lk: ``λ·KL + (1 − λ)·TV`` with ``λ = exp(−eta · mean acceptance of the depth)``; otherwise KL.
        eta: see above.
        subtract_entropy: report KL rather than cross-entropy (the gradient is the same).
    """

    lk: bool = False
    eta: float = 3.0
    subtract_entropy: bool = False


@dataclass(frozen=True)
class LossWork:
    """The predictions of a batch and all that says what they have to meet.

    Attributes:
        predictions: n of them.
        weights: ``[K]`` factor of each depth: decay over normaliser.
        to_draft: ``[V]`` int64 draft id of each target id, -1 outside.
        teacher: the target's side.
        kind: of the term.
        heads: of each depth, which output matrix.
    """

    predictions: Predictions
    weights: Tensor
    to_draft: Tensor
    teacher: Teacher
    kind: LossKind
    heads: tuple[int, ...]

    def chunks(self) -> Iterator[tuple[Tensor, list[tuple[int, Tensor, Tensor]]]]:
        """Yield ``(teacher positions [c], [(depth, predictions [m], their place in the chunk [m]), ...])``."""
        predictions, device = self.predictions.on_host(), self.predictions.anchor.device
        order = torch.argsort(predictions.teacher, stable=True)  # [n]
        depth, position = predictions.depth[order], predictions.teacher[order]
        unique, place = torch.unique_consecutive(position, return_inverse=True)
        bounds = torch.searchsorted(place, torch.arange(0, len(unique) + CHUNK, CHUNK)).tolist()
        for number, (low, high) in enumerate(itertools.pairwise(bounds)):
            if low == high:
                continue
            here, first = depth[low:high], number * CHUNK
            pieces = []
            for k in range(predictions.depths):
                chosen = (here == k).nonzero().squeeze(1) + low
                pieces.append((k, upload(order[chosen], device), upload(place[chosen] - first, device)))
            yield upload(unique[first : first + CHUNK], device), pieces


@dataclass(frozen=True)
class RowChunk:
    """Rows of logits that are made together; slices of the lists of a :class:`RowPlan`.

    Attributes:
        rows: which rows.
        positions: which teacher positions they meet.
        groups: their groups.
        heads: ``(output matrix, rows within the chunk)`` of each matrix that has any.
    """

    rows: slice
    positions: slice
    groups: slice
    heads: tuple[tuple[int, slice], ...]


@dataclass(frozen=True)
class RowPlan:
    """All predictions as rows of logits: those of a chunk behind each other, in it by matrix and by teacher position.

    Attributes:
        order: ``[n]`` int64 which prediction each row is.
        depth: ``[n]`` int64 its depth.
        place: ``[n]`` int64 its teacher position's place in the chunk.
        positions: ``[u]`` int64 teacher positions, ascending.
        groups: ``[g, 2]`` int64 first row in the chunk, and rows, of those that meet one position with one matrix.
        most: rows of the largest group.
        chunks: see :class:`RowChunk`.
    """

    order: Tensor
    depth: Tensor
    place: Tensor
    positions: Tensor
    groups: Tensor
    most: int
    chunks: list[RowChunk]

    @classmethod
    def make(cls, work: LossWork, most: int) -> RowPlan:
        """The plan, its lists on the device of the predictions, sent there in two transfers.

        Args:
            most: rows and positions of a chunk together, at least those of one position.
        """
        known, device = work.predictions.on_host(), work.predictions.anchor.device
        head = torch.tensor(work.heads)[known.depth]  # [n]
        positions, place, counts = known.teacher.unique(return_inverse=True, return_counts=True)  # [u] [n] [u]
        cuts = chunk_bounds(counts, most)  # places in ``positions``
        chunk = torch.bucketize(place, torch.tensor(cuts[1:], dtype=torch.int64), right=True)  # [n]
        heads = max(work.heads) + 1
        key = (chunk * heads + head) * len(positions) + place  # [n]
        order = key.argsort(stable=True)  # [n]
        key, chunk, place, head = key[order], chunk[order], place[order], head[order]
        run = torch.unique_consecutive(key, return_inverse=True)[1]  # [n] which rows share matrix and position
        begins = torch.searchsorted(run, run)  # [n] first row of the run
        rank = torch.arange(len(order)) - begins  # [n]
        firsts = (rank % MAX_ROWS == 0).nonzero().squeeze(1)  # [g] first rows of the groups
        sizes = torch.diff(firsts, append=torch.tensor([len(order)]))  # [g]
        rows = torch.searchsorted(chunk, torch.arange(len(cuts))).tolist()  # where the rows of each chunk begin
        begin = torch.tensor(rows)[chunk]  # [n]
        inside = place - torch.tensor(cuts)[chunk]  # [n]
        of_group = torch.searchsorted(firsts, torch.tensor(rows)).tolist()
        chunks = []
        for number in range(len(cuts) - 1):
            low, high = rows[number], rows[number + 1]
            ends = torch.searchsorted(head[low:high].contiguous(), torch.arange(heads + 1)).tolist()
            used = tuple((h, slice(*ends[h : h + 2])) for h in range(heads) if ends[h] < ends[h + 1])
            chunks.append(
                RowChunk(
                    slice(low, high), slice(*cuts[number : number + 2]), slice(*of_group[number : number + 2]), used
                )
            )
        lists = upload(torch.stack((order, known.depth[order], inside)), device)  # [3,n]
        shorter = upload(torch.cat((positions, torch.stack((firsts - begin[firsts], sizes), 1).flatten())), device)
        groups = shorter[len(positions) :].view(-1, 2)
        largest = int(sizes.max()) if len(sizes) else 1
        return cls(lists[0], lists[1], lists[2], shorter[: len(positions)], groups, largest, chunks)


def chunk_bounds(counts: Tensor, most: int) -> list[int]:
    """Where chunks of teacher positions begin, and the end: each has as many as keep it within ``most``, one at least.

    Args:
        counts: ``[u]`` int64 rows that meet each position.
        most: rows and positions of a chunk together.
    """
    filled = torch.cat((counts.new_zeros(1), (counts + 1).cumsum(0)))  # [u+1]
    cuts = [0]
    while cuts[-1] < len(counts):
        fits = int(torch.searchsorted(filled, filled[cuts[-1]] + most, right=True)) - 1
        cuts.append(max(fits, cuts[-1] + 1))
    return cuts
