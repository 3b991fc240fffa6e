"""Recipe section ``peagle``: what a P-EAGLE head has beside the keys of ``eagle``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from modelopt_eagle.recipe.sections.base import Section, Share


class PEagleSection(Section):
    """A P-EAGLE head, read when the algorithm is peagle; its layers and its loss stand under `eagle`."""

    depth: Annotated[int, Field(ge=1, le=32)] = Field(8, description="Drafted tokens K that are trained.")
    depth_keep: Annotated[float, Field(gt=0, le=1)] = Field(
        0.7, description="Depth d trains at the share depth_keep^d of the positions, drawn anew in each step."
    )
    depth_floor: Share = Field(0.2, description="Least share of the positions that a depth trains at.")
    mask_token_id: Annotated[int, Field(ge=0)] | None = Field(
        None,
        description="Token that stands where the text is not known yet: one that the target does not write; null: "
        "chosen.",
    )
