"""``SamplingOptions``: how a request turns logits into tokens, checked before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

from torch import Tensor

from modelopt_eagle.errors import DecodingError


@dataclass(frozen=True)
class SamplingOptions:
    """How one request turns logits into a token. ``temperature`` 0 is greedy; the filters need a temperature.

    Attributes:
        temperature: divides the logits.
        top_k: keep the k most likely tokens (0: all).
        top_p: keep the smallest set whose mass reaches p (1: all).
        min_p: drop tokens less likely than ``min_p`` times the likeliest (0: none).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self):
        for name in ("temperature", "top_k", "top_p", "min_p"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real):
                raise DecodingError(f"{name} must be a number, found {value!r}")
        if not 0 <= self.temperature < float("inf"):
            raise DecodingError(f"temperature must be finite and at least 0, found {self.temperature}")
        if not 0 <= self.top_k < float("inf") or int(self.top_k) != self.top_k:
            raise DecodingError(f"top_k must be an integer of at least 0 (0: all tokens), found {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise DecodingError(f"top_p must lie in (0, 1], found {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise DecodingError(f"min_p must lie in [0, 1], found {self.min_p}")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature == 0


def per_request(name: str, value, count: int) -> list:
    """One value a request: a single value for all of them, or a sequence (or 1-D tensor) of ``count``.

    Raises:
        DecodingError: a sequence of another length.
    """
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        if len(value) != count:
            raise DecodingError(
                f"{name} has {len(value)} values for {count} requests: pass one value, or one a request"
            )
        return list(value)
    return [value] * count
