"""AdamW for everything, or Muon for the weight matrices between embedding and head, and the learning rate's course.

Weight decay is decoupled and acts on matrices only. Every group keeps its peak learning rate under ``peak_lr``, so that
one factor from the schedule drives all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic that takes singular values in (0, 1] near 1 in five steps (Keller Jordan, Muon)."""


def orthogonalise(matrix: Tensor, steps: int = 5) -> Tensor:
    """The nearest semi-orthogonal matrix, roughly: ``U·Vᵀ`` of the singular value decomposition.

    Args:
        matrix: ``[m, n]``. The arithmetic is bf16 on an accelerator and the matrix's own dtype on a CPU, where bf16
            products are slow.
        steps: Newton-Schulz iterations.

    Returns:
        ``[m, n]`` in the matrix's dtype, singular values within about [0.7, 1.2].
    """
    a, b, c = NEWTON_SCHULZ
    x = matrix.bfloat16() if matrix.device.type != "cpu" else matrix
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x  # [min,max]
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T  # [min,min]
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.T if tall else x).to(matrix.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum whose update is made orthogonal, scaled to the size of an AdamW update.

    The factor ``0.2 · sqrt(max(m, n))`` gives the update the root mean square that AdamW's has, so that learning rates
    and weight decay carry over (Moonshot, "Muon is scalable for LLM training", 2025).

    Args:
        params: 2-D parameters, or groups of them.
        lr: learning rate.
        momentum: of the Nesterov average.
        weight_decay: decoupled.
    """

    def __init__(self, params, lr: float, momentum: float = 0.95, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.dim() != 2:
                    raise ValueError(f"Muon takes matrices, found a parameter of shape {list(parameter.shape)}")

    @torch.no_grad()
    def step(self) -> None:
        """One update; parameters without a gradient stay."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                average = state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                update = orthogonalise(parameter.grad.lerp(average, group["momentum"]))  # [m,n]
                scale = 0.2 * math.sqrt(max(parameter.shape))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * scale)


def build_optimizers(
    module: nn.Module, training, adapters: Sequence[nn.Parameter] = (), adapter_rate: float | None = None
) -> list[torch.optim.Optimizer]:
    """The optimisers of a recipe.

    Args:
        module: the head.
        training: the recipe's ``training`` section.
        adapters: those of the target; AdamW takes them, without weight decay.
        adapter_rate: their learning rate; default that of the recipe.

    Returns:
        one AdamW, or a Muon for the matrices of ``layers`` and ``fc`` and an AdamW for the rest. Each parameter group
        holds ``peak_lr``.
    """
    named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    muon = [p for name, p in named if training.optimizer == "muon" and is_inner_matrix(name, p)]
    chosen = {id(p) for p in muon}
    rest = [p for _, p in named if id(p) not in chosen]
    groups = [
        {"params": [p for p in rest if p.dim() >= 2], "weight_decay": training.weight_decay},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
        {"params": list(adapters), "weight_decay": 0.0, "lr": adapter_rate or training.learning_rate},
    ]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=training.learning_rate,
            betas=(training.adam_beta1, training.adam_beta2),
            fused=all(p.device.type in ("cpu", "cuda") for p in rest),
        )
    ]
    if muon:
        rate = training.muon_learning_rate or training.learning_rate
        optimizers.insert(0, Muon(muon, rate, weight_decay=training.weight_decay))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def is_inner_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon takes a parameter: a matrix of the decoder layers, or ``fc``."""
    return parameter.dim() == 2 and name.startswith(("layers.", "fc."))


def set_learning_rate(optimizers: list[torch.optim.Optimizer], factor: float) -> float:
    """Set every group to ``peak_lr · factor``; returns the learning rate of the first."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
    return optimizers[0].param_groups[0]["lr"]


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, then linear, cosine or constant.

    Attributes:
        kind: ``linear``, ``cosine`` or ``constant``.
        total_steps: optimiser steps of the whole run.
        warmup_ratio: share of the run that warms up.
        min_ratio: factor at the end (not read by ``constant``).
        budget_seconds: time after which the run ends; ``None``: steps alone decide.
    """

    kind: str
    total_steps: int
    warmup_ratio: float = 0.0
    min_ratio: float = 0.0
    budget_seconds: float | None = None

    def progress(self, step: int, elapsed: float) -> float:
        """Share of the run that is done in the middle of a step, in [0, 1].

        Args:
            step: optimiser steps done.
            elapsed: seconds spent training, before interruptions included.
        """
        share = (step + 0.5) / self.total_steps
        if self.budget_seconds is not None:
            share = max(share, elapsed / self.budget_seconds)
        return min(1.0, share)

    def factor(self, step: int, elapsed: float) -> float:
        """Factor on the peak learning rate for the step that comes next."""
        progress = self.progress(step, elapsed)
        if progress < self.warmup_ratio:
            return progress / self.warmup_ratio
        if self.kind == "constant":
            return 1.0
        done = (progress - self.warmup_ratio) / max(1e-12, 1.0 - self.warmup_ratio)  # 0 after the warm-up, 1 at the end
        course = 1.0 - done if self.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.min_ratio + (1.0 - self.min_ratio) * course

    def remaining_seconds(self, step: int, elapsed: float, seconds_per_step: float) -> float:
        """Seconds until the steps or the time are used up."""
        by_steps = (self.total_steps - step) * seconds_per_step
        return by_steps if self.budget_seconds is None else max(0.0, min(by_steps, self.budget_seconds - elapsed))
