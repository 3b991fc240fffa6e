"""The kernels of a training step as ``training_kernels.py`` measures them: sizes, inputs, least work and contestants.

The kernels between the products of a layer are in ``layer_cases.py``. To add a kernel: a :class:`TrainingKernel` in
``KERNELS``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import attention_contestants  # scripts/benchmark/attention_contestants.py
import torch
from torch import Tensor

from modelopt_eagle.draft.attention import QueryPlan, column_attention, dense_column_attention
from modelopt_eagle.draft.predictions import Predictions
from modelopt_eagle.kernels import Work, column_attention_work, distill_rows, distill_rows_work, distillation_work
from modelopt_eagle.training.fused_loss import Rows, chunk_rows
from modelopt_eagle.training.loss import LossKind, prediction_loss
from modelopt_eagle.training.loss_plan import LossWork, RowPlan
from modelopt_eagle.training.teacher import Teacher

FLEX = "FlexAttention"
"""The contestant that is compiled for each case, which takes longer than all the others."""

Passes = dict[str, Callable[[], Sequence[Tensor]]]
"""What a contestant does, by pass (``forward``, ``backward``); each returns what is compared."""


@dataclass(frozen=True)
class Case:
    """One size.

    Attributes:
        shape: the sizes in words.
        work: the least each pass does.
        inputs: makes the inputs on a device.
        small: the same kind of case at a size that the plain code holds whole, for the comparison.
        apart: bytes that torch's operations move in each pass, each by itself; empty where nothing is fused.
    """

    shape: str
    work: dict[str, Work]
    inputs: Callable[[str], Any]
    small: Callable[[str], Any]
    apart: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Contestant:
    """One way to compute it.

    Attributes:
        passes: makes the passes from the inputs.
        ours: whether it is this package's kernel: then failing is wrong.
        cpu: whether it runs on CPU tensors, in a dry run.
        unavailable: passes that it does not have on a CPU.
    """

    passes: Callable[[Any], Passes]
    ours: bool = False
    cpu: bool = True
    unavailable: tuple[str, ...] = ()


@dataclass(frozen=True)
class TrainingKernel:
    """A kernel, what it is measured beside, and where.

    Attributes:
        reference: the plain code that every contestant is held against, at the small sizes.
        contestants: by name.
        tolerance: largest difference of two results over the largest value of the plain one, in bf16.
    """

    name: str
    cases: Callable[[], list[Case]]
    reference: Callable[[Any], Passes]
    contestants: dict[str, Contestant]
    tolerance: float


@dataclass(frozen=True)
class Attention:
    """Inputs of the rollout attention at one step.

    Attributes:
        tensors: q, keys, values, column keys, column values, with gradients.
        plan: which keys each query sees.
        scale: factor on the scores.
        upstream: gradient of the output.
        lengths: tokens of each packed document.
    """

    tensors: list[Tensor]
    plan: QueryPlan
    scale: float
    upstream: Tensor
    lengths: list[int]


@dataclass(frozen=True)
class AttentionSizes:
    """Sizes of :class:`Attention`: documents of ``length`` tokens, of which a ``share`` asks, at step ``columns``."""

    documents: int
    length: int
    share: float
    heads: int
    groups: int
    dk: int
    dv: int
    columns: int

    def rows(self) -> tuple[Tensor, Tensor]:
        """``[n]`` flat indices of the tokens that ask, and of the first token of their documents."""
        tokens = self.documents * self.length
        asks = torch.rand(tokens, generator=torch.Generator().manual_seed(0)) < self.share
        rows = asks.nonzero()[:, 0] if self.share < 1 else torch.arange(tokens)  # [n]
        return rows, rows // self.length * self.length

    def make(self, device: str) -> Attention:
        """Random bf16 inputs on a GPU, float32 elsewhere."""
        dtype = torch.bfloat16 if device != "cpu" else torch.float32
        generator = torch.Generator(device).manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device).to(dtype).requires_grad_()

        rows, starts = (part.to(device) for part in self.rows())
        tokens, asking = self.documents * self.length, len(rows)
        tensors = [
            random(asking, self.heads, self.dk),
            random(tokens, self.groups, self.dk),
            random(tokens, self.groups, self.dv),
            random(asking, self.columns, self.groups, self.dk),
            random(asking, self.columns, self.groups, self.dv),
        ]
        upstream = random(asking, self.heads, self.dv).detach()
        lengths = [self.length] * self.documents
        return Attention(tensors, QueryPlan.make(rows, starts), self.dk**-0.5, upstream, lengths)

    def work(self) -> dict[str, Work]:
        """The least of both passes in bf16."""
        rows, starts = self.rows()
        return column_attention_work(
            int((rows - starts + 1).sum()), self.documents * self.length, len(rows), self.columns,
            self.heads, self.groups, self.dk, self.dv, size=2,
        )  # fmt: skip

    def case(self) -> Case:
        """The case of these sizes."""
        width = f"{self.dk}" if self.dk == self.dv else f"{self.dk}/{self.dv}"
        shape = (
            f"{self.documents}x{self.length} tokens, {self.share:.0%} ask, "
            f"{self.heads}/{self.groups} heads of {width}, k={self.columns}"
        )
        small = AttentionSizes(3, 150, self.share, 2 * (self.heads // self.groups), 2, self.dk, self.dv, self.columns)
        return Case(shape, self.work(), self.make, small.make)


def attention_cases() -> list[Case]:
    """A row of an 8B target's length, packed rows, half supervised, a long row, and latent attention."""
    sizes = [
        AttentionSizes(1, 4096, 1.0, 32, 8, 128, 128, 6),
        AttentionSizes(1, 4096, 0.5, 32, 8, 128, 128, 6),
        AttentionSizes(16, 1024, 1.0, 32, 8, 128, 128, 2),
        AttentionSizes(1, 32768, 0.5, 32, 8, 128, 128, 2),
        AttentionSizes(1, 8192, 1.0, 64, 8, 64, 64, 2),
        AttentionSizes(1, 4096, 1.0, 64, 64, 192, 128, 2),
        AttentionSizes(1, 4096, 1.0, 16, 8, 256, 256, 2),
    ]
    return [size.case() for size in sizes]


