"""Drawing a token from a row of probabilities by its cumulated mass, for the sampling walks.

With u uniform in [0, 1) the draw is the first token whose cumulated mass exceeds ``u`` times the row's mass. A token
of probability zero is never drawn, whatever the rounding; a row without any mass draws -1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from modelopt_eagle.kernels.dispatch import TritonKernel, power_of_two, require, require_shape

if TYPE_CHECKING:
    import triton.language as tl

MAX_BLOCK = 4096  # vocabulary entries read together


def vocabulary_block(vocabulary: int) -> int:
    """Vocabulary entries that a program reads at a time."""
    return min(power_of_two(vocabulary), MAX_BLOCK)


def check_probabilities(target_probs: Tensor, batch: int, nodes: int) -> None:
    """Raise DecodingError unless the probabilities are floating point of shape [B,N,V]."""
    require(
        target_probs.dtype.is_floating_point, lambda: f"target_probs must be floating point, found {target_probs.dtype}"
    )
    require_shape("target_probs", target_probs, batch, nodes, None)
    require(target_probs.shape[2] >= 1, "target_probs must have at least one token, found V=0")


def check_uniforms(name: str, uniforms: Tensor, *shape: int) -> None:
    """Raise DecodingError unless the uniforms are floating point of this shape."""
    require(uniforms.dtype.is_floating_point, lambda: f"{name} must be floating point, found {uniforms.dtype}")
    require_shape(name, uniforms, *shape)


def check_values(target_probs: Tensor, **uniforms: Tensor) -> None:
    """The checks of debug mode: rows sum to one within 1e-3, nothing negative, uniforms in [0, 1). Waits for the GPU.

    Raises:
        DecodingError: the first of these that does not hold.
    """
    mass = target_probs.double().sum(-1)  # [B,N]
    off = float((mass - 1).abs().max())
    require(off <= 1e-3, lambda: f"target_probs rows must sum to 1 within 1e-3, found one that is off by {off:.3g}")
    require(bool((target_probs >= 0).all()), "target_probs must not be negative")
    for name, values in uniforms.items():
        require(bool(((values >= 0) & (values < 1)).all()), f"{name} must lie in [0, 1): use torch.rand")


def draw_reference(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one token a row: probabilities [B,V], uniforms [B] -> [B] int64, -1 for a row without mass.

    Returns:
        ``[B]`` int64.
    """
    probabilities = probabilities.double()  # [B,V]
    cumulated = probabilities.cumsum(-1)  # [B,V]
    positive = probabilities > 0  # [B,V]
    hit = positive & (cumulated > uniforms.double()[:, None] * cumulated[:, -1:])  # [B,V]
    last = positive.shape[1] - 1 - positive.flip(1).to(torch.int8).argmax(1)  # [B]
    drawn = torch.where(hit.any(1), hit.to(torch.int8).argmax(1), last)  # [B]
    return torch.where(positive.any(1), drawn, -1)


@TritonKernel
def load_mass(probs_ptr, stride, ids, vocabulary, tokens_ptr, stride_token, first, last):
    """Probabilities of ``ids`` as float32, zero outside the vocabulary and for the tokens of nodes first..last-1."""
    mass = tl.load(probs_ptr + ids.to(tl.int64) * stride, mask=ids < vocabulary, other=0.0).to(tl.float32)
    for node in range(first, last):
        mass = tl.where(ids == tl.load(tokens_ptr + node * stride_token).to(tl.int32), 0.0, mass)
    return mass


@TritonKernel
def draw_token(probs_ptr, stride, vocabulary, uniform, tokens_ptr, stride_token, first, last, BLOCK: tl.constexpr):
    """Draw one token of a row, leaving out the tokens of nodes first..last-1; -1 if no mass is left."""
    lane = tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        sums += load_mass(probs_ptr, stride, start + lane, vocabulary, tokens_ptr, stride_token, first, last)
    goal = tl.sum(sums.to(tl.float64)) * uniform.to(tl.float64)
    before = tl.full((), 0.0, tl.float64)
    none = tl.full((), 0, tl.int32) + vocabulary
    found = none
    for start in range(0, vocabulary, BLOCK):
        mass = load_mass(probs_ptr, stride, start + lane, vocabulary, tokens_ptr, stride_token, first, last)
        after = before + tl.sum(mass).to(tl.float64)
        if (found == none) & (after > goal):  # the draw lies in this block
            passed = (tl.cumsum(mass, 0) > (goal - before).to(tl.float32)) & (mass > 0)
            found = tl.min(tl.where(passed, start + lane, none))
        before = after
    if found == none:  # rounding left the goal at or above the cumulated mass: the last token with mass, else -1
        last_positive = tl.full((), -1, tl.int32)
        for start in range(0, vocabulary, BLOCK):
            mass = load_mass(probs_ptr, stride, start + lane, vocabulary, tokens_ptr, stride_token, first, last)
            last_positive = tl.maximum(last_positive, tl.max(tl.where(mass > 0, start + lane, -1)))
        found = last_positive
    return found
