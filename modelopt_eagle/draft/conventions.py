"""How published trainers count, weigh and normalise the distillation loss: one table (``docs/design.md`` explains it).

A prediction is made at anchor ``i`` and step ``k``; its teacher is the target's distribution at token ``i+1+k``, and
the token it predicts is ``i+2+k``.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Convention:
    """Rules of one published loss.

    Attributes:
        counted_token: ``(i, k)`` counts where the mask is set at token ``i + k + counted_token``, with token ``i+1+k``
            in the document: 2 looks at the predicted token, 1 at the teacher's, 0 at the one before.
        decay: default weight base of the steps.
        in_vocab_only: positions whose teacher argmax lies outside the draft vocabulary are dropped.
        subtract_entropy: report KL rather than cross-entropy (the gradient is the same).
        normaliser: ``counted`` (number of counted positions), ``mask`` (the same plus 1e-5) or ``all`` (B·S).
    """

    counted_token: int
    decay: float
    in_vocab_only: bool
    subtract_entropy: bool
    normaliser: str

    @property
    def counts_predicted_token(self) -> bool:
        """Whether a position counts where the token it predicts is supervised, as feature sources count them."""
        return self.counted_token == 2

    def divisor(self, counts: Tensor, positions: int) -> Tensor:
        """``[K]`` float32: what the sum of each step is divided by.

        Args:
            counts: ``[K]`` counted positions.
            positions: all positions, counted or not (B·S).
        """
        if self.normaliser == "all":
            return counts.new_full(counts.shape, positions).float()
        return counts.float() + 1e-5 if self.normaliser == "mask" else counts.float().clamp(min=1)


CONVENTIONS = {
    "served": Convention(
        counted_token=2, decay=0.9, in_vocab_only=False, subtract_entropy=False, normaliser="counted"
    ),
    "modelopt": Convention(
        counted_token=1, decay=0.9, in_vocab_only=False, subtract_entropy=False, normaliser="mask"
    ),
    "eagle": Convention(
        counted_token=0, decay=0.8, in_vocab_only=True, subtract_entropy=False, normaliser="all"
    ),
    "speculators": Convention(
        counted_token=1, decay=1.0, in_vocab_only=False, subtract_entropy=True, normaliser="mask"
    ),
}  # fmt: skip
"""By the name that ``eagle.convention`` takes."""


def convention_named(name: str) -> Convention:
    """The convention of a name.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in CONVENTIONS:
        raise ValueError(f"convention {name!r} is unknown; known are {', '.join(CONVENTIONS)}")
    return CONVENTIONS[name]
