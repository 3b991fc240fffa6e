"""One training step as one module: rollout and loss behind a single ``forward``.

The trainer calls nothing else of the head, so that the hooks of data-parallel wrappers and of torch.compile see every
use of its parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from modelopt_eagle.draft import EagleModule
from modelopt_eagle.draft.conventions import convention_named
from modelopt_eagle.draft.eagle3.rollout import Documents, RolloutOutput, rollout
from modelopt_eagle.features import FeatureBatch
from modelopt_eagle.training.loss import LossOutput, Teacher, counted_masks, distillation_loss


@dataclass(frozen=True)
class TeacherTables:
    """What the loss reads of the target.

    Attributes:
        embedding: ``[V, Ht]`` token table, frozen; not read by heads with their own.
        lm_head: ``[V, Ht]`` output head.
        rows: ``[Vd, Ht]`` its rows for the draft vocabulary.
        transform: what the target does to logits after the product (bias, scale, cap), or ``None`` for nothing.
    """

    embedding: Tensor
    lm_head: Tensor
    rows: Tensor
    transform: Callable[[Tensor, Tensor | None], Tensor] | None

    @classmethod
    def make(cls, embedding: Tensor, head, target_ids: Tensor, device=None) -> TeacherTables:
        """From the target's embedding ``[V, Ht]``, its ``TargetHead`` and the target ids ``[Vd]`` of the draft."""
        head = head.to(device=device)
        return cls(embedding.to(device=device), head.weight, head.rows(target_ids), head_transform(head))


def head_transform(head) -> Callable[[Tensor, Tensor | None], Tensor] | None:
    """The part of a ``TargetHead`` after the product, for logits of all tokens (ids ``None``) or of some."""
    if head.bias is None and head.scale == 1.0 and head.cap is None:
        return None

    def transform(logits: Tensor, ids: Tensor | None) -> Tensor:
        if head.bias is not None:
            logits = logits + (head.bias if ids is None else head.bias[ids])
        logits = logits * head.scale
        return logits if head.cap is None else head.cap * torch.tanh(logits / head.cap)

    return transform


