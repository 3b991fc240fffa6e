"""The decayed distillation loss, fused with the two heads.

For anchor ``i`` and step ``k`` the teacher is ``p``: the target's distribution at token ``j = i + 1 + k``, restricted
to the draft vocabulary and renormalised; ``q`` is the head's softmax. The loss is the sum over steps of
``weight^k · (Σ counted −Σ_v p_v log q_v) / normaliser_k``.

The work runs over chunks of teacher positions ``j``: the teacher's row is computed once and serves all K steps,
logits live for one chunk, and their gradient is taken on the spot, so ``[B, S, V]`` never exists and nothing of size
``[n, Vd]`` survives the chunk. :mod:`modelopt_eagle.training.reference` holds the same loss in plain PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from modelopt_eagle.draft import EagleModule
from modelopt_eagle.draft.conventions import convention_named
from modelopt_eagle.draft.eagle3.rollout import Documents, RolloutOutput, counted_anchors
from modelopt_eagle.training.teacher import Teacher, gradient_by_teacher

CHUNK = 512
"""Teacher positions a chunk."""


@dataclass
class LossOutput:
    """Result of :func:`distillation_loss`.

    Attributes:
        loss: scalar, differentiable.
        per_step: ``[K]`` loss of each step, undecayed, detached.
        valid_counts: ``[K]`` int64 counted positions.
        top1_hits: ``[K]`` int64 counted positions where the head's argmax, mapped to the target's vocabulary, is the
            target's argmax over its full vocabulary.
        asked_counts: ``[K]`` int64 counted positions together with those that were dropped because their token lies
            outside the draft vocabulary; what an honest accuracy divides by.
        preservation: scalar, detached: how far the adapted target is from the unadapted one, see
            :mod:`modelopt_eagle.training.lora`; ``None`` for a target without adapters.
    """

    loss: Tensor
    per_step: Tensor
    valid_counts: Tensor
    top1_hits: Tensor
    asked_counts: Tensor
    preservation: Tensor | None = None


def distillation_loss(
    output: RolloutOutput,
    module: EagleModule,
    supervised: Tensor,
    target_logits: Tensor | None = None,
    target_hidden: Tensor | None = None,
    target_lm_head: Tensor | None = None,
    decay: float | None = None,
    convention: str = "served",
    *,
    loss: str = "kl",
    lk_eta: float = 3.0,
    in_vocab_only: bool = False,
    labels: Tensor | None = None,
    target_top1: Tensor | None = None,
    target_rows: Tensor | None = None,
    target_index: Tensor | None = None,
    logit_transform: Callable[[Tensor, Tensor | None], Tensor] | None = None,
    normalizers: Tensor | None = None,
) -> LossOutput:
    """Distillation loss of a rollout.

    Args:
        output: from :func:`~modelopt_eagle.draft.eagle3.rollout.rollout`.
        supervised: ``[B, S]`` bool, tokens to be learned.
        target_logits: ``[B, S, V]``; or instead of them
        target_hidden: ``[B, S, Ht]`` final hidden states after the final norm; a gradient flows back into them if they
            require one (a target with adapters); with
        target_lm_head: ``[V, Ht]``.
        decay: weight base of the steps; default the convention's (0.9 for ``served``).
        convention: ``served``, ``modelopt``, ``eagle`` or ``speculators``.
        loss: ``kl``, or ``lk``: ``λ·KL + (1 − λ)·TV`` with ``λ = exp(−lk_eta · mean acceptance of the step)``.
        in_vocab_only: drop positions whose teacher argmax lies outside the draft vocabulary.
        labels: ``[B, S]`` token ids for hard labels instead of the target's distribution; tokens outside the draft
            vocabulary are dropped.
        target_top1: ``[B, S]`` int64 full-vocabulary argmax where known (saves a product with the whole lm_head).
        target_rows: ``[Vd, Ht]`` lm_head rows of the draft vocabulary, if the caller keeps them.
        target_index: ``[B·S]`` int64 where each token's state lies in ``target_hidden`` ``[1, t, Ht]``, if that holds
            only those that the rollout's anchors read.
        logit_transform: what the target does to logits after the product.
        normalizers: ``[K]`` replaces the counted positions of this batch: the count over all micro-batches and ranks.

    Raises:
        ValueError: unknown convention or loss, no teacher given, or shapes that do not belong together.
        CheckpointError: the head's vocabulary map is unset or broken.
    """
    rule = convention_named(convention)
    if loss not in ("kl", "lk"):
        raise ValueError(f"loss {loss!r} is unknown; known are kl, lk")
    whole = target_hidden if target_index is None else None
    _check_shapes(
        output, module.config.vocab_size, supervised, target_logits, whole, target_lm_head, target_top1, labels
    )
    vocab = module.vocab
    to_draft = vocab.to_draft(torch.arange(module.config.vocab_size, device=module.d2t.device))  # [V]
    teacher = _make_teacher(
        vocab.target_ids, target_logits, target_hidden, target_lm_head, target_rows, logit_transform, target_top1,
        labels, target_index,
    )  # fmt: skip
    counted = counted_masks(
        output.documents, supervised.reshape(-1), output.steps, convention, output.rows,
        teacher=teacher, t2d=module.t2d, in_vocab_only=in_vocab_only or rule.in_vocab_only,
    )  # [K,n]  # fmt: skip
    counts = asked = counted.sum(1)  # [K]
    if labels is not None or in_vocab_only or rule.in_vocab_only:
        asked = counted_masks(output.documents, supervised.reshape(-1), output.steps, convention, output.rows).sum(1)
    if normalizers is None:
        divisor = rule.divisor(counts, output.batch * output.length)
    else:
        divisor = normalizers.to(counts.device).float().clamp(min=1)
    base = rule.decay if decay is None else decay
    weights = torch.tensor([base**k for k in range(output.steps)], device=divisor.device) / divisor  # [K]
    settings = _Settings(loss == "lk", lk_eta, rule.subtract_entropy)
    work = _Work(output.rows, counted, weights, counts, to_draft, teacher, settings)
    learner = teacher.hidden if teacher.learns else None  # [N,Ht]
    total, sums, hits = _FusedHeads.apply(work, module.lm_head.weight, learner, *output.states)
    return LossOutput(total, (sums / divisor).detach(), counts, hits, asked)


def _check_shapes(output, vocab_size, supervised, logits, hidden, lm_head, top1, labels) -> None:
    """What is given a token must have the rollout's [B, S]: flattened, another layout would train in silence."""
    given = {"supervised": supervised, "target_logits": logits, "target_hidden": hidden, "target_top1": top1,
             "labels": labels}  # fmt: skip
    for name, tensor in given.items():
        if tensor is not None and tuple(tensor.shape[:2]) != (output.batch, output.length):
            raise ValueError(f"{name} must begin with {[output.batch, output.length]}, found {list(tensor.shape)}")
    if logits is not None and logits.shape[-1] != vocab_size:
        raise ValueError(f"target_logits must end with the target's {vocab_size} tokens, found {list(logits.shape)}")
    if lm_head is not None and len(lm_head) != vocab_size:
        raise ValueError(f"target_lm_head must have a row for each of {vocab_size} tokens, found {len(lm_head)}")