def by_autograd(run: Callable[[Attention], Tensor]) -> Callable[[Attention], Passes]:
    """Both passes of a differentiable function."""

    def passes(given: Attention) -> Passes:
        out = run(given)

        def backward() -> Sequence[Tensor]:
            return torch.autograd.grad(out, given.tensors, given.upstream, retain_graph=True)

        return {"forward": lambda: [run(given)], "backward": backward}

    return passes


def by_flex(given: Attention) -> Passes:
    """Both passes of FlexAttention; its mask is made before, as a batch makes one for all layers and steps."""
    return by_autograd(attention_contestants.flex(given))(given)


def dense(given: Attention) -> Tensor:
    """The plain reference: every score at once."""
    return dense_column_attention(*given.tensors, given.plan, given.scale)


def chunked(given: Attention) -> Tensor:
    """The plain code of training: chunk by chunk with torch's operations."""
    return column_attention(*given.tensors, given.plan, given.scale, backend="reference")


def kernel(given: Attention) -> Tensor:
    """The Triton kernel."""
    return column_attention(*given.tensors, given.plan, given.scale, backend="triton")


ATTENTION = TrainingKernel(
    name="column_attention",
    cases=attention_cases,
    reference=by_autograd(dense),
    contestants={
        "kernel": Contestant(by_autograd(kernel), ours=True, cpu=False),
        "chunks": Contestant(by_autograd(chunked)),
        "flash and column": Contestant(by_autograd(attention_contestants.merged_flash)),
        FLEX: Contestant(by_flex, unavailable=("backward",)),
    },
    tolerance=2e-2,
)


