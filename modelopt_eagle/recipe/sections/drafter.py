"""Recipe section ``drafter``: which kind of draft head."""

from __future__ import annotations

from pydantic import Field

from modelopt_eagle.recipe.sections.base import Section


class DrafterSection(Section):
    """The kind of draft head. ``algorithm: NAME`` at the top of a recipe is short for ``drafter.algorithm``."""

    algorithm: str = Field(
        "eagle3", min_length=1, description="The drafter, by name (docs/drafters.md says which to take when)."
    )
