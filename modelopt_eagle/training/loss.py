"""The decayed distillation loss, fused with the output layers of head and target.

A prediction (``anchor i``, ``depth k``) has a teacher position ``j``; ``p`` is the target's distribution there,
restricted to the draft vocabulary and renormalised, ``q`` the head's softmax. The loss is the sum over depths of
``weight^k · (Σ counted −Σ_v p_v log q_v) / normaliser_k``.

The work runs over chunks of teacher positions: the teacher's row is computed once and serves all predictions that meet
it, logits live for one chunk, and their gradient is taken on the spot, so ``[B, S, V]`` never exists and nothing of
size ``[n, Vd]`` survives the chunk. On a GPU :mod:`modelopt_eagle.training.fused_loss` does the same with larger chunks
and one kernel. :mod:`modelopt_eagle.training.reference` holds the same loss in plain PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modelopt_eagle.draft.documents import Documents
from modelopt_eagle.draft.predictions import Predictions
from modelopt_eagle.kernels.dispatch import on_gpu
from modelopt_eagle.training.fused_loss import fused_loss
from modelopt_eagle.training.loss_plan import CHUNK, LossKind, LossWork
from modelopt_eagle.training.teacher import Teacher, gradient_by_teacher


@dataclass
class LossOutput:
    """Loss of a batch and what it counted; K depths.

    Attributes:
        loss: scalar, differentiable.
        per_step: ``[K]`` loss of each depth, undecayed, detached.
        valid_counts: ``[K]`` int64 counted positions.
        top1_hits: ``[K]`` int64 counted positions where the head's argmax, mapped to the target's vocabulary, is the
            target's argmax over its full vocabulary.
        asked_counts: ``[K]`` int64 counted positions together with those that were dropped because their token lies
            outside the draft vocabulary; what an honest accuracy divides by.
        preservation: scalar, detached: how far the adapted target is from the unadapted one, see
            :mod:`modelopt_eagle.training.states`; ``None`` for a target without adapters.
    """

    loss: Tensor
    per_step: Tensor
    valid_counts: Tensor
    top1_hits: Tensor
    asked_counts: Tensor
    preservation: Tensor | None = None


KL = LossKind()


def taught(
    predictions: Predictions, documents: Documents, teacher: Teacher, t2d: Tensor, in_vocab_only: bool = False
) -> Tensor:
    """``[n]`` bool: which predictions have something to learn from.

    With hard labels the label must lie in the document and in the draft vocabulary; with ``in_vocab_only`` the
    teacher's argmax must lie in the draft vocabulary.

    Args:
        t2d: ``[V]`` bool, the draft vocabulary.
    """
    if teacher.labels is not None:
        following = (predictions.teacher + 1).clamp(max=len(teacher.labels) - 1)
        return documents.exists(predictions.teacher, 1) & t2d[teacher.labels[following]]
    kept = torch.ones_like(predictions.anchor, dtype=torch.bool)
    if in_vocab_only:
        for part in torch.arange(len(predictions), device=kept.device).split(CHUNK):
            kept[part] = t2d[teacher.argmax(predictions.teacher[part])]
    return kept


def prediction_loss(
    states: Tensor,
    predictions: Predictions,
    output_weights: Sequence[Tensor],
    teacher: Teacher,
    to_draft: Tensor,
    weights: Tensor,
    kind: LossKind = KL,
    fused: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of a flat list of predictions.

    Args:
        states: ``[n, H]`` after the head's last norm, in the order of ``predictions``.
        predictions: what each has to meet.
        output_weights: of each depth the matrix ``[Vd, H]`` that makes logits of a state; the same one may serve all.
        teacher: the target's side.
        to_draft: ``[V]`` int64 draft id of each target id.
        weights: ``[K]`` factor of each depth: decay over normaliser.
        kind: KL or LK.
        fused: whether one kernel turns logits into terms and gradients (:mod:`modelopt_eagle.training.fused_loss`);
            default: everywhere but on a CPU. Never for a teacher that learns, whose own gradient it does not make.

    Returns:
        ``(loss, sums [K], hits [K])``: the scalar with its gradient, the unweighted sums of each depth (detached), and
        how often the head's argmax is the target's.
    """
    unique: list[Tensor] = []
    heads = []
    for weight in output_weights:
        place = next((i for i, known in enumerate(unique) if known is weight), None)
        heads.append(len(unique) if place is None else place)
        if place is None:
            unique.append(weight)
    work = LossWork(predictions, weights, to_draft, teacher, kind, tuple(heads))
    learner = teacher.hidden if teacher.learns else None  # [N,Ht]
    if learner is None and (on_gpu(states.device) if fused is None else fused):
        return fused_loss(work, states, unique)
    return _FusedHeads.apply(work, learner, states, *unique)