@dataclass(frozen=True)
class Distillation:
    """Inputs of the loss of one micro-batch.

    Attributes:
        states, matrix: ``[n, H]``, ``[Vd, H]`` of the head, with gradients.
        work: predictions, weights and the target's side, as the loss takes them.
    """

    states: Tensor
    matrix: Tensor
    work: LossWork

    def loss(self, fused: bool) -> Sequence[Tensor]:
        """Sums of the depths, and both gradients."""
        work = self.work
        given = (work.teacher, work.to_draft, work.weights, work.kind)
        total, sums, _ = prediction_loss(
            self.states, work.predictions, [self.matrix] * len(work.heads), *given, fused=fused
        )
        return [sums, *torch.autograd.grad(total, (self.states, self.matrix))]

    def dense(self) -> Sequence[Tensor]:
        """The same with every logit at once and gradients by autograd; the target says all it says in float32."""
        work, listed = self.work, self.work.predictions
        p = work.teacher.probabilities(listed.teacher, work.to_draft)  # [n,Vd]
        log_q = (self.states @ self.matrix.T).float().log_softmax(-1)  # [n,Vd]
        term = -(p * log_q).sum(-1)  # [n]
        if work.kind.lk:
            distance = 0.5 * (p - log_q.exp()).abs().sum(-1)  # [n]
            counts = listed.counts().clamp(min=1)  # [K]
            mean = torch.zeros_like(work.weights).index_add(0, listed.depth, 1 - distance.detach()) / counts
            share = torch.exp(-work.kind.eta * mean)[listed.depth]  # [n]
            term = share * term + (1 - share) * distance
        sums = torch.zeros_like(work.weights).index_add(0, listed.depth, term)  # [K]
        return [sums.detach(), *torch.autograd.grad((sums * work.weights).sum(), (self.states, self.matrix))]


@dataclass(frozen=True)
class DistillationSizes:
    """Sizes of :class:`Distillation`: ``tokens`` of which a ``share`` is supervised, K ``depths``, KL or LK."""

    tokens: int
    depths: int
    share: float
    width: int
    target_width: int
    vocab: int
    lk: bool = False

    def predictions(self) -> Predictions:
        """What is predicted: each depth of every anchor whose token is supervised, on the CPU."""
        asks = torch.rand(self.tokens, generator=torch.Generator().manual_seed(0)) < self.share  # [N]
        counted = torch.stack([asks.roll(-k) for k in range(self.depths)])[:, : self.tokens - self.depths]
        depth, anchor = counted.nonzero(as_tuple=True)
        return Predictions(anchor, depth, anchor + depth, self.depths)

    def make(self, device: str) -> Distillation:
        """Random inputs, bf16 on a GPU and float32 elsewhere."""
        dtype = torch.bfloat16 if device != "cpu" else torch.float32
        random = torch.Generator(device).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return (torch.randn(shape, generator=random, device=device) * shape[-1] ** -0.25).to(dtype)

        predictions, everything = self.predictions().to(device), torch.arange(self.vocab, device=device)
        top1 = torch.randint(0, self.vocab, (self.tokens,), generator=random, device=device)
        rows = normal(self.vocab, self.target_width)
        teacher = Teacher(everything, hidden=normal(self.tokens, self.target_width), rows=rows, lm_head=rows, top1=top1)
        weights = torch.full((self.depths,), 1e-3, device=device)
        work = LossWork(predictions, weights, everything, teacher, LossKind(lk=self.lk), (0,) * self.depths)
        states, matrix = normal(len(predictions), self.width), normal(self.vocab, self.width)
        return Distillation(states.requires_grad_(), matrix.requires_grad_(), work)

    def rows(self, device: str) -> list[Any]:
        """Arguments of ``distill_rows`` for the first chunk of the loss, as the loss makes them."""
        made = self.make(device)
        rows = Rows(made.work, made.states.detach(), [made.matrix.detach()])
        chunk = rows.plan.chunks[0]
        logits, plan, positions = rows.logits(chunk)[0], rows.plan, rows.plan.positions[rows.plan.chunks[0].positions]
        weight = torch.full((len(logits),), 1e-3, device=device)
        share = torch.full_like(weight, 0.5) if self.lk else None
        teacher = made.work.teacher
        return [
            logits, teacher.to_meet(positions, made.work.to_draft), plan.place[chunk.rows], plan.groups[chunk.groups],
            teacher.argmax(positions), weight, share, plan.most,
        ]  # fmt: skip

    def small(self) -> DistillationSizes:
        """The same kind at a size that the plain code holds whole."""
        return DistillationSizes(60, self.depths, self.share, 48, 40, 1300, self.lk)

    def shape(self, listed: Predictions) -> str:
        """In words."""
        return f"{len(listed)} predictions over {self.vocab} tokens, K={self.depths}, H={self.width}" + (
            ", LK" if self.lk else ""
        )

    def whole(self) -> Case:
        """The loss."""
        listed, small = self.predictions(), self.small()
        sizes = (len(listed.teacher.unique()), self.vocab, self.width, self.target_width)
        work = distillation_work(len(listed), *sizes, size=2)
        return Case(self.shape(listed), {"both": work}, self.make, small.make)

    def kernel(self) -> Case:
        """The kernel alone, on a chunk."""
        made = DistillationSizes(self.tokens, self.depths, self.share, 1, 1, self.vocab, self.lk)
        plan = RowPlan.make(made.make("cpu").work, chunk_rows(2, self.vocab)).chunks[0]
        rows, positions = (part.stop - part.start for part in (plan.rows, plan.positions))
        shape = f"{rows} rows meet {positions} over {self.vocab} tokens, K={self.depths}" + (", LK" if self.lk else "")
        work = distill_rows_work(rows, positions, self.vocab, size=2)
        return Case(shape, {"rows": work}, self.rows, self.small().rows)


