"""Recipe section ``export``: the folder that engines load."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, field_validator

from modelopt_eagle.recipe.bounds import need
from modelopt_eagle.recipe.sections.base import Section


class ExportSection(Section):
    """The folder that engines load."""

    path: str | None = Field(None, description="Folder of the exported head; null: `export` in the output folder.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Numbers of the exported weights; `auto` is the target's."
    )
    layer_names: Literal["midlayer", "layers"] = Field(
        "midlayer",
        description="Tensor names of a one-layer head: `midlayer.*` is read by all three engines. Heads of more layers "
        "are always written as `layers.N.*`.",
    )
    rope_scaling: dict[str, Any] | None = Field(
        None,
        description="Rope scaling written into the exported config, such as `{rope_type: yarn, factor: 4.0}`; "
        "null: what was trained with.",
    )
    overwrite: bool = Field(False, description="Replace an export folder that exists; it is replaced whole.")
    push_to_hub: str | None = Field(None, description="Hub repository (`owner/name`) to upload the export to.")

    @field_validator("rope_scaling")
    @classmethod
    def _scaling_has_a_type(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        need(value is None or "rope_type" in value, "expected the key rope_type in rope_scaling (such as yarn)")
        return value

    @field_validator("push_to_hub")
    @classmethod
    def _repository_has_an_owner(cls, value: str | None) -> str | None:
        need(
            value is None or re.fullmatch(r"[\w.-]+/[\w.-]+", value),
            f"expected a hub repository as owner/name, found {value!r}",
        )
        return value
