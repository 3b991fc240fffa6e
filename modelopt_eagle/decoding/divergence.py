"""Where two greedy texts part, and whether the target itself was undecided there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from modelopt_eagle.target.model import Target

TIE = 1e-4
"""Logits closer than this are a near tie: the order of additions decides, not the method of decoding."""


@dataclass(frozen=True)
class Divergence:
    """The first token at which two texts differ.

    Attributes:
        position: index among the new tokens.
        tokens: what each text has there; ``None`` where it has ended.
        gap: difference of the target's two logits there; ``inf`` if one text has ended.
    """

    position: int
    tokens: tuple[int | None, int | None]
    gap: float

    @property
    def is_tie(self) -> bool:
        """Whether the target's logits nearly tie, so that both are its greedy text within rounding."""
        return self.gap < TIE


@torch.inference_mode()
def first_divergence(
    target: Target, prompt: Sequence[int], one: Sequence[int], other: Sequence[int]
) -> Divergence | None:
    """Compare two answers to a prompt.

    Returns:
        where they part first, ``None`` if they are equal.
    """
    position = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    if position == len(one) == len(other):
        return None
    tokens = tuple(text[position] if position < len(text) else None for text in (one, other))
    if None in tokens:
        return Divergence(position, tokens, float("inf"))
    ids = torch.tensor([[*prompt, *one[:position]]], device=target.device)
    logits = target.model(ids, use_cache=False).logits[0, -1].float()  # [V]
    return Divergence(position, tokens, abs(float(logits[tokens[0]] - logits[tokens[1]])))