def counted_masks(
    documents: Documents,
    supervised: Tensor,
    steps: int,
    convention: str,
    rows: Tensor,
    *,
    teacher: Teacher | None = None,
    t2d: Tensor | None = None,
    in_vocab_only: bool = False,
) -> Tensor:
    """``[K, n]`` bool: which anchors each step counts.

    Args:
        supervised: ``[N]`` bool.
        rows: ``[n]`` flat anchors.
        teacher: needed to drop positions outside the draft vocabulary ``t2d``, by argmax or by hard label.
    """
    supervised = supervised.bool().to(rows.device)
    masks = []
    for step in range(steps):
        counted = counted_anchors(documents, supervised, step, convention, rows)
        if teacher is not None and teacher.labels is not None:
            following = (rows + step + 2).clamp(max=len(supervised) - 1)
            counted = counted & documents.exists(rows, step + 2) & t2d[teacher.labels[following]]
        elif in_vocab_only:
            where = counted.nonzero().squeeze(1)
            inside = torch.zeros_like(counted)
            for part in where.split(CHUNK):
                inside[part] = t2d[teacher.argmax(rows[part] + 1 + step)]
            counted = counted & inside
        masks.append(counted)
    return torch.stack(masks)


def _make_teacher(target_ids, logits, hidden, lm_head, rows, transform, top1, labels, index) -> Teacher:
    flat = [None if x is None else x.flatten(0, 1) for x in (logits, hidden, top1, labels)]
    logits, hidden, top1, labels = flat
    if logits is None:
        if labels is None and hidden is None:
            raise ValueError("a teacher is needed: target_logits, or target_hidden with target_lm_head, or labels")
        if hidden is not None and rows is None:
            if lm_head is None:
                raise ValueError("target_hidden needs target_lm_head [V, Ht] (or target_rows [Vd, Ht] and target_top1)")
            rows = lm_head[target_ids]  # [Vd,Ht]
        if top1 is None and lm_head is None:
            raise ValueError("the target's top-1 is needed: pass target_top1, or target_lm_head to compute it")
    return Teacher(target_ids, logits, hidden, rows, lm_head, transform, top1, labels, index)


