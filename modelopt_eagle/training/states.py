"""Where the target's states come from in a training step: as the batch holds them, or made in the step by adapters."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from modelopt_eagle.common.package import require_extra
from modelopt_eagle.errors import RecipeError
from modelopt_eagle.features.unadapted import adapted_batch
from modelopt_eagle.target.lora import TargetAdapter, find_modules
from modelopt_eagle.training.batch import StepBatch
from modelopt_eagle.training.loss import LossOutput
from modelopt_eagle.training.preservation import preservation_kl


@dataclass(frozen=True)
class MadeStates:
    """A batch whose states are ready to train on, and what making them adds to the loss.

    Attributes:
        batch: of this process.
        added: scalar with a gradient, part of the loss; ``None``: nothing.
        preservation: scalar, for the report; ``None`` for a target without adapters.
    """

    batch: StepBatch
    added: Tensor | None = None
    preservation: Tensor | None = None

    def complete(self, output: LossOutput) -> LossOutput:
        """The output with what was added to it."""
        loss = output.loss if self.added is None else output.loss + self.added
        return replace(output, loss=loss, preservation=self.preservation)


class StateSource(Protocol):
    """Makes the states of a micro-batch; see :class:`CapturedStates` and :class:`AdaptedStates`."""

    def parameters(self) -> list[nn.Parameter]:
        """Parameters that learn beside the head."""
        ...

    def options(self, index: int, place: int, rank: int) -> dict[str, bool]:
        """Keyword arguments of :meth:`make` for a micro-batch: step, place in its window, share of the data."""
        ...

    def make(self, step: Any, batch: StepBatch, normalizers: Tensor, **options: bool) -> MadeStates:
        """The batch with its states, within the step's forward."""
        ...

    def nothing(self, normalizers: Tensor) -> Tensor | None:
        """The preservation term of a process without a batch."""
        ...

    def after_backward(self, index: int) -> None:
        """Called once a step, when all gradients are there."""
        ...


class CapturedStates:
    """The states as the batch holds them; nothing learns but the head."""

    def parameters(self) -> list[nn.Parameter]:
        """None."""
        return []

    def options(self, index: int, place: int, rank: int) -> dict[str, bool]:
        """None."""
        return {}

    def make(self, step: Any, batch: StepBatch, normalizers: Tensor) -> MadeStates:
        """The batch as it is."""
        return MadeStates(batch)

    def nothing(self, normalizers: Tensor) -> None:
        """No such term."""
        return None

    def after_backward(self, index: int) -> None:
        """Nothing to do."""


class AdaptedStates:
    """Runs the target with its adapters inside the step, so that a gradient reaches them.

    It comes by three ways: through the captured states, which the head reads; through the teacher, unless it is
    detached; and through the preservation term, ``weight · KL(unadapted ‖ adapted)`` at the teacher positions that the
    loss's first depth counts, divided by their number over all micro-batches and processes.

    Where a batch is shared over processes, each of them runs the target over the whole rows and uses its own share of
    the states: its gradient is that of its share, and the processes' gradients add up.

    Args:
        adapter: of the target.
        target_lora: the recipe's ``target_lora`` section.
        seed: of the choice which micro-batches detach their teacher.
    """

    def __init__(self, adapter: TargetAdapter, target_lora: Any, seed: int = 0):
        self.adapter, self.target_lora, self.seed = adapter, target_lora, seed

    def parameters(self) -> list[nn.Parameter]:
        """Those of the adapters; the target itself stays as it is."""
        return list(self.adapter.parameters())

    def options(self, index: int, place: int, rank: int) -> dict[str, bool]:
        """Whether the adapters learn in this step, and whether this micro-batch detaches its teacher.

        A function of seed, step, place and share of the data, so that a resumed run chooses the same, and so do the
        processes that share a batch.
        """
        drawn = random.Random(f"{self.seed} {index} {place} {rank}").random()
        adapt = index >= self.target_lora.warmup_steps
        return {"adapt": adapt, "detach": drawn < self.target_lora.detach_teacher}

    def make(
        self, step: Any, batch: StepBatch, normalizers: Tensor, adapt: bool = True, detach: bool = True
    ) -> MadeStates:
        """The batch's rows by the adapted target.

        Args:
            batch: from an :class:`~modelopt_eagle.features.unadapted.UnadaptedSource`.
            normalizers: ``[K]`` of the loss; the first one divides the preservation term too.
            adapt: run the target with its adapters; without, the batch's features are used as they are.
            detach: the teacher is a constant.
        """
        untouched = sum((p.sum() * 0.0 for p in self.parameters()), normalizers.new_zeros(()))  # wrappers wait for each
        if not adapt:
            return MadeStates(batch, untouched, normalizers.new_zeros(()))
        whole = adapted_batch(self.adapter, batch, self.target_lora.gradient_checkpointing)
        whole = replace(whole, contract=batch.contract, host=batch.host)
        adapted = step.place(step.share(whole), batch.input_ids.device)
        adapted.plan = batch.plan  # as it was counted: what a drafter draws is drawn once
        drift = self.drift(step, adapted, batch) / normalizers[0]
        if detach:
            adapted = replace(adapted, final_hidden=adapted.final_hidden.detach())
        added = self.target_lora.preservation_weight * drift + untouched
        return MadeStates(adapted, added, drift.detach())

    def drift(self, step: Any, adapted: StepBatch, unadapted: StepBatch) -> Tensor:
        """KL divergence summed over the teacher positions of this process's predictions at the loss's first depth."""
        predictions = step.planned(adapted).predictions
        positions = predictions.select(predictions.on_host().depth == 0).teacher  # [n]
        places = step.sharing.teacher_places(adapted, positions)
        keeps: Callable[[], Any] = torch.enable_grad if self.target_lora.preservation_weight > 0 else torch.no_grad
        with keeps():
            return preservation_kl(
                adapted.final_hidden[0, places],
                unadapted.final_hidden[0, places],
                step.tables.lm_head,
                step.tables.transform,
            )

    def nothing(self, normalizers: Tensor) -> Tensor:
        """Zero."""
        return normalizers.new_zeros(())

    def after_backward(self, index: int) -> None:
        """While the head trains alone the adapters have no gradient at all, not even zero: the optimiser skips them."""
        if index < self.target_lora.warmup_steps:
            for parameter in self.parameters():
                parameter.grad = None


def check_adapters(recipe, target) -> None:
    """Refuse before features are made what :func:`make_adapter` would refuse after it: a missing package, module names.

    Raises:
        MissingExtraError, TargetError: see :class:`TargetAdapter`.
    """
    require_extra("peft", "lora")
    find_modules(target, recipe.target_lora.target_modules, recipe.target_lora.first_layer)


def make_adapter(recipe, target, device) -> TargetAdapter:
    """Adapters as a recipe's ``target_lora`` section says.

    Raises:
        RecipeError: the target is spread over devices, or lies on another one than the head.
        TargetError: module names or a layer that the target does not have.
    """
    lora = recipe.target_lora
    adapter = TargetAdapter(
        target,
        rank=lora.rank,
        alpha=lora.alpha,
        target_modules=lora.target_modules,
        first_layer=lora.first_layer,
        seed=recipe.training.seed,
    )
    there = adapter.device
    if there is None or (there.type, there.index or 0) != (device.type, device.index or 0):
        raise RecipeError(
            f"target_lora trains the target beside the head on {device}, and the target lies "
            f"{'on several devices' if there is None else f'on {there}'}: name that one in model.device, or start one "
            "process for each device"
        )
    return adapter