class TrainingStep(nn.Module):
    """The head together with how it is trained.

    Args:
        module: the head; the only parameters in here.
        tables: of the target.
        eagle: the recipe's ``eagle`` section.
        precision: ``float32`` or ``bf16`` (autocast of the matrix products; weights stay as they are).
    """

    def __init__(self, module: EagleModule, tables: TeacherTables, eagle, precision: str = "float32"):
        super().__init__()
        self.module = module
        self.tables = tables
        self.eagle = eagle
        self.rule = convention_named(eagle.convention)
        self.bf16 = precision == "bf16"

    def renew_rows(self) -> None:
        """Take the teacher's rows anew, after another vocabulary map was loaded into the head."""
        self.tables = replace(self.tables, rows=self.tables.lm_head[self.module.target_ids])

    @property
    def decay(self) -> float:
        """Weight base of the rollout steps."""
        return self.rule.decay if self.eagle.loss_decay is None else self.eagle.loss_decay

    def forward(
        self,
        batch: FeatureBatch | None,
        normalizers: Tensor,
        generator: torch.Generator | None = None,
        steps: int | None = None,
    ) -> LossOutput:
        """Loss of one micro-batch.

        Args:
            batch: features; ``None``: this process has nothing in this step, and gives a zero that reaches every
                parameter, so that the others do not wait for it.
            normalizers: ``[K]`` counted positions of the whole step, over all micro-batches and processes.
            generator: source of the mixed hidden states.
            steps: rollout steps to train, the first ones; default all K.

        Returns:
            :class:`~modelopt_eagle.training.loss.LossOutput`, zero at steps left out; sums over micro-batches and
            processes are exact.
        """
        if batch is None:
            zero = sum((p.sum() * 0.0 for p in self.parameters() if p.requires_grad), normalizers.new_zeros(()))
            empty = torch.zeros(self.eagle.ttt_steps, dtype=torch.int64, device=normalizers.device)
            return LossOutput(zero, empty.float(), empty, empty, empty)
        eagle = self.eagle
        steps = eagle.ttt_steps if steps is None else steps
        device = batch.input_ids.device.type
        with torch.autocast(device, dtype=torch.bfloat16, enabled=self.bf16):
            output = self.roll(batch, steps, generator)
            result = distillation_loss(
                output,
                self.module,
                batch.supervised,
                **self.states_of_teachers(batch),
                target_lm_head=self.tables.lm_head,
                decay=self.decay,
                convention=eagle.convention,
                loss=eagle.loss,
                lk_eta=eagle.lk_eta,
                in_vocab_only=eagle.in_vocab_only,
                labels=self.labels(batch),
                target_top1=self.top1(batch),
                target_rows=self.tables.rows,
                logit_transform=self.tables.transform,
                normalizers=normalizers[:steps],
            )
        missing = (0, eagle.ttt_steps - steps)
        parts = (result.per_step, result.valid_counts, result.top1_hits, result.asked_counts)
        return LossOutput(result.loss, *(nn.functional.pad(part, missing) for part in parts))  # [K] each

    def roll(self, batch: FeatureBatch, steps: int, generator: torch.Generator | None) -> RolloutOutput:
        """The rollout of a batch."""
        return rollout(
            self.module,
            self.embed(batch.input_ids),
            batch.aux_hidden,
            steps,
            batch.document_ids,
            supervised=batch.supervised,
            convention=self.eagle.convention,
            mix_hidden_states=self.eagle.mix_hidden_states,
            generator=generator,
        )

    def states_of_teachers(self, batch: FeatureBatch) -> dict:
        """Arguments of the loss that say where the target's final states are."""
        return {"target_hidden": batch.final_hidden}

    def share(self, batch: FeatureBatch | None) -> FeatureBatch | None:
        """This process's part of a batch: all of it."""
        return batch

    def num_tokens(self, batch: FeatureBatch | None) -> int:
        """Tokens that this process adds to a step."""
        return 0 if batch is None else batch.num_tokens

    def embed(self, input_ids: Tensor) -> Tensor:
        """``[...] -> [..., H]`` in the dtype of the head: its own table, or the target's."""
        if self.module.config.own_embedding:
            return self.module.embed(input_ids)
        return nn.functional.embedding(input_ids, self.tables.embedding).to(self.module.lm_head.weight.dtype)

    def place(self, batch: FeatureBatch | None, device) -> FeatureBatch | None:
        """The batch on a device: features in the head's dtype, final states in the target head's."""
        if batch is None:
            return None
        batch = batch.to(device)
        return replace(
            batch,
            aux_hidden=batch.aux_hidden.to(self.module.lm_head.weight.dtype),  # [1,N,A·Ht]
            final_hidden=batch.final_hidden.to(self.tables.rows.dtype),  # [1,N,Ht]
        )

    def labels(self, batch: FeatureBatch) -> Tensor | None:
        """``[1, N]`` token ids for hard labels, ``None`` for distillation."""
        return None if self.eagle.self_logit_distillation else batch.input_ids

    def top1(self, batch: FeatureBatch) -> Tensor | None:
        """``[1, N]`` the target's choices, if the batch knows them wherever the convention looks.

        Sources make them where the next token is supervised, which is where ``served`` counts; the other conventions
        count elsewhere too and compute them from the final states.
        """
        return batch.target_top1 if self.rule.counts_predicted_token else None

    def normalisers(self, counts: Tensor, positions: int) -> Tensor:
        """``[K]`` what the sums of a whole step are divided by.

        Args:
            counts: ``[K]`` counted positions over all micro-batches and processes.
            positions: tokens over all of them.
        """
        return self.rule.divisor(counts, positions)

    def options(self, index: int, place: int, rank: int) -> dict:
        """Further arguments of :meth:`forward` for a micro-batch: step, place in its window, process."""
        return {}

    def after_backward(self, index: int) -> None:
        """Called once a step, when all gradients are there."""

    def count_positions(self, batch: FeatureBatch | None) -> Tensor | None:
        """``[K]`` int64 positions that the loss will count in a batch, found without running the head.

        ``None`` for a batch in which nobody counts any: no process runs it.
        """
        if batch is None:
            return None
        counts = self.counted(batch).sum(1)  # [K]
        return counts if bool(counts.any()) else None

    @torch.no_grad()
    def counted(self, batch: FeatureBatch) -> Tensor:
        """``[K, N]`` bool: the anchors that each step of the loss will count."""
        eagle, supervised = self.eagle, batch.supervised.flatten()  # [N]
        documents = Documents.make(1, batch.num_tokens, batch.document_ids, supervised.device)
        top1, labels = self.top1(batch), self.labels(batch)
        teacher = Teacher(
            self.module.target_ids,
            hidden=batch.final_hidden.flatten(0, 1),
            rows=self.tables.rows,
            lm_head=self.tables.lm_head,
            transform=self.tables.transform,
            top1=None if top1 is None else top1.flatten(),
            labels=None if labels is None else labels.flatten(),
        )
        return counted_masks(
            documents,
            supervised,
            eagle.ttt_steps,
            eagle.convention,
            torch.arange(len(supervised), device=supervised.device),
            teacher=teacher,
            t2d=self.module.t2d,
            in_vocab_only=eagle.in_vocab_only or self.rule.in_vocab_only,
        )


def compile_layers(module: EagleModule, backend: str = "inductor") -> None:
    """Compile the two halves of every decoder layer and the fusion of the features, for inputs of any length.

    What lies between them (which rows see which keys) has shapes that depend on the data and stays as it is. The
    module's parameters and their names do not change.
    """
    module.fuse = torch.compile(module.fuse, dynamic=True, backend=backend)
    for layer in module.layers:
        layer.project = torch.compile(layer.project, dynamic=True, backend=backend)
        layer.combine = torch.compile(layer.combine, dynamic=True, backend=backend)
