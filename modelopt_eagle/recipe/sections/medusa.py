"""Recipe section ``medusa``: what Medusa heads have beside the loss of ``eagle``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from modelopt_eagle.recipe.sections.base import Section


class MedusaSection(Section):
    """Medusa heads, read when the algorithm is medusa; their loss and vocabulary stand under `eagle`."""

    heads: Annotated[int, Field(ge=1, le=32)] = Field(4, description="Heads K: drafted tokens, trained and served.")
    blocks: Annotated[int, Field(ge=1, le=8)] = Field(1, description="Residual blocks of each head.")
    shared_output: bool = Field(
        True,
        description="One output layer for all heads; false: one each, which vLLM serves with the full vocabulary only.",
    )
