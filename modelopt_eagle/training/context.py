"""Context parallelism: one packed batch shared over the processes of a group, by positions.

What an anchor ``i`` of the rollout needs of others are the step-0 keys and values of earlier tokens, and nothing else:
the later steps add its own column, its teacher is read at ``i + 1 + k``. So each process fuses the features, runs the
layer and takes the loss for its own tokens, and the step-0 keys and values alone are gathered, with a gradient that is
summed and scattered back. Everything of the batch that is as wide as a hidden state is cut; token ids and masks stay
whole.

Tokens are dealt in zigzag: of 2n equal pieces process r takes number r and number 2n−1−r, so that each has as many
early queries, which see few keys, as late ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from modelopt_eagle.draft.documents import WholeAxis, upload
from modelopt_eagle.draft.predictions import Predictions, TokenAxis
from modelopt_eagle.errors import FeatureError, RecipeError
from modelopt_eagle.features import FeatureBatch
from modelopt_eagle.training.batch import StepBatch


@dataclass(frozen=True)
class ContextGroup:
    """The processes that share a batch.

    Attributes:
        rank, size: place of this process in the group, and processes in it.
        group: of ``torch.distributed``.
        number, groups: which group this is, and how many there are: the share of the data.
    """

    rank: int
    size: int
    group: dist.ProcessGroup
    number: int
    groups: int

    @classmethod
    def make(cls, size: int, rank: int, world_size: int) -> ContextGroup:
        """Groups of neighbouring ranks; every process calls this."""
        groups = [dist.new_group(range(first, first + size)) for first in range(0, world_size, size)]
        number = rank // size
        return cls(rank % size, size, groups[number], number, len(groups))


def check_processes(size: int, world_size: int) -> None:
    """Refuse processes that cannot be dealt into groups.

    Raises:
        RecipeError: their number is no multiple of ``training.context_parallel``.
    """
    if world_size % size:
        raise RecipeError(
            f"training.context_parallel: {size} shares each batch over {size} processes, and there "
            f"{'is one process' if world_size == 1 else f'are {world_size}'}: start a multiple of {size} with "
            f"accelerate launch --num_processes {size} (on CPUs: torchrun --nproc_per_node {size}), or set "
            "training.context_parallel: 1"
        )


def make_group(recipe, accelerator) -> ContextGroup:
    """The group of this process, as ``training.context_parallel`` says."""
    return ContextGroup.make(recipe.training.context_parallel, accelerator.process_index, accelerator.num_processes)


class SharedAxis:
    """The tokens of one batch that this process computes, and how those of all come together.

    Args:
        group: see :class:`ContextGroup`.
        length: N, flat tokens of the batch.
        device: of the index tensors.

    Attributes:
        tokens: ``[m]`` int64 flat tokens of this process, ascending.
        host_tokens: the same on the CPU.
    """

    def __init__(self, group: ContextGroup, length: int, device):
        self.group, self.length = group, length
        shares = [zigzag(length, group.size, rank) for rank in range(group.size)]
        self.width = max(map(len, shares))  # what a process sends, padded
        self.host_tokens = shares[group.rank]
        self.tokens = upload(self.host_tokens, device)
        self._index = position_of(self.tokens, length)
        place = torch.empty(length, dtype=torch.int64)
        for rank, share in enumerate(shares):
            place[share] = rank * self.width + torch.arange(len(share))
        self.place = upload(place, device)  # [N] where each token lies among the gathered rows

    def local(self, rows: Tensor) -> Tensor:
        """Where flat rows of this process lie among ``tokens``."""
        return self._index[rows]

    def gather(self, values: Tensor) -> Tensor:
        """``[m, ...]`` of ``tokens`` to ``[N, ...]`` of all; its gradient is summed over the group."""
        return _Gather.apply(values, self)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values: Tensor, axis: SharedAxis) -> Tensor:
        ctx.axis, ctx.count = axis, len(values)
        sent = values.new_zeros(axis.width, *values.shape[1:])  # [w,...]
        sent[: len(values)] = values
        received = values.new_empty(axis.group.size * axis.width, *values.shape[1:])
        dist.all_gather_into_tensor(received, sent, group=axis.group.group)
        return received[axis.place]  # [N,...]

    @staticmethod
    def backward(ctx, gradient: Tensor):
        axis = ctx.axis
        sent = gradient.new_zeros(axis.group.size * axis.width, *gradient.shape[1:])
        sent[axis.place] = gradient
        received = gradient.new_empty(axis.width, *gradient.shape[1:])
        dist.reduce_scatter_tensor(received, sent, group=axis.group.group)
        return received[: ctx.count], None


def zigzag(length: int, size: int, rank: int) -> Tensor:
    """``[m]`` int64 ascending: the flat tokens of one process of ``size``."""
    bounds = [piece * length // (2 * size) for piece in range(2 * size + 1)]
    pieces = (rank, 2 * size - 1 - rank)
    return torch.cat([torch.arange(bounds[piece], bounds[piece + 1]) for piece in pieces])


def position_of(tokens: Tensor, length: int) -> Tensor:
    """``[length]`` int64: where each token lies in ``tokens``, -1 if it does not."""
    index = torch.full((length,), -1, dtype=torch.int64, device=tokens.device)
    index[tokens] = torch.arange(len(tokens), device=tokens.device)
    return index


class Whole:
    """Each batch belongs to one process."""

    data_shares = 1

    def share(self, batch: FeatureBatch, depths: int, needs_choices: bool) -> StepBatch:
        """All of it."""
        return StepBatch.of(batch)

    def num_tokens(self, batch: FeatureBatch) -> int:
        """Tokens that this process adds to a step: all of them."""
        return batch.num_tokens

    def placed(self, batch: StepBatch, device) -> StepBatch:
        """Nothing of its own to move."""
        return batch

    def axis(self, batch: FeatureBatch) -> TokenAxis:
        """Every token."""
        return WholeAxis(batch.num_tokens, batch.input_ids.device)

    def own(self, predictions: Predictions, batch: FeatureBatch) -> Predictions:
        """All predictions of the batch."""
        return predictions

    def teacher_index(self, batch: FeatureBatch) -> Tensor | None:
        """``None``: the final states of all tokens are here."""
        return None

    def teacher_places(self, batch: FeatureBatch, positions: Tensor) -> Tensor:
        """Where the final states of flat tokens lie: at their places."""
        return positions


class ByPosition:
    """Each batch is shared over a group of processes, by positions.

    The normalisers are those of the whole step, as everywhere, so that the gradients of the processes add up. Batches
    that were not shared, the whole rows of an evaluation, are taken as :class:`Whole` takes them.

    Args:
        group: the processes that share a batch.
    """

    def __init__(self, group: ContextGroup):
        self.group, self.data_shares = group, group.size
        self._whole = Whole()

    def share(self, batch: FeatureBatch, depths: int, needs_choices: bool) -> StepBatch:
        """This process's part of a whole batch; the rest of its states is let go.

        Args:
            batch: whole.
            depths: K, how far behind an anchor a teacher may lie.
            needs_choices: whether the loss counts by the target's choices.

        Raises:
            FeatureError: it does, and the features do not hold them.
        """
        if needs_choices and batch.target_top1 is None:
            raise FeatureError(
                "training.context_parallel with eagle.in_vocab_only needs features that hold the target's choices "
                "(target_top1), and these do not: dump them again, or set in_vocab_only: false"
            )
        length, device = batch.num_tokens, batch.aux_hidden.device
        axis = SharedAxis(self.group, length, device)
        reads = torch.zeros(length + depths, dtype=torch.bool)
        for step in range(depths):
            reads[axis.host_tokens + 1 + step] = True
        teachers = upload(reads[:length].nonzero().squeeze(1), device)  # [t]
        return StepBatch.of(
            batch,
            aux_hidden=batch.aux_hidden[:, axis.tokens],  # [1,m,A·Ht]
            final_hidden=batch.final_hidden[:, teachers],  # [1,t,Ht]
            axis=axis,
            teachers=teachers,
        )

    def num_tokens(self, batch: FeatureBatch) -> int:
        """Tokens that this process adds to a step."""
        return len(self.axis(batch).tokens)

    def placed(self, batch: StepBatch, device) -> StepBatch:
        """The batch with its axis and teachers on a device."""
        if batch.axis is None or batch.teachers is None:
            return batch
        axis = SharedAxis(self.group, batch.num_tokens, device)
        return replace(batch, axis=axis, teachers=batch.teachers.to(device))

    def axis(self, batch: FeatureBatch) -> TokenAxis:
        """The tokens of this process."""
        own = getattr(batch, "axis", None)
        return self._whole.axis(batch) if own is None else own

    def own(self, predictions: Predictions, batch: FeatureBatch) -> Predictions:
        """The predictions whose anchor lies among the tokens of this process."""
        own = torch.zeros(batch.num_tokens, dtype=torch.bool)
        own[self.axis(batch).host_tokens] = True
        return predictions.select(own[predictions.on_host().anchor])

    def teacher_index(self, batch: FeatureBatch) -> Tensor | None:
        """``[N]`` int64 where each token's final state lies, -1: not here."""
        teachers = getattr(batch, "teachers", None)
        return None if teachers is None else position_of(teachers, batch.num_tokens)

    def teacher_places(self, batch: FeatureBatch, positions: Tensor) -> Tensor:
        """Where the final states of flat tokens lie."""
        index = self.teacher_index(batch)
        return positions if index is None else index[positions]


Sharing = Whole | ByPosition
