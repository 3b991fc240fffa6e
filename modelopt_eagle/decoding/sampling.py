"""From logits to the distribution a request samples from: temperature, then top-k, top-p and min-p."""

from __future__ import annotations

import torch
from torch import Tensor

from modelopt_eagle.decoding.options import SamplingOptions

COLDEST = torch.finfo(torch.float32).tiny
"""Temperatures below are taken as this one: the likeliest token has all the mass, but for exact ties."""


_PREFIXES = (256, 4096)
"""Most likely tokens that are ranked before all of them are."""


def shape_probabilities(logits: Tensor, options: list[SamplingOptions]) -> Tensor:
    """Probabilities after each request's temperature and filters, in the order of transformers' ``generate``.

    Args:
        logits: ``[B, N, V]``.
        options: B; a greedy row gets all mass on its likeliest token.

    Returns:
        ``[B, N, V]`` float32, rows summing to 1.
    """
    logits = logits.float()
    device = logits.device
    heat = [max(o.temperature, COLDEST) if o.temperature else 1.0 for o in options]
    temperature = torch.tensor(heat, device=device)[:, None, None]
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature  # [B,N,V] at most 0, so that none overflows
    if any(o.top_k for o in options):
        scaled = _keep_top_k(scaled, [o.top_k for o in options])
    if any(o.top_p < 1 for o in options):
        scaled = _keep_top_p(scaled, torch.tensor([o.top_p for o in options], device=device)[:, None, None])
    probabilities = scaled.softmax(-1)
    if any(o.min_p > 0 for o in options):
        floor = torch.tensor([o.min_p for o in options], device=device)[:, None, None]
        weak = probabilities < floor * probabilities.amax(-1, keepdim=True)
        probabilities = probabilities.masked_fill(weak, 0.0)
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    if any(o.greedy for o in options):
        greedy = torch.tensor([o.greedy for o in options], device=device)
        hard = torch.zeros_like(probabilities).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
        probabilities = torch.where(greedy[:, None, None], hard, probabilities)
    return probabilities


def _keep_top_k(scaled: Tensor, top_k: list[int]) -> Tensor:
    """Mask what is below the k-th largest logit of its row (ties with it stay)."""
    vocab = scaled.shape[-1]
    wanted = [min(k, vocab) if k else vocab for k in top_k]
    most = max((k for k in wanted if k < vocab), default=vocab)
    if most == vocab:
        return scaled
    ranked = scaled.topk(most, dim=-1).values  # [B,N,most]
    limited = torch.tensor([k < vocab for k in wanted], device=scaled.device)[:, None, None]
    place = torch.tensor([min(k, most) - 1 for k in wanted], device=scaled.device)[:, None, None]
    edge = ranked.gather(-1, place.expand(-1, scaled.shape[1], -1))  # [B,N,1]
    return scaled.masked_fill((scaled < edge) & limited, float("-inf"))


def _keep_top_p(scaled: Tensor, top_p: Tensor) -> Tensor:
    """Mask the tail: a token stays while the mass of the likelier ones is below p."""
    vocab = scaled.shape[-1]
    total = scaled.logsumexp(-1, keepdim=True)  # [B,N,1]
    for few in _PREFIXES if scaled.device.type == "cpu" else ():
        if few >= vocab:
            break
        ranked, order = scaled.topk(few, dim=-1)  # most of the mass lies on few tokens: no need to sort them all
        mass = (ranked - total).exp().cumsum(-1)
        if bool(((mass[..., -1:] >= top_p) | (top_p >= 1)).all()):
            kept = _within(mass, (ranked - total).exp(), top_p)
            inside = torch.zeros_like(scaled, dtype=torch.bool).scatter_(-1, order, kept)
            return scaled.masked_fill(~inside & (top_p < 1), float("-inf"))
    ranked, order = scaled.sort(dim=-1, descending=True, stable=True)
    mass = (ranked - total).exp()
    drop = ~_within(mass.cumsum(-1), mass, top_p) & (top_p < 1)
    return scaled.masked_fill(torch.zeros_like(drop).scatter_(-1, order, drop), float("-inf"))


def _within(cumulated: Tensor, mass: Tensor, top_p: Tensor) -> Tensor:
    """Whether the mass before each ranked token is below p; the first always is."""
    kept = cumulated - mass < top_p
    kept[..., 0] = True
    return kept