@dataclass(frozen=True)
class _Settings:
    lk: bool
    eta: float
    subtract_entropy: bool


@dataclass(frozen=True)
class _Work:
    rows: Tensor  # [n]
    counted: Tensor  # [K,n]
    weights: Tensor  # [K] decay^k / normaliser
    counts: Tensor  # [K]
    to_draft: Tensor  # [V]
    teacher: Teacher
    settings: _Settings

    def chunks(self):
        """Yield ``(teacher positions [c], [(step, anchor indices [m], their place in the chunk [m]), ...])``."""
        n_steps = len(self.counted)
        step, anchor = self.counted.nonzero(as_tuple=True)  # [e] each
        position = self.rows[anchor] + 1 + step
        order = torch.argsort(position, stable=True)
        step, anchor, position = step[order], anchor[order], position[order]
        unique, place = torch.unique_consecutive(position, return_inverse=True)
        bounds = torch.searchsorted(place, torch.arange(0, len(unique) + CHUNK, CHUNK, device=place.device)).tolist()
        for number, (low, high) in enumerate(zip(bounds, bounds[1:], strict=False)):
            if low == high:
                continue
            here, first = step[low:high], number * CHUNK
            pieces = []
            for k in range(n_steps):
                chosen = (here == k).nonzero().squeeze(1) + low
                pieces.append((k, anchor[chosen], place[chosen] - first))
            yield unique[first : first + CHUNK], pieces


