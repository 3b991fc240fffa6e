"""The target's side of the loss: its rows a chunk at a time, and the gradient that flows back into them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Teacher:
    """Where the target's rows come from, one chunk of flat token positions at a time.

    Attributes:
        logits: ``[N, V]``, or ``None``.
        hidden: ``[N, Ht]`` final hidden states after the norm, read when ``logits`` is ``None``.
        rows: ``[Vd, Ht]`` the target's lm_head at the draft vocabulary.
        lm_head: ``[V, Ht]``, read only for a top-1 that nobody supplied.
        transform: what the target does to its logits after the product (bias, scale, soft cap): a function of
            ``(logits, target ids or None)``.
        top1: ``[N]`` int64 full-vocabulary argmax, or ``None``.
        labels: ``[N]`` int64 tokens, for hard labels: the teacher at j is then token ``j + 1``.
        index: ``[N]`` int64 row of each token in ``hidden``, which then holds some tokens only; ``None``: all.
    """

    target_ids: Tensor
    logits: Tensor | None = None
    hidden: Tensor | None = None
    rows: Tensor | None = None
    lm_head: Tensor | None = None
    transform: Callable[[Tensor, Tensor | None], Tensor] | None = None
    top1: Tensor | None = None
    labels: Tensor | None = None
    index: Tensor | None = None

    def places(self, positions: Tensor) -> Tensor:
        """``[c]`` rows of ``hidden``."""
        return positions if self.index is None else self.index[positions]

    def states(self, positions: Tensor) -> Tensor:
        """``[c, Ht]`` final hidden states."""
        return self.hidden[self.places(positions)]

    @property
    def learns(self) -> bool:
        """Whether a gradient flows back into ``hidden``: a target with adapters whose teacher is not detached."""
        return self.labels is None and self.logits is None and self.hidden.requires_grad

    def probabilities(self, positions: Tensor, to_draft: Tensor) -> Tensor:
        """``[c, Vd]`` float32 over the draft vocabulary; each row sums to one."""
        to_meet = self.to_meet(positions, to_draft)
        if self.labels is not None:
            return torch.nn.functional.one_hot(to_meet, len(self.target_ids)).float()
        return to_meet.float().softmax(-1)

    def to_meet(self, positions: Tensor, to_draft: Tensor) -> Tensor:
        """``[c, Vd]`` logits over the draft vocabulary, or with hard labels ``[c]`` int64 draft ids (0: outside)."""
        if self.labels is not None:
            ids = to_draft[self.labels[(positions + 1).clamp(max=len(self.labels) - 1)]]  # [c]
            return ids.clamp(min=0)
        if self.logits is not None:
            return self.logits[positions][:, self.target_ids]
        logits = self.states(positions) @ self.rows.T  # [c,Vd]
        return logits if self.transform is None else self.transform(logits.float(), self.target_ids)

    def argmax(self, positions: Tensor) -> Tensor:
        """``[c]`` int64 argmax over the target's full vocabulary."""
        if self.top1 is not None:
            return self.top1[positions]
        if self.logits is not None:
            return self.logits[positions].argmax(-1)
        logits = (self.states(positions) @ self.lm_head.T).float()  # [c,V]
        if self.transform is not None:
            logits = self.transform(logits, None)
        return logits.argmax(-1)

    def hidden_gradient(self, positions: Tensor, p: Tensor, by_p: Tensor) -> Tensor:
        """``[c, Ht]`` gradient by the hidden states, from the one by the probabilities.

        Through the softmax ``p`` it is ``p·(g − Σ p·g)`` by the logits, so a constant added to a row of ``g`` changes
        nothing.

        Args:
            positions: ``[c]``.
            p: ``[c, Vd]`` from :meth:`probabilities`.
            by_p: ``[c, Vd]`` g, overwritten.
        """
        by_logits = by_p.sub_(torch.linalg.vecdot(p, by_p)[:, None]).mul_(p)  # [c,Vd]
        if self.transform is not None:
            by_logits = through_transform(self.transform, self.states(positions), self.rows, self.target_ids, by_logits)
        return by_logits.to(self.rows.dtype) @ self.rows


def through_transform(transform, hidden: Tensor, rows: Tensor, ids: Tensor | None, gradient: Tensor) -> Tensor:
    """``[c, n]`` gradient before what the target does to its logits, from the one after it."""
    with torch.enable_grad():
        plain = (hidden.detach() @ rows.T).float().requires_grad_()  # [c,n]
        return torch.autograd.grad(transform(plain, ids), plain, gradient)[0]


def gradient_by_teacher(logits: Tensor, p: Tensor, share: float, lk: bool, subtract_entropy: bool) -> Tensor:
    """``[m, Vd]`` derivative of the position terms by ``p``, up to a constant in each row.

    ``−log q`` of the cross-entropy, ``log p`` where the entropy is subtracted, ``½ sign(p − q)`` of the total
    variation.

    Args:
        logits: ``[m, Vd]`` of the head, not changed.
        p: ``[m, Vd]`` teacher.
        share: weight of the first two, the rest is the total variation's.
    """
    result = logits * -share  # the log-sum-exp in −log q is the constant
    if subtract_entropy:
        result = result.add_(p.clamp(min=torch.finfo(p.dtype).tiny).log_(), alpha=share)
    if lk:
        result = result.add_((p - logits.softmax(-1)).sign_(), alpha=0.5 * (1 - share))
    return result
