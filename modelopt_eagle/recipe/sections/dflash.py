"""Recipe section ``dflash``: what a DFlash head has beside the keys of ``eagle``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from modelopt_eagle.recipe.bounds import need
from modelopt_eagle.recipe.sections.base import Positive, PositiveFloat, Section, Share


class DFlashSection(Section):
    """A DFlash head, read when the algorithm is dflash; its layers and its loss stand under `eagle`."""

    block_size: Annotated[int, Field(ge=2, le=64)] = Field(
        8, description="Tokens of a block B with the known one in front; B - 1 are drafted."
    )
    causal: bool = Field(False, description="A slot of the block sees the slots before it only; else all of them.")
    anchors: Positive = Field(512, description="Most blocks of a row in a step, drawn anew from its answers.")
    weighting: Literal["exponential", "dpace"] = Field(
        "exponential",
        description="Weights of the slots: exp(-(k-1)/gamma), or D-PACE, by how likely the draft comes so far.",
    )
    gamma: PositiveFloat | None = Field(
        None, description="Of the exponential weights; null: half of the drafted tokens. Read with exponential."
    )
    dpace_alpha: Share = Field(0.5, description="Share of certainty in the D-PACE weights. Read with dpace.")
    head: Literal["own", "target"] = Field(
        "own", description="Output layer: one over the draft vocabulary that is trained, or the target's, frozen."
    )
    mask_token_id: Annotated[int, Field(ge=0)] | None = Field(
        None,
        description="Token of the slots that are to be drafted: one that the target does not write; null: chosen.",
    )

    @model_validator(mode="after")
    def _weights_fit_together(self) -> DFlashSection:
        need(
            self.weighting == "exponential" or self.gamma is None,
            "gamma is read only when weighting is exponential: leave it out, or set weighting: exponential",
        )
        need(
            self.weighting == "dpace" or self.dpace_alpha == self.default("dpace_alpha"),
            "dpace_alpha is read only when weighting is dpace: set weighting: dpace, or leave it",
        )
        return self
