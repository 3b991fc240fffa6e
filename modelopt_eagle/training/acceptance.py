"""Acceptance length without decoding: the teacher-forced walk over text that the target itself produced greedily.

At anchor ``i`` the accepted length ``n_i`` is the number of leading steps whose draft argmax, mapped to the target's
vocabulary, equals the target's full-vocabulary argmax at the token read in that step. A decoder that starts at the
last prompt token emits ``1 + n_i`` tokens and goes on from anchor ``i + 1 + n_i``; the walk takes the same path, so it
costs one target pass and K draft passes over the whole text. The generator is the proof that it is right.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from modelopt_eagle.draft import EagleModule
from modelopt_eagle.draft.eagle3.rollout import Documents, rollout

CHUNK = 1024
"""Rows whose draft logits exist at once."""


@dataclass
class WalkResult:
    """Steps of the walk, pooled over prompts.

    Attributes:
        accepted: one list a walked answer, in document order: accepted draft tokens of each of its steps.
        num_steps: K, drafted tokens a step.
    """

    num_steps: int
    accepted: list[list[int]] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """Verification steps in all."""
        return sum(map(len, self.accepted))

    @property
    def acceptance_length(self) -> float:
        """Σ(1 + n) / steps over all answers (not a mean of means); 0 when nothing was walked."""
        return sum(1 + n for row in self.accepted for n in row) / self.steps if self.steps else 0.0

    @property
    def per_position(self) -> list[float]:
        """``[K]`` share of steps in which position k was accepted together with all before it."""
        flat = [n for row in self.accepted for n in row]
        return [sum(n > k for n in flat) / len(flat) if flat else 0.0 for k in range(self.num_steps)]

    def numbers(self) -> dict:
        """``acceptance_length, per_position, walked`` (steps) as plain values."""
        return {
            "acceptance_length": self.acceptance_length,
            "per_position": self.per_position,
            "walked": self.steps,
        }

    def extend(self, other: WalkResult) -> None:
        """Pool another result into this one."""
        self.accepted.extend(other.accepted)


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
    output = rollout(module, token_embeddings, aux_hidden, num_steps, document_ids, supervised=supervised)
    leading = accepted_lengths(module, output, supervised.reshape(-1), target_top1.reshape(-1))  # [N]
    result = WalkResult(num_steps)
    lengths = leading.tolist()
    for start, end in answer_spans(supervised, output.documents):
        anchor, steps = start - 1, []
        while anchor + 2 < end:
            steps.append(lengths[anchor])
            anchor += 1 + lengths[anchor]
        result.accepted.append(steps)
    return result


def accepted_lengths(module: EagleModule, output, supervised: Tensor, target_top1: Tensor) -> Tensor:
    """``[N]`` int64: leading steps of each anchor whose draft is the target's choice and lies in the answer."""
    vocab = module.vocab
    last = len(supervised) - 1
    running = torch.ones(len(output.rows), dtype=torch.bool, device=supervised.device)  # [n]
    leading = torch.zeros(len(output.rows), dtype=torch.int64, device=supervised.device)
    for step, states in enumerate(output.states):
        inside = supervised[(output.rows + step + 2).clamp(max=last)] & output.documents.exists(output.rows, step + 2)
        hit = torch.zeros_like(running)
        for part in (running & inside).nonzero().squeeze(1).split(CHUNK):
            draft = module.lm_head(states[part]).argmax(-1)  # [c] draft ids
            hit[part] = vocab.to_target(draft) == target_top1[output.rows[part] + step + 1]
        running = running & hit
        leading += running
    return torch.zeros_like(supervised, dtype=torch.int64).index_copy_(0, output.rows, leading)


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