class _FusedHeads(torch.autograd.Function):
    """Loss and gradients of both heads, chunk by chunk; the backward pass only scales what the forward pass stored."""

    @staticmethod
    def forward(ctx, work: _Work, weight: Tensor, learner: Tensor | None, *states: Tensor):
        needs = any(ctx.needs_input_grad)
        grad_learner = torch.zeros_like(learner) if ctx.needs_input_grad[2] else None  # [N,Ht]
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        grads = [torch.zeros_like(state) for state in states] if needs else []
        sums = torch.zeros(len(states), device=weight.device)
        total = torch.zeros((), device=weight.device)
        hits = torch.zeros(len(states), dtype=torch.int64, device=weight.device)
        mix = _lk_weights(work, weight, states) if work.settings.lk else None
        weights = work.weights.tolist()
        for positions, pieces in work.chunks():
            p_all = work.teacher.probabilities(positions, work.to_draft)  # [c,Vd]
            top_all = work.teacher.argmax(positions)  # [c]
            by_p = None if grad_learner is None else torch.zeros_like(p_all)  # [c,Vd]
            for k, anchors, place in pieces:
                if not len(anchors):
                    continue
                hidden, p = states[k][anchors], p_all if len(place) == len(p_all) else p_all[place]  # [m,H] [m,Vd]
                logits = (hidden.to(weight.dtype) @ weight.T).float()  # [m,Vd]
                largest, best = logits.max(-1)  # [m] each
                hits[k] += (work.teacher.target_ids[best] == top_all[place]).sum()
                share = 1.0 if mix is None else float(mix[k])
                if by_p is not None:
                    term = gradient_by_teacher(logits, p, share, mix is not None, work.settings.subtract_entropy)
                    by_p.index_add_(0, place, term, alpha=weights[k])
                value, grad = _position_loss(logits, largest, p, work.settings, share, weights[k] if needs else None)
                sums[k] += value
                if needs:
                    grad = grad.to(weight.dtype)  # [m,Vd]
                    grads[k].index_copy_(0, anchors, (grad @ weight).to(hidden.dtype))
                    if grad_weight is not None:
                        grad_weight.addmm_(grad.T.float(), hidden.float())
            if by_p is not None:
                back = work.teacher.hidden_gradient(positions, p_all, by_p)  # [c,Ht]
                grad_learner.index_copy_(0, work.teacher.places(positions), back.to(grad_learner.dtype))
        total = (sums * work.weights).sum()
        ctx.save_for_backward(grad_weight, grad_learner, *grads)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(sums, hits)
        return total, sums, hits

    @staticmethod
    def backward(ctx, grad_total, _sums, _hits):
        grad_weight, *grads = ctx.saved_tensors  # grads: of the teacher's states if they learn, then of the head's
        first = None if grad_weight is None else (grad_weight * grad_total).to(ctx.weight_dtype)
        return (None, first, *(None if grad is None else grad * grad_total.to(grad.dtype) for grad in grads))


def _position_loss(logits: Tensor, largest: Tensor, p: Tensor, settings: _Settings, share: float, weight: float | None):
    """Sum of the position terms and ``weight`` times its gradient by the logits (``None`` without a weight).

    KL part: ``lse − Σ p·logits``, gradient ``q − p``. Total variation ``½ Σ |p − q|`` has the gradient
    ``q·(s − Σ q·s)`` with ``s = ½ sign(q − p)``.

    Args:
        logits: ``[m, Vd]`` float32; overwritten, since a fresh ``[m, Vd]`` costs more than the arithmetic on it.
        largest: ``[m]`` their maxima.
        p: ``[m, Vd]`` teacher.
    """
    expected = torch.linalg.vecdot(p, logits)  # [m]
    q = logits.sub_(largest[:, None]).exp_()  # [m,Vd] not yet normalised
    total = q.sum(-1)  # [m]
    value = (largest + total.log() - expected).sum()
    if settings.subtract_entropy:
        value = value + torch.special.xlogy(p, p).sum()
    if not settings.lk:
        return value, None if weight is None else q.mul_((weight / total)[:, None]).sub_(p, alpha=weight)
    q = q.div_(total[:, None])
    value = share * value + (1 - share) * 0.5 * (p - q).abs().sum()
    if weight is None:
        return value, None
    sign = 0.5 * (q - p).sign()
    return value, weight * (share * (q - p) + (1 - share) * q * (sign - (q * sign).sum(-1, keepdim=True)))


def _lk_weights(work: _Work, weight: Tensor, states) -> list[float]:
    """λ of each step: ``exp(−η · mean Σ min(p, q))`` over its counted positions, a constant for the gradient."""
    accepted = torch.zeros(len(states), device=weight.device)
    for positions, pieces in work.chunks():
        p_all = work.teacher.probabilities(positions, work.to_draft)  # [c,Vd]
        for k, anchors, place in pieces:
            if len(anchors):
                q = (states[k][anchors].to(weight.dtype) @ weight.T).float().softmax(-1)  # [m,Vd]
                accepted[k] += torch.minimum(p_all[place], q).sum()
    means = accepted / work.counts.clamp(min=1)
    return [math.exp(-work.settings.eta * float(mean)) for mean in means]