def distillation_sizes() -> list[DistillationSizes]:
    """4,096 tokens of an 8B target: reduced vocabularies, its own, and the largest in use; depths 3 and 7; LK."""
    return [
        DistillationSizes(4096, 3, 1.0, 4096, 4096, 32000),
        DistillationSizes(4096, 7, 0.6, 4096, 4096, 32000),
        DistillationSizes(4096, 3, 1.0, 4096, 4096, 32000, lk=True),
        DistillationSizes(4096, 3, 1.0, 4096, 4096, 128256),
        DistillationSizes(4096, 3, 0.6, 2560, 2560, 262144),
    ]


def rows_by(backend: str) -> Callable[[list[Any]], Passes]:
    """The kernel or its reference, on logits that it overwrites."""

    def passes(given: list[Any]) -> Passes:
        draft, *rest, most = given

        def rows() -> Sequence[Tensor]:
            terms, _, distances = distill_rows(draft, *rest, most=most, backend=backend)
            return [terms, distances, draft]

        return {"rows": rows}

    return passes


DISTILL_ROWS = TrainingKernel(
    name="distill_rows",
    cases=lambda: [size.kernel() for size in distillation_sizes()],
    reference=rows_by("reference"),
    contestants={"kernel": Contestant(rows_by("auto"), ours=True), "plain": Contestant(rows_by("reference"))},
    tolerance=2e-2,
)

DISTILLATION = TrainingKernel(
    name="distillation_loss",
    cases=lambda: [size.whole() for size in distillation_sizes()],
    reference=lambda given: {"both": given.dense},
    contestants={
        "one kernel a chunk": Contestant(lambda given: {"both": lambda: given.loss(True)}, ours=True),
        "chunks": Contestant(lambda given: {"both": lambda: given.loss(False)}),
    },
    tolerance=2e-2,
)

KERNELS = (ATTENTION, DISTILL_ROWS, DISTILLATION)
