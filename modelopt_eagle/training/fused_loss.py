"""The loss on a GPU: large products, and between them one kernel that turns logits into terms and their gradient.

A chunk holds the predictions of all depths that meet a run of teacher positions. Its logits are one product for each
output matrix; :func:`~modelopt_eagle.kernels.distill_rows` reads them once with the target's and writes the gradient
over them; two products bring it back to the states and the matrix. Values and gradients are those of the plain loss
(:mod:`modelopt_eagle.training.loss`), from which this differs in rounding only. Nothing is read back from the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from modelopt_eagle.kernels import distill_rows
from modelopt_eagle.training.loss_plan import CHUNK_BYTES, LossWork, RowChunk, RowPlan


def fused_loss(work: LossWork, states: Tensor, matrices: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of the predictions of ``work``, see :func:`~modelopt_eagle.training.loss.prediction_loss`.

    Args:
        work: what has to be met; a teacher that does not learn.
        states: ``[n, H]`` in the order of the predictions.
        matrices: ``[Vd, H]`` each, the output matrices that ``work.heads`` counts.

    Returns:
        ``(loss, sums [K], hits [K])``; the loss with its gradient.
    """
    return _FusedRows.apply(work, states, *matrices)


class _FusedRows(torch.autograd.Function):
    """Terms and gradients of all predictions, chunk by chunk; the backward pass only scales what is stored."""

    @staticmethod
    def forward(ctx, work: LossWork, states: Tensor, *matrices: Tensor):
        rows = Rows(work, states, matrices)
        needs = any(ctx.needs_input_grad)
        grad_states = torch.empty_like(states) if needs else None  # [n,H]
        grad_matrices = [
            torch.zeros_like(matrix, dtype=torch.float32) if wanted else None
            for matrix, wanted in zip(matrices, ctx.needs_input_grad[2:], strict=True)
        ]
        depth, predictions = rows.plan.depth, work.predictions
        factor = torch.ones_like(depth, dtype=torch.float32)  # [n]
        if predictions.weight is not None:
            factor = predictions.weight.float()[rows.plan.order]
        weight = work.weights[depth] * factor  # [n]
        share = rows.shares()[depth] if work.kind.lk else None  # [n]
        terms, hits = torch.empty_like(factor), torch.empty_like(depth)  # [n] each
        for chunk in rows.plan.chunks:
            part = chunk.rows
            logits, hidden = rows.logits(chunk)  # [m,Vd] [m,H]
            terms[part], hits[part], _ = rows.meet(
                chunk, logits, weight[part], None if share is None else share[part], needs
            )
            if grad_states is None:
                continue
            back = torch.empty_like(hidden)  # [m,H]
            for head, own in chunk.heads:
                torch.mm(logits[own], rows.matrices[head], out=back[own])
                grad_matrix = grad_matrices[head]
                if grad_matrix is not None:
                    grad_matrix.add_(logits[own].T @ hidden[own])
            grad_states.index_copy_(0, rows.plan.order[part], back.to(states.dtype))
        sums = rows.by_depth(terms * factor)  # [K]
        ctx.save_for_backward(grad_states, *grad_matrices)
        ctx.dtypes = [matrix.dtype for matrix in matrices]
        hits = rows.by_depth(hits)
        ctx.mark_non_differentiable(sums, hits)
        return (sums * work.weights).sum(), sums, hits

    @staticmethod
    def backward(ctx, grad_total, _sums, _hits):
        grad_states, *grad_matrices = ctx.saved_tensors
        matrices = [
            None if grad is None else (grad * grad_total).to(dtype)
            for grad, dtype in zip(grad_matrices, ctx.dtypes, strict=True)
        ]
        return (None, None if grad_states is None else grad_states * grad_total.to(grad_states.dtype), *matrices)


def chunk_rows(size: int, width: int) -> int:
    """Rows of head and target in a chunk, whose logits are ``width`` elements of ``size`` bytes."""
    return CHUNK_BYTES // (size * width)


class Rows:
    """The rows of logits of a batch, made a chunk at a time in the dtype of the products."""

    def __init__(self, work: LossWork, states: Tensor, matrices: Sequence[Tensor]):
        kind = states.device.type
        self.dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else matrices[0].dtype
        self.work, self.states = work, states
        self.matrices = [matrix.to(self.dtype) for matrix in matrices]  # [Vd,H] each
        wide = 4 if work.teacher.transform is not None else self.dtype.itemsize
        self.plan = RowPlan.make(work, chunk_rows(wide, len(matrices[0])))

    def logits(self, chunk: RowChunk) -> tuple[Tensor, Tensor]:
        """``[m, Vd]`` of a chunk, and the states ``[m, H]`` that they come from."""
        hidden = self.states[self.plan.order[chunk.rows]].to(self.dtype)  # [m,H]
        logits = hidden.new_empty(len(hidden), len(self.matrices[0]))  # [m,Vd]
        for head, own in chunk.heads:
            torch.mm(hidden[own], self.matrices[head].T, out=logits[own])
        return logits, hidden

    def meet(
        self,
        chunk: RowChunk,
        logits: Tensor,
        weight: Tensor,
        share: Tensor | None,
        gradient: bool,
        distance: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Terms, hits and total variations ``[m]`` of a chunk; with ``gradient`` the logits become theirs."""
        plan, work = self.plan, self.work
        positions = plan.positions[chunk.positions]  # [c]
        top = work.teacher.argmax(positions)  # [c]
        top = torch.where(top >= 0, work.to_draft[top.clamp(min=0)], -1)
        return distill_rows(
            logits, work.teacher.to_meet(positions, work.to_draft), plan.place[chunk.rows], plan.groups[chunk.groups],
            top, weight, share, subtract_entropy=work.kind.subtract_entropy, gradient=gradient, distance=distance,
            most=plan.most,
        )  # fmt: skip

    def shares(self) -> Tensor:
        """``[K]`` λ of each depth: ``exp(−η · mean Σ min(p, q))`` over its predictions, a constant for the gradient."""
        distances = torch.empty_like(self.plan.depth, dtype=torch.float32)  # [n]
        for chunk in self.plan.chunks:
            logits, part = self.logits(chunk)[0], chunk.rows
            distances[part] = self.meet(chunk, logits, distances[part], None, gradient=False, distance=True)[2]
        accepted = self.by_depth(1 - distances) / self.work.predictions.counts().clamp(min=1)
        return torch.exp(-self.work.kind.eta * accepted)

    def by_depth(self, values: Tensor) -> Tensor:
        """``[K]`` sums of ``[n]`` values of the rows; each depth alone, in a fixed order."""
        depths = torch.arange(self.work.predictions.depths, device=values.device)[:, None]  # [K,1]
        return torch.where(self.plan.depth == depths, values, torch.zeros_like(values)).sum(1)
