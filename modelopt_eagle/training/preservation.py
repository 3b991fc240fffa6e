"""How far an adapted target has gone from the unadapted one: a KL divergence over the full vocabulary, in chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from modelopt_eagle.training.teacher import through_transform

CHUNK_BYTES = 64 * 2**20
"""Logits of one chunk of positions stay below this, so ``[n, V]`` never exists."""


def preservation_kl(hidden: Tensor, reference: Tensor, lm_head: Tensor, transform=None) -> Tensor:
    """``Σ_positions Σ_v p0_v (log p0_v − log p_v)``, a scalar with a gradient by ``hidden``.

    Args:
        hidden: ``[n, Ht]`` final states of the adapted target, after the norm: gives p.
        reference: ``[n, Ht]`` those of the unadapted one: gives p0, a constant.
        lm_head: ``[V, Ht]`` the target's output head, frozen.
        transform: what the target does to logits after the product, see
            :func:`~modelopt_eagle.training.step.head_transform`.
    """
    return _PreservationKL.apply(hidden, reference, lm_head, transform)


class _PreservationKL(torch.autograd.Function):
    """Value and gradient of a chunk are made together; the backward pass only scales what was stored."""

    @staticmethod
    def forward(ctx, hidden, reference, lm_head, transform):
        gradient = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None  # [n,Ht]
        total = hidden.new_zeros((), dtype=torch.float32)
        size = max(1, CHUNK_BYTES // (4 * len(lm_head)))
        for first in range(0, len(hidden), size):
            part = slice(first, first + size)
            logs = [_log_probabilities(states[part], lm_head, transform) for states in (hidden, reference)]  # [c,V]
            log_p, log_p0 = logs
            p0 = log_p0.exp()  # [c,V]
            total += torch.linalg.vecdot(p0, log_p0 - log_p).sum()
            if gradient is not None:
                by_logits = log_p.exp_().sub_(p0)  # [c,V]
                if transform is not None:
                    by_logits = through_transform(transform, hidden[part], lm_head, None, by_logits)
                gradient[part] = by_logits.to(lm_head.dtype) @ lm_head
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx, upstream):
        (gradient,) = ctx.saved_tensors
        return None if gradient is None else gradient * upstream.to(gradient.dtype), None, None, None


def _log_probabilities(hidden: Tensor, lm_head: Tensor, transform) -> Tensor:
    logits = (hidden @ lm_head.T).float()  # [c,V]
    if transform is not None:
        logits = transform(logits, None)
    return logits.log_softmax(-1)
