"""A feature batch on its way through a training step: this process's share of it, and what is predicted in it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from torch import Tensor

from modelopt_eagle.draft.predictions import Predictions, TokenAxis
from modelopt_eagle.features import FeatureBatch


@dataclass(frozen=True)
class Planned:
    """What the loss will count in a batch, found without running the head.

    Attributes:
        predictions: of this process.
        asked: ``[K]`` int64 predictions of this process together with those dropped because their token lies outside
            the draft vocabulary.
        empty: whether no process that shares the batch counts any.
    """

    predictions: Predictions
    asked: Tensor
    empty: bool


@dataclass
class StepBatch(FeatureBatch):
    """A batch in the step.

    Where it is shared by positions ``aux_hidden`` is ``[1, m, A·Ht]`` of ``axis.tokens`` and ``final_hidden``
    ``[1, t, Ht]`` of ``teachers``; everything else is whole.

    Attributes:
        rows: the tokenised rows, of a source whose target has adapters.
        axis: the tokens of this process; ``None``: all.
        teachers: ``[t]`` int64 ascending, flat tokens whose distribution is met here; ``None``: all.
        plan: what is predicted, once it was counted.
    """

    rows: list = field(default_factory=list)
    axis: TokenAxis | None = None
    teachers: Tensor | None = None
    plan: Planned | None = None

    @classmethod
    def of(cls, batch: FeatureBatch, **changes) -> StepBatch:
        """The batch with further fields; those that it has already are kept."""
        held = {part.name: getattr(batch, part.name) for part in fields(cls) if hasattr(batch, part.name)}
        return cls(**{**held, **changes})
