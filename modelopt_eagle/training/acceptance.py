"""Acceptance length without decoding: the teacher-forced walk over text that the target itself produced greedily.

At anchor ``i`` the accepted length ``n_i`` is the number of leading drafts that, mapped to the target's vocabulary,
equal the target's full-vocabulary argmax at the token before them. A decoder that starts at the last prompt token emits
``1 + n_i`` tokens and goes on from anchor ``i + 1 + n_i``; the walk takes the same path, so it costs one target pass
and K draft passes over the whole text. The generator is the proof that it is right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from modelopt_eagle.common.acceptance import count_steps, length_text, pooled_length, prefix_shares
from modelopt_eagle.draft import EagleModule
from modelopt_eagle.draft.algorithm import algorithm_of
from modelopt_eagle.draft.base import DraftModule
from modelopt_eagle.draft.documents import Documents, WholeAxis
from modelopt_eagle.draft.predictions import BatchView, Predictions
from modelopt_eagle.features import FeatureSource
from modelopt_eagle.training.step import TrainingStep

Transform = Callable[[Tensor, Tensor | None], Tensor]
Law = Callable[[Tensor], Tensor]
"""Flat positions ``[c]`` to the target's probabilities ``[c, Vd]`` of the draft's tokens."""
CHUNK = 1024
"""Rows whose draft logits exist at once."""


@dataclass
class WalkResult:
    """Steps of the walk, pooled over prompts.

    Attributes:
        accepted: one list a walked answer, in document order: accepted draft tokens of each of its steps.
        num_steps: K, drafted tokens a step.
        drawn: one list a walked answer: expected tokens of a step from each of its anchors if answers and drafts were
            drawn at temperature 1; empty where the target's distribution was not at hand.
    """

    num_steps: int
    accepted: list[list[int]] = field(default_factory=list)
    drawn: list[list[float]] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """Verification steps in all."""
        return count_steps(self.accepted)

    @property
    def acceptance_length(self) -> float:
        """Σ(1 + n) / steps over all answers (not a mean of means); 0 when nothing was walked, so that it is no best."""
        return pooled_length(self.accepted) or 0.0

    @property
    def per_position(self) -> list[float]:
        """``[K]`` share of steps in which position k was accepted together with all before it."""
        return prefix_shares(self.accepted, self.num_steps)

    @property
    def text(self) -> str:
        """The acceptance length as people read it; ``none`` when nothing was walked."""
        return length_text(pooled_length(self.accepted))

    @property
    def drawn_length(self) -> float | None:
        """Mean of ``drawn`` over all anchors: what to expect of drafts drawn at temperature 1; ``None`` if unknown."""
        flat = [value for row in self.drawn for value in row]
        return sum(flat) / len(flat) if flat else None

    def numbers(self) -> dict:
        """``acceptance_length`` (``None`` if nothing was walked), ``per_position`` and ``walked`` (steps), plain, and
        ``drawn_length`` if it is known."""
        numbers = {
            "acceptance_length": pooled_length(self.accepted),
            "per_position": self.per_position,
            "walked": self.steps,
        }
        return numbers if self.drawn_length is None else {**numbers, "drawn_length": self.drawn_length}

    def extend(self, other: WalkResult) -> None:
        """Pool another result into this one."""
        self.accepted.extend(other.accepted)
        self.drawn.extend(other.drawn)


@torch.no_grad()
def acceptance_walk(
    module: EagleModule,
    token_embeddings: Tensor,
    aux_hidden: Tensor,
    supervised: Tensor,
    target_top1: Tensor,
    num_steps: int = 3,
    document_ids: Tensor | None = None,
) -> WalkResult:
    """Walk every supervised span of a batch.

    Args:
        module: the head.
        token_embeddings: ``[B, S, H]``.
        aux_hidden: ``[B, S, A·Ht]``.
        supervised: ``[B, S]`` bool; each run of set tokens is one answer, produced greedily by the target.
        target_top1: ``[B, S]`` int64 argmax of the target's full logits, read where the next token is supervised.
        num_steps: K, drafted tokens a step.
        document_ids: ``[B, S]`` packed documents, negative for padding.

    Returns:
        :class:`WalkResult`. A step is taken while at least one more answer token is to come after the token already
        known; drafts that would reach past the answer's end are not counted.
    """
    batch, length = supervised.shape
    view = BatchView(
        input_ids=torch.zeros(batch * length, dtype=torch.int64, device=supervised.device),  # the embeddings are given
        supervised=supervised.flatten().bool(),
        documents=Documents.make(batch, length, document_ids, supervised.device),
        aux_hidden=aux_hidden.flatten(0, 1),
        final_hidden=None,
        embed=token_embeddings.flatten(0, 1).__getitem__,
        length=length,
        axis=WholeAxis(batch * length, supervised.device),
    )
    return walk(module, view, target_top1.flatten(), num_steps)


@torch.no_grad()
def walk(
    module: DraftModule, view: BatchView, target_top1: Tensor, num_steps: int, law: Law | None = None
) -> WalkResult:
    """Walk every supervised span of a batch with a head of any kind.

    Args:
        module: the head.
        view: of the batch, whole.
        target_top1: ``[N]`` int64 argmax of the target's full logits, read where the next token is supervised.
        num_steps: K, drafted tokens a step.
        law: the target's distribution, for what is expected at temperature 1.

    Returns:
        the accepted drafts of each step of every answer.
    """
    predictions, states = algorithm_of(module.config).drafts(module, view, num_steps)
    lengths = accepted_lengths(module, predictions, states, view, target_top1).tolist()  # [N]
    result = WalkResult(num_steps)
    expected = None if law is None else drawn_lengths(module, predictions, states, view, law).tolist()  # [N]
    for start, end in answer_spans(view.supervised, view.documents):
        anchor, steps = start - 1, []
        if expected is not None and end - start > 1:
            result.drawn.append(expected[start - 1 : end - 2])
        while anchor + 2 < end:
            steps.append(lengths[anchor])
            anchor += 1 + lengths[anchor]
        result.accepted.append(steps)
    return result


def accepted_lengths(
    module: DraftModule, predictions: Predictions, states: Tensor, view: BatchView, target_top1: Tensor
) -> Tensor:
    """``[N]`` int64: leading drafts of each anchor that are the target's choice and lie in the answer.

    Args:
        predictions, states: the drafts, ``[n]`` and ``[n, H]``.
        view: of the batch.
        target_top1: ``[N]`` int64.
    """
    vocab, matrices = module.vocab, module.output_weights(predictions.depths)
    last = len(view.supervised) - 1
    running = torch.ones_like(view.supervised)  # [N]
    leading = torch.zeros_like(view.input_ids)  # [N]
    for depth in range(predictions.depths):
        inside = view.supervised[(predictions.teacher + 1).clamp(max=last)] & view.documents.exists(
            predictions.teacher, 1
        )  # [n]
        wanted = (predictions.depth == depth) & running[predictions.anchor] & inside
        hit = torch.zeros_like(running)
        for part in wanted.nonzero().squeeze(1).split(CHUNK):
            draft = (states[part].to(matrices[depth].dtype) @ matrices[depth].T).argmax(-1)  # [c] draft ids
            hit[predictions.anchor[part]] = vocab.to_target(draft) == target_top1[predictions.teacher[part]]
        running = running & hit
        leading += running
    return leading


def drawn_lengths(module: DraftModule, predictions: Predictions, states: Tensor, view: BatchView, law: Law) -> Tensor:
    """``[N]`` float32: tokens that a step from each anchor would give, drafts drawn from ``q`` and rejected exactly.

    The draft at depth k is taken with probability ``β_k = Σ_v min(p_v, q_v)``, along the text, so a step gives
    ``1 + β_0 + β_0·β_1 + …`` tokens; both distributions at temperature 1. Drafts behind the answer are not counted.

    Args:
        law: the target's distribution at flat positions.
    """
    matrices = module.output_weights(predictions.depths)
    last = len(view.supervised) - 1
    inside = view.supervised[(predictions.teacher + 1).clamp(max=last)] & view.documents.exists(predictions.teacher, 1)
    shared = torch.zeros(predictions.depths, last + 1, device=states.device)  # [K,N]
    order = inside.nonzero().squeeze(1)
    order = order[predictions.teacher[order].argsort(stable=True)]  # those of one position together: p is made once
    for part in order.split(CHUNK // 4):
        where, place = predictions.teacher[part].unique_consecutive(return_inverse=True)
        p = law(where)  # [u,Vd]
        for depth in range(predictions.depths):
            chosen = part[predictions.depth[part] == depth]  # [c]
            rows = place[predictions.depth[part] == depth]
            logits = states[chosen].to(matrices[depth].dtype) @ matrices[depth].T  # [c,Vd]
            overlap = torch.minimum(p[rows], logits.float().softmax(-1)).sum(-1)  # [c]
            shared[depth, predictions.anchor[chosen]] = overlap
    return 1 + shared.cumprod(0).sum(0)


def target_law(hidden: Tensor, lm_head: Tensor, target_ids: Tensor, transform: Transform | None) -> Law:
    """The target's probabilities of the draft's tokens, of its whole vocabulary's mass.

    Args:
        hidden: ``[N, Ht]`` states after the final norm.
        lm_head: ``[V, Ht]``.
        target_ids: ``[Vd]`` int64.
        transform: what the target does to its logits after the product.

    Returns:
        flat positions ``[c]`` to ``[c, Vd]`` float32, rows of at most 1.
    """

    def law(positions: Tensor) -> Tensor:
        logits = (hidden[positions].to(lm_head.dtype) @ lm_head.T).float()  # [c,V]
        if transform is not None:
            logits = transform(logits, None)
        return (logits[:, target_ids] - logits.logsumexp(-1, keepdim=True)).exp()

    return law


def answer_spans(supervised: Tensor, documents: Documents) -> list[tuple[int, int]]:
    """Flat ``(first, one past last)`` of every run of supervised tokens that has a token before it in its document."""
    flat = supervised.reshape(-1).bool()
    index = torch.arange(len(flat), device=flat.device)
    begins = flat.clone()
    begins[1:] &= ~(flat[:-1] & (documents.starts[1:] == documents.starts[:-1]))
    stops = flat.clone()
    stops[:-1] &= ~(flat[1:] & (documents.starts[1:] == documents.starts[:-1]))
    spans = zip(index[begins].tolist(), (index[stops] + 1).tolist(), strict=True)
    return [(start, end) for start, end in spans if start > int(documents.starts[start])]


@dataclass(frozen=True)
class EvaluationFiles:
    """Held-out rows by the file that they come from, for a number each besides the pooled one."""

    sources: dict[str, FeatureSource]


def evaluate_files(step: TrainingStep, held_out: FeatureSource | EvaluationFiles, accelerator, **options):
    """:func:`evaluate` on all held-out rows.

    Args:
        held_out: a source, or several by file.

    Returns:
        the pooled :class:`WalkResult`, and one by file (empty for a single source).
    """
    if not isinstance(held_out, EvaluationFiles):
        return evaluate(step, held_out, accelerator, **options), {}
    walks = {name: evaluate(step, source, accelerator, **options) for name, source in held_out.sources.items()}
    pooled = WalkResult(options["num_steps"])
    for part in walks.values():
        pooled.extend(part)
    return pooled, walks


@torch.no_grad()
def evaluate(
    step: TrainingStep, source, accelerator, *, batch_size: int, num_steps: int, max_tokens: int | None = None
) -> WalkResult:
    """Acceptance length of the head on a feature source.

    The head's mode (``training``) and the random state are left as they were.

    Args:
        step: the training step, without wrappers.
        source: a :class:`~modelopt_eagle.features.FeatureSource` of rows that the target answered greedily.
        accelerator: whose processes share the rows.
        batch_size: rows of a batch.
        num_steps: K, drafted tokens a step.
        max_tokens: tokens of a batch, in place of ``batch_size``.
    """
    from accelerate.utils import gather_object

    was_training = step.training
    step.eval()
    walked = WalkResult(num_steps)
    try:
        with torch.random.fork_rng(enabled=True):
            sizes = {"batch_size": batch_size} | ({} if max_tokens is None else {"max_tokens": max_tokens})
            for batch in source.batches(
                0, seed=0, rank=accelerator.process_index, world_size=accelerator.num_processes, **sizes
            ):
                if batch is None:
                    continue
                batch = step.place(batch, accelerator.device)
                with torch.autocast(accelerator.device.type, dtype=torch.bfloat16, enabled=step.bf16):
                    view, law = step.view(batch), None
                    if view.final_hidden is not None:
                        tables, ids = step.tables, step.module.target_ids
                        law = target_law(view.final_hidden, tables.lm_head, ids, tables.transform)
                    walked.extend(walk(step.module, view, batch.target_top1[0], num_steps, law))
    finally:
        step.train(was_training)
    if accelerator.num_processes > 1:
        walked = WalkResult(num_steps, gather_object(walked.accepted), gather_object(walked.drawn))
    return walked
