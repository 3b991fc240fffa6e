"""Recipe section ``target_lora``: adapters on the target."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator, model_validator

from modelopt_eagle.common.lists import split_list
from modelopt_eagle.recipe.bounds import need
from modelopt_eagle.recipe.sections.base import LayerId, PositiveFloat, Section, Share


class TargetLoraSection(Section):
    """LoRA adapters on the target, trained together with the head (docs/training.md). Off at rank 0."""

    rank: Annotated[int, Field(ge=0, le=512)] = Field(
        0, description="Rank of the adapters; 0: none, the target stays as it is. Needs features made in the step."
    )
    alpha: PositiveFloat = Field(16.0, description="Scale: an adapter adds alpha / rank · B·A to its matrix.")
    target_modules: list[str] = Field(
        ["q_proj", "v_proj"], description="Linear modules in the target's decoder layers that get an adapter, by name."
    )
    first_layer: LayerId = Field(0, description="First target layer with adapters, counted from 0; those below stay.")
    learning_rate: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="Peak learning rate of the adapters; null: `training.learning_rate`."
    )
    warmup_steps: Annotated[int, Field(ge=0)] = Field(
        0, description="Optimiser steps at the beginning in which the head trains alone."
    )
    preservation_weight: Annotated[float, Field(ge=0)] = Field(
        1.0,
        description="Weight of the KL divergence of the adapted target from the unadapted one, where the loss's first "
        "step counts.",
    )
    detach_teacher: Share = Field(
        0.5,
        description="Chance that a micro-batch's teacher gives the adapters no gradient (its features always do): "
        "1: never through the teacher, 0: always.",
    )
    gradient_checkpointing: bool = Field(
        False, description="Compute the target's layers again in the backward pass instead of keeping their insides."
    )

    @field_validator("target_modules", mode="before")
    @classmethod
    def _modules_may_be_written_with_commas(cls, value: object) -> object:
        return split_list(value) if isinstance(value, str) else value

    @field_validator("target_modules")
    @classmethod
    def _modules_are_named(cls, value: list[str]) -> list[str]:
        need(value and all(value), f"expected module names such as [q_proj, v_proj], found {value}")
        need(len(set(value)) == len(value), f"expected distinct module names, found {value}")
        return value

    @model_validator(mode="after")
    def _options_need_a_rank(self) -> TargetLoraSection:
        changed = [key for key in self.changed() if key != "rank"]
        need(self.rank > 0 or not changed, f"{', '.join(changed)}: read only when rank is above 0: set rank: 16, say")
        return self
