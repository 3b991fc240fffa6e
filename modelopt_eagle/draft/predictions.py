"""The common currency between drafters and everything that trains and measures them: a flat list of predictions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from modelopt_eagle.draft.documents import Documents


class TokenAxis(Protocol):
    """Which tokens of a batch this process computes, see :class:`~modelopt_eagle.draft.documents.WholeAxis`."""

    tokens: Tensor

    def local(self, rows: Tensor) -> Tensor:
        """Where flat rows lie among ``tokens``; -1 for those of other processes."""
        ...

    def gather(self, values: Tensor) -> Tensor:
        """``[m, ...]`` of ``tokens`` to ``[N, ...]`` of all, with a gradient."""
        ...


@dataclass(frozen=True)
class BatchView:
    """What a drafter sees of a training batch; N tokens on one flat axis.

    Attributes:
        input_ids: ``[N]`` int64.
        supervised: ``[N]`` bool, tokens to be learned.
        documents: where documents begin and end.
        aux_hidden: ``[m, A·Ht]`` captured states of the target, of the tokens of ``axis``.
        final_hidden: ``[m, Ht]`` the target's final states after its norm, of the tokens of ``axis``; ``None`` where
            the batch does not hold them for these tokens.
        embed: flat places ``[...]`` to token embeddings ``[..., H]``.
        embed_ids: token ids ``[...]`` to embeddings ``[..., H]``, for drafters that read tokens of their own, such as a
            mask; ``None`` where embeddings were given by place.
        length: a bound above every position within a document.
        axis: the tokens that this process computes.
    """

    input_ids: Tensor
    supervised: Tensor
    documents: Documents
    aux_hidden: Tensor
    final_hidden: Tensor | None
    embed: Callable[[Tensor], Tensor]
    length: int
    axis: TokenAxis
    embed_ids: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True)
class Predictions:
    """n predictions of a drafter in one batch, and the distribution that each has to meet.

    Attributes:
        anchor: ``[n]`` int64 flat token from which a draft starts: the last one whose features it reads.
        depth: ``[n]`` int64, which of the drafted tokens it is, 0 to K-1.
        teacher: ``[n]`` int64 flat token after which the target's distribution is to be met.
        depths: K.
        weight: ``[n]`` float32 factor on its loss term, beside the decay by depth; ``None``: 1 for all.
    """

    anchor: Tensor
    depth: Tensor
    teacher: Tensor
    depths: int
    weight: Tensor | None = None

    def __len__(self) -> int:
        """n."""
        return len(self.anchor)

    def counts(self) -> Tensor:
        """``[K]`` int64 predictions of each depth."""
        return torch.bincount(self.depth, minlength=self.depths)

    def select(self, chosen: Tensor) -> Predictions:
        """Those at ``chosen`` (``[n]`` bool, or ``[m]`` int64), in order."""
        weight = None if self.weight is None else self.weight[chosen]
        return Predictions(self.anchor[chosen], self.depth[chosen], self.teacher[chosen], self.depths, weight)

    def first(self, depths: int) -> Predictions:
        """Those of the first ``depths`` drafted tokens."""
        if depths >= self.depths:
            return self
        kept = self.select(self.depth < depths)
        return Predictions(kept.anchor, kept.depth, kept.teacher, depths, kept.weight)
