"""The training step of a head together with adapters on its target."""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from torch import Tensor, nn

from modelopt_eagle.common.package import require_extra
from modelopt_eagle.draft import EagleModule
from modelopt_eagle.errors import RecipeError
from modelopt_eagle.features import FeatureBatch
from modelopt_eagle.features.unadapted import adapted_batch
from modelopt_eagle.target.lora import TargetAdapter, find_modules
from modelopt_eagle.training.loss import LossOutput
from modelopt_eagle.training.preservation import preservation_kl
from modelopt_eagle.training.step import TeacherTables, TrainingStep


class AdaptedStep(TrainingStep):
    """Runs the target with its adapters inside the step, so that a gradient reaches them.

    It comes by three ways: through the captured states, which the head reads; through the teacher, unless it is
    detached; and through the preservation term, ``weight · KL(unadapted ‖ adapted)`` at the teacher positions that the
    loss's first step counts, divided by their number over all micro-batches and processes.

    Args:
        module, tables, eagle, precision: as for :class:`TrainingStep`.
        adapter: of the target.
        target_lora: the recipe's ``target_lora`` section.
        seed: of the choice which micro-batches detach their teacher.
    """

    def __init__(
        self,
        module: EagleModule,
        tables: TeacherTables,
        eagle,
        precision: str,
        adapter: TargetAdapter,
        target_lora,
        seed: int = 0,
    ):
        super().__init__(module, tables, eagle, precision)
        self.adapter, self.target_lora, self.seed = adapter, target_lora, seed
        self.adapters = nn.ParameterList(adapter.parameters())  # the target itself is no part of the module

    def options(self, index: int, place: int, rank: int) -> dict:
        """Whether the adapters learn in this step, and whether this micro-batch detaches its teacher.

        A function of seed, step, place and process, so that a resumed run chooses the same.
        """
        drawn = random.Random(f"{self.seed} {index} {place} {rank}").random()
        adapt = index >= self.target_lora.warmup_steps
        return {"adapt": adapt, "detach": drawn < self.target_lora.detach_teacher}

    def after_backward(self, index: int) -> None:
        """While the head trains alone the adapters have no gradient at all, not even zero: the optimiser skips them."""
        if index < self.target_lora.warmup_steps:
            for parameter in self.adapters:
                parameter.grad = None

    def forward(
        self,
        batch: FeatureBatch | None,
        normalizers: Tensor,
        generator: torch.Generator | None = None,
        steps: int | None = None,
        adapt: bool = True,
        detach: bool = True,
    ) -> LossOutput:
        """Loss of one micro-batch, with the preservation term.

        Args:
            batch, normalizers, generator, steps: as for :class:`TrainingStep`; the batch comes from an
                :class:`~modelopt_eagle.features.unadapted.UnadaptedSource`.
            adapt: run the target with its adapters; without, the batch's features are used as they are.
            detach: the teacher is a constant.
        """
        if batch is None:
            return replace(super().forward(None, normalizers), preservation=normalizers.new_zeros(()))
        untouched = sum(p.sum() * 0.0 for p in self.adapters)  # data-parallel wrappers wait for each parameter
        if not adapt:
            output = super().forward(batch, normalizers, generator, steps)
            return replace(output, loss=output.loss + untouched, preservation=normalizers.new_zeros(()))
        adapted = adapted_batch(self.adapter, batch, self.target_lora.gradient_checkpointing)
        adapted = self.place(adapted, batch.input_ids.device)
        drift = self.drift(adapted, batch.final_hidden) / normalizers[0]
        if detach:
            final = adapted.final_hidden.detach()
        else:
            final = adapted.final_hidden
        output = super().forward(replace(adapted, final_hidden=final), normalizers, generator, steps)
        loss = output.loss + self.target_lora.preservation_weight * drift + untouched
        return replace(output, loss=loss, preservation=drift.detach())

    def drift(self, adapted: FeatureBatch, reference: Tensor) -> Tensor:
        """KL divergence summed over the positions that the loss's first step counts."""
        positions = self.counted(adapted)[0].nonzero().squeeze(1) + 1  # [n] teacher positions of the counted anchors
        keeps = torch.enable_grad() if self.target_lora.preservation_weight > 0 else torch.no_grad()
        with keeps:
            return preservation_kl(
                adapted.final_hidden[0, positions],
                reference[0, positions],
                self.tables.lm_head,
                self.tables.transform,
            )


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
