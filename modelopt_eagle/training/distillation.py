"""``distillation_loss``: the loss of an EAGLE-3 rollout, for callers that have a rollout and not a training step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from modelopt_eagle.draft import EagleModule
from modelopt_eagle.draft.conventions import convention_named
from modelopt_eagle.draft.counting import counted_anchors
from modelopt_eagle.draft.documents import Documents
from modelopt_eagle.draft.eagle3.rollout import RolloutOutput
from modelopt_eagle.draft.predictions import Predictions
from modelopt_eagle.training.loss import LossKind, LossOutput, prediction_loss, taught
from modelopt_eagle.training.teacher import Teacher


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
    masks = counted_masks(output.documents, supervised.reshape(-1), output.steps, convention, output.rows)  # [K,n]
    asked = masks.sum(1)  # [K]
    depth, row = masks.nonzero(as_tuple=True)
    anchor = output.rows[row]
    predictions = Predictions(anchor, depth, anchor + 1 + depth, output.steps)
    kept = taught(predictions, output.documents, teacher, module.t2d, in_vocab_only or rule.in_vocab_only)
    predictions, row, depth = predictions.select(kept), row[kept], depth[kept]
    counts = predictions.counts()
    if normalizers is None:
        divisor = rule.divisor(counts, output.batch * output.length)
    else:
        divisor = normalizers.to(counts.device).float().clamp(min=1)
    base = rule.decay if decay is None else decay
    weights = torch.tensor([base**k for k in range(output.steps)], device=divisor.device) / divisor  # [K]
    states = torch.cat(output.states).index_select(0, depth * len(output.rows) + row)  # [n,H]
    total, sums, hits = prediction_loss(
        states, predictions, module.output_weights(output.steps), teacher, to_draft, weights,
        LossKind(loss == "lk", lk_eta, rule.subtract_entropy),
    )  # fmt: skip
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


def counted_masks(documents: Documents, supervised: Tensor, steps: int, convention: str, rows: Tensor) -> Tensor:
    """``[K, n]`` bool: which anchors each step counts.

    Args:
        supervised: ``[N]`` bool.
        rows: ``[n]`` flat anchors.
    """
    supervised = supervised.bool().to(rows.device)
    return torch.stack([counted_anchors(documents, supervised, step, convention, rows) for step in range(steps)])


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
