"""One training step as one module: a drafter's states and the loss behind a single ``forward``.

The trainer calls nothing else of the head, so that the hooks of data-parallel wrappers and of torch.compile see every
use of its parameters. The step is put together from objects that are free to combine: the drafter
(:class:`~modelopt_eagle.draft.algorithm.Algorithm`), where the target's states come from
(:mod:`modelopt_eagle.training.states`), how a batch is shared over processes (:mod:`modelopt_eagle.training.context`),
and who teaches (:class:`TeacherTables` and the recipe's loss).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_eagle.draft.algorithm import Algorithm, algorithm_of
from modelopt_eagle.draft.base import DraftModule
from modelopt_eagle.draft.conventions import convention_named
from modelopt_eagle.draft.documents import upload
from modelopt_eagle.draft.predictions import BatchView, Predictions
from modelopt_eagle.features import FeatureBatch
from modelopt_eagle.training.batch import Planned, StepBatch
from modelopt_eagle.training.context import Sharing, Whole
from modelopt_eagle.training.loss import LossKind, LossOutput, prediction_loss, taught
from modelopt_eagle.training.states import CapturedStates, StateSource
from modelopt_eagle.training.teacher import Teacher


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
        module: the head; with what ``states`` brings, the only parameters in here.
        tables: of the target.
        eagle: the recipe's ``eagle`` section: the loss, and for most drafters all they read.
        precision: ``float32`` or ``bf16`` (autocast of the matrix products; weights stay as they are).
        states: where the target's states come from.
        sharing: how a batch is shared over processes.
        settings: what the drafter reads of the recipe; default ``eagle``.
    """

    def __init__(
        self,
        module: DraftModule,
        tables: TeacherTables,
        eagle: Any,
        precision: str = "float32",
        *,
        states: StateSource | None = None,
        sharing: Sharing | None = None,
        settings: Any = None,
    ):
        super().__init__()
        self.module, self.tables, self.eagle = module, tables, eagle
        self.algorithm: Algorithm = algorithm_of(module.config)
        self.settings = eagle if settings is None else settings
        self.depths = self.algorithm.depths(self.settings)  # K
        self.rule = convention_named(eagle.convention)
        self.bf16 = precision == "bf16"
        self.states: StateSource = CapturedStates() if states is None else states
        self.sharing: Sharing = Whole() if sharing is None else sharing
        module.meet_target(tables.lm_head.__getitem__)
        self.adapters = nn.ParameterList(self.states.parameters())  # the target itself is no part of the module
        self._to_draft: Tensor | None = None
        self._t2d: Tensor | None = None  # [V] on the CPU

    def renew_rows(self) -> None:
        """Take the teacher's rows anew, after another vocabulary map was loaded into the head."""
        self.tables = replace(self.tables, rows=self.tables.lm_head[self.module.target_ids])
        self.module.meet_target(self.tables.lm_head.__getitem__)
        self._to_draft = self._t2d = None

    @property
    def decay(self) -> float:
        """Weight base of the depths: the recipe's, else the drafter's, else the convention's."""
        if self.eagle.loss_decay is not None:
            return self.eagle.loss_decay
        own = self.algorithm.decay(self.settings)
        return self.rule.decay if own is None else own

    @property
    def in_vocab_only(self) -> bool:
        """Whether positions are dropped whose teacher's choice lies outside the draft vocabulary."""
        return self.eagle.in_vocab_only or self.rule.in_vocab_only

    def forward(
        self,
        batch: FeatureBatch | None,
        normalizers: Tensor,
        generator: torch.Generator | None = None,
        steps: int | None = None,
        **options: bool,
    ) -> LossOutput:
        """Loss of one micro-batch.

        Args:
            batch: features; ``None``: this process has nothing in this step, and gives a zero that reaches every
                parameter, so that the others do not wait for it.
            normalizers: ``[K]`` counted positions of the whole step, over all micro-batches and processes.
            generator: source of what the drafter draws in its forward, such as mixed hidden states.
            steps: depths to train, the first ones; default all K.
            **options: of the state source, see :meth:`options`.

        Returns:
            :class:`~modelopt_eagle.training.loss.LossOutput`, zero at depths left out; sums over micro-batches and
            processes are exact.
        """
        if batch is None:
            zero = sum((p.sum() * 0.0 for p in self.parameters() if p.requires_grad), normalizers.new_zeros(()))
            empty = torch.zeros(self.depths, dtype=torch.int64, device=normalizers.device)
            return LossOutput(zero, empty.float(), empty, empty, empty, self.states.nothing(normalizers))
        made = self.states.make(self, as_step_batch(batch), normalizers, **options)
        return made.complete(self.loss_of(made.batch, normalizers, generator, steps))

    def loss_of(
        self,
        batch: FeatureBatch,
        normalizers: Tensor,
        generator: torch.Generator | None = None,
        steps: int | None = None,
    ) -> LossOutput:
        """The loss of a batch whose states are there; arguments as for :meth:`forward`."""
        steps = self.depths if steps is None else steps
        planned, view, teacher = self.planned(batch), self.view(batch), self.teacher(batch)
        predictions = planned.predictions.first(steps)
        divisor = normalizers[:steps].float().clamp(min=1)  # [k]
        weights = upload(torch.tensor([self.decay**k for k in range(steps)]), divisor.device) / divisor  # [k]
        kind = LossKind(self.eagle.loss == "lk", self.eagle.lk_eta, self.rule.subtract_entropy)
        with torch.autocast(batch.input_ids.device.type, dtype=torch.bfloat16, enabled=self.bf16):
            states = self.algorithm.states(self.module, view, predictions, self.settings, generator)  # [n,H]
            weight = self.algorithm.weigh(self.module, view, predictions, states, self.settings)
            if weight is not None:
                predictions = replace(predictions, weight=weight)
            total, sums, hits = prediction_loss(
                states, predictions, self.module.output_weights(steps), teacher, self.to_draft(), weights, kind
            )
        missing = (0, self.depths - steps)
        parts = ((sums / divisor).detach(), predictions.counts(), hits, planned.asked[:steps])
        return LossOutput(total, *(nn.functional.pad(part, missing) for part in parts))  # [K] each

    def view(self, batch: FeatureBatch) -> BatchView:
        """What the drafter sees of a batch."""
        ids, final, host = batch.input_ids[0], batch.final_hidden[0], batch.on_host()  # [N], [t,Ht]
        return BatchView(
            input_ids=ids,
            supervised=batch.supervised[0],
            documents=host.documents.to(ids.device),
            aux_hidden=batch.aux_hidden[0],
            final_hidden=final if self.sharing.teacher_index(batch) is None else None,
            embed=lambda places: self.embed(ids[places]),
            length=batch.num_tokens,
            axis=self.sharing.axis(batch),
            embed_ids=self.embed,
            host=host,
        )

    def teacher(self, batch: FeatureBatch) -> Teacher:
        """The target's side of the loss in a batch."""
        # Sources make the target's choices where the next token is supervised, which is where some conventions count;
        # the others count elsewhere too, and the choices are computed from the final states.
        top1 = batch.target_top1 if self.rule.counts_predicted_token else None
        return Teacher(
            self.module.target_ids,
            hidden=batch.final_hidden.flatten(0, 1),
            rows=self.tables.rows,
            lm_head=self.tables.lm_head,
            transform=self.tables.transform,
            top1=None if top1 is None else top1.flatten(),
            labels=None if self.eagle.self_logit_distillation else batch.input_ids.flatten(),
            index=self.sharing.teacher_index(batch),
        )

    def to_draft(self) -> Tensor:
        """``[V]`` int64 draft id of each target id, -1 outside; the map is checked when it is first read.

        Raises:
            CheckpointError: the head's vocabulary map is unset or broken.
        """
        if self._to_draft is None or self._to_draft.device != self.module.d2t.device:
            everything = torch.arange(self.module.config.vocab_size, device=self.module.d2t.device)
            self._to_draft = self.module.vocab.to_draft(everything)
        return self._to_draft

    def on_host_t2d(self) -> Tensor:
        """``[V]`` bool on the CPU: the draft vocabulary."""
        if self._t2d is None:
            self._t2d = self.module.t2d.cpu()
        return self._t2d

    @torch.no_grad()
    def planned(self, batch: FeatureBatch, generator: torch.Generator | None = None) -> Planned:
        """What the loss will count in a batch: found once on the CPU, and kept with the batch.

        No device is asked, but for ``in_vocab_only`` with choices of the target that only a device knows: once.

        Args:
            generator: source of what the drafter draws in its plan, of the CPU; the same on every process that shares
                the batch.
        """
        kept = getattr(batch, "plan", None)
        if kept is not None:
            return kept
        device = batch.input_ids.device
        plan = self.algorithm.plan(self.view(batch).planning(), self.settings, generator)
        predictions = plan.select(self._taught(plan, batch))
        asked = upload(self.sharing.own(plan, batch).counts(), device)
        planned = Planned(self.sharing.own(predictions, batch).to(device), asked, len(predictions) == 0)
        if isinstance(batch, StepBatch):
            batch.plan = planned
        return planned

    def _taught(self, plan: Predictions, batch: FeatureBatch) -> Tensor:
        """``[n]`` bool on the CPU: which predictions of a plan have something to learn from."""
        host, teacher = batch.on_host(), self.teacher(batch)
        if teacher.labels is not None:
            teacher = replace(teacher, labels=host.input_ids)
        elif self.in_vocab_only and host.target_top1 is not None and teacher.top1 is not None:
            teacher = replace(teacher, top1=host.target_top1)
        elif self.in_vocab_only:  # what the device knows alone, read back once
            kept = taught(plan.to(batch.input_ids.device), host.documents, teacher, self.module.t2d, True)
            return kept.cpu()
        return taught(plan, host.documents, teacher, self.on_host_t2d(), self.in_vocab_only)

    def share(self, batch: FeatureBatch | None) -> StepBatch | None:
        """This process's part of a batch.

        Raises:
            FeatureError: features that lack what a shared batch needs.
        """
        if batch is None:
            return None
        needs_choices = self.eagle.in_vocab_only and self.eagle.self_logit_distillation
        return self.sharing.share(batch, self.depths, needs_choices)

    def num_tokens(self, batch: FeatureBatch | None) -> int:
        """Tokens that this process adds to a step."""
        return 0 if batch is None else self.sharing.num_tokens(batch)

    def embed(self, input_ids: Tensor) -> Tensor:
        """``[...] -> [..., H]`` in the dtype of the head: its own table, or the target's."""
        if self.module.config.own_embedding:
            return self.module.embed(input_ids)
        return nn.functional.embedding(input_ids, self.tables.embedding).to(self.module.dtype)

    def place(self, batch: FeatureBatch | None, device) -> StepBatch | None:
        """The batch on a device: features in the head's dtype, final states in the target head's."""
        if batch is None:
            return None
        batch = as_step_batch(batch.to(device))
        batch = self.sharing.placed(batch, device)
        return replace(
            batch,
            aux_hidden=batch.aux_hidden.to(self.module.dtype),  # [1,m,A·Ht]
            final_hidden=batch.final_hidden.to(self.tables.rows.dtype),  # [1,t,Ht]
        )

    def normalisers(self, counts: Tensor, positions: int) -> Tensor:
        """``[K]`` what the sums of a whole step are divided by, on the head's device.

        Args:
            counts: ``[K]`` counted positions over all micro-batches and processes.
            positions: tokens over all of them.
        """
        return upload(self.rule.divisor(counts, positions), self.module.d2t.device)

    def options(self, index: int, place: int, rank: int) -> dict[str, bool]:
        """Further arguments of :meth:`forward` for a micro-batch.

        Args:
            index: of the step.
            place: of the micro-batch in its window.
            rank: share of the data, the same for all processes that share a batch.
        """
        return self.states.options(index, place, rank)

    def after_backward(self, index: int) -> None:
        """Called once a step, when all gradients are there."""
        self.states.after_backward(index)

    def count_positions(self, batch: FeatureBatch | None, generator: torch.Generator | None = None) -> Tensor | None:
        """``[K]`` int64 positions that the loss will count here, on the CPU, found without running the head.

        ``None`` for a batch in which nobody counts any: no process runs it.

        Args:
            generator: see :meth:`planned`.
        """
        if batch is None:
            return None
        planned = self.planned(batch, generator)
        return None if planned.empty else planned.predictions.on_host().counts()


def as_step_batch(batch: FeatureBatch) -> StepBatch:
    """The batch as the step handles it."""
    return batch if isinstance(batch, StepBatch) else StepBatch.of(batch)


def compile_layers(module: DraftModule, backend: str = "inductor") -> None:
    """Compile what a head lets be compiled, see :meth:`~modelopt_eagle.draft.base.DraftModule.compile_layers`."""
    module.compile_layers(backend)