class _FusedHeads(torch.autograd.Function):
    """Loss and gradients of both heads, chunk by chunk; the backward pass only scales what the forward pass stored."""

    @staticmethod
    def forward(ctx, work: LossWork, learner: Tensor | None, states: Tensor, *matrices: Tensor):
        needs = any(ctx.needs_input_grad)
        depths, device = work.predictions.depths, states.device
        grad_learner = torch.zeros_like(learner) if ctx.needs_input_grad[1] else None  # [N,Ht]
        grad_states = torch.zeros_like(states) if needs else None  # [n,H]
        grad_matrices = [
            torch.zeros_like(matrix, dtype=torch.float32) if wanted else None
            for matrix, wanted in zip(matrices, ctx.needs_input_grad[3:], strict=True)
        ]
        sums = torch.zeros(depths, device=device)
        hits = torch.zeros(depths, dtype=torch.int64, device=device)
        mix = _lk_weights(work, matrices, states) if work.kind.lk else None
        weights = numbers(work.weights)
        for positions, pieces in work.chunks():
            p_all = work.teacher.probabilities(positions, work.to_draft)  # [c,Vd]
            top_all = work.teacher.argmax(positions)  # [c]
            by_p = None if grad_learner is None else torch.zeros_like(p_all)  # [c,Vd]
            for k, elements, place in pieces:
                if not len(elements):
                    continue
                matrix, grad_matrix = matrices[work.heads[k]], grad_matrices[work.heads[k]]
                factors = None if work.predictions.weight is None else work.predictions.weight[elements, None]  # [m,1]
                hidden, p = states[elements], p_all if len(place) == len(p_all) else p_all[place]  # [m,H] [m,Vd]
                logits = (hidden.to(matrix.dtype) @ matrix.T).float()  # [m,Vd]
                largest, best = logits.max(-1)  # [m] each
                hits[k] += (work.teacher.target_ids[best] == top_all[place]).sum()
                share = 1.0 if mix is None else mix[k]
                if by_p is not None:
                    term = gradient_by_teacher(logits, p, share, work.kind.lk, work.kind.subtract_entropy)
                    by_p.index_add_(0, place, (term if factors is None else term * factors) * weights[k])
                weight = weights[k] if factors is None else weights[k] * factors
                values, grad = _position_loss(logits, largest, p, work.kind, share, weight if needs else None)
                sums[k] += (values if factors is None else values * factors[:, 0]).sum()
                if grad is not None and grad_states is not None:
                    grad = grad.to(matrix.dtype)  # [m,Vd]
                    grad_states.index_copy_(0, elements, (grad @ matrix).to(hidden.dtype))
                    if grad_matrix is not None:
                        grad_matrix.addmm_(grad.T.float(), hidden.float())
            if by_p is not None and grad_learner is not None:
                back = work.teacher.hidden_gradient(positions, p_all, by_p)  # [c,Ht]
                grad_learner.index_copy_(0, work.teacher.places(positions), back.to(grad_learner.dtype))
        total = (sums * work.weights).sum()
        ctx.save_for_backward(grad_learner, grad_states, *grad_matrices)
        ctx.dtypes = [matrix.dtype for matrix in matrices]
        ctx.mark_non_differentiable(sums, hits)
        return total, sums, hits

    @staticmethod
    def backward(ctx, grad_total, _sums, _hits):
        grad_learner, grad_states, *grad_matrices = ctx.saved_tensors
        matrices = [
            None if grad is None else (grad * grad_total).to(dtype)
            for grad, dtype in zip(grad_matrices, ctx.dtypes, strict=True)
        ]
        inner = [None if grad is None else grad * grad_total.to(grad.dtype) for grad in (grad_learner, grad_states)]
        return (None, *inner, *matrices)


def _position_loss(
    logits: Tensor, largest: Tensor, p: Tensor, kind: LossKind, share: float, weight: float | Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Terms ``[m]`` of the positions, and ``weight`` times their gradient by the logits (``None`` without a weight).

    KL part: ``lse − Σ p·logits``, gradient ``q − p``. Total variation ``½ Σ |p − q|`` has the gradient
    ``q·(s − Σ q·s)`` with ``s = ½ sign(q − p)``.

    Args:
        logits: ``[m, Vd]`` float32; overwritten, since a fresh ``[m, Vd]`` costs more than the arithmetic on it.
        largest: ``[m]`` their maxima.
        p: ``[m, Vd]`` teacher.
        weight: a number, as a tensor where a GPU holds it, or ``[m, 1]``.
    """
    expected = torch.linalg.vecdot(p, logits)  # [m]
    q = logits.sub_(largest[:, None]).exp_()  # [m,Vd] not yet normalised
    total = q.sum(-1)  # [m]
    values = largest + total.log() - expected
    if kind.subtract_entropy:
        values = values + torch.special.xlogy(p, p).sum(-1)
    if not kind.lk:
        if weight is None:
            return values, None
        if isinstance(weight, Tensor):
            weight = weight.reshape(-1, 1)
            return values, q.mul_(weight / total[:, None]).addcmul_(p, weight, value=-1)
        return values, q.mul_((weight / total)[:, None]).sub_(p, alpha=weight)
    q = q.div_(total[:, None])
    values = share * values + (1 - share) * 0.5 * (p - q).abs().sum(-1)
    if weight is None:
        return values, None
    sign = 0.5 * (q - p).sign()
    return values, weight * (share * (q - p) + (1 - share) * q * (sign - (q * sign).sum(-1, keepdim=True)))


def numbers(values: Tensor) -> list[float] | list[Tensor]:
    """``[K]`` values one by one: numbers where they lie on the CPU; a GPU is not waited for, it hands out scalars."""
    return values.tolist() if values.device.type == "cpu" else list(values.unbind())


def _lk_weights(work: LossWork, matrices: Sequence[Tensor], states: Tensor) -> list[float] | list[Tensor]:
    """λ of each depth: ``exp(−η · mean Σ min(p, q))`` over its counted positions, a constant for the gradient."""
    accepted = torch.zeros(work.predictions.depths, device=states.device)
    for positions, pieces in work.chunks():
        p_all = work.teacher.probabilities(positions, work.to_draft)  # [c,Vd]
        for k, elements, place in pieces:
            if len(elements):
                matrix = matrices[work.heads[k]]
                q = (states[elements].to(matrix.dtype) @ matrix.T).float().softmax(-1)  # [m,Vd]
                accepted[k] += torch.minimum(p_all[place], q).sum()
    means = accepted / work.predictions.counts().clamp(min=1)
    if means.device.type == "cpu":
        return [math.exp(-work.kind.eta * float(mean)) for mean in means]
    return list(torch.exp(-work.kind.eta * means).unbind())
