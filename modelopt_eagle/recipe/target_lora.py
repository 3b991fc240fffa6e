"""The recipe's section on adapters of the target."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator, model_validator

from modelopt_eagle.recipe.bounds import need
from modelopt_eagle.recipe.section import LayerId, PositiveFloat, Section, Share


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
        return [part.strip() for part in value.split(",")] if isinstance(value, str) else value

    @field_validator("target_modules")
    @classmethod
    def _modules_are_named(cls, value: list[str]) -> list[str]:
        need(value and all(value), f"expected module names such as [q_proj, v_proj], found {value}")
        need(len(set(value)) == len(value), f"expected distinct module names, found {value}")
        return value

    @model_validator(mode="after")
    def _options_need_a_rank(self) -> TargetLoraSection:
        changed = [
            name
            for name, field in type(self).model_fields.items()
            if name != "rank" and getattr(self, name) != field.default
        ]
        need(self.rank > 0 or not changed, f"{', '.join(changed)}: read only when rank is above 0: set rank: 16, say")
        return self


def check_fits(lora: TargetLoraSection, data, eagle) -> None:
    """Refuse what cannot go together with adapters on the target.

    Args:
        lora, data, eagle: sections of one recipe.

    Raises:
        ValueError: features that are not made in the step, or a loss that counts positions by the target's choice.
    """
    if lora.rank == 0:
        return
    made_before = {
        "data.offline_data_path": data.offline_data_path,
        "data.streaming_server_url": data.streaming_server_url,
        "data.cache_features": None if data.cache_features == "none" else data.cache_features,
    }
    given = [f"{name}: {value}" for name, value in made_before.items() if value is not None]
    need(
        not given,
        f"target_lora.rank {lora.rank} changes the target's features in every step, and {', '.join(given)} takes them "
        "from before: leave it out to train online, or set target_lora.rank: 0",
    )
    need(
        not eagle.counts_by_target_choice,
        "target_lora: eagle.in_vocab_only and convention: eagle count positions by the target's choice, which the "
        "adapters change within the step: set in_vocab_only: false and another convention, or target_lora.rank: 0",
    )
    need(
        eagle.self_logit_distillation or lora.detach_teacher == type(lora).model_fields["detach_teacher"].default,
        "target_lora.detach_teacher speaks of the target's distribution, and self_logit_distillation: false learns "
        "the text: leave it out",
    )
