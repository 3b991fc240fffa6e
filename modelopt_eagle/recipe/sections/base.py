"""The base of a recipe's sections, and the number types that they share."""

from __future__ import annotations

import types
import typing
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

Positive = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
LayerId = Annotated[int, Field(ge=0)]


class Section(BaseModel):
    """Base of the recipe's sections: unknown keys are errors, assignments are checked, booleans are not numbers."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, allow_inf_nan=False, protected_namespaces=())

    @field_validator("*", mode="before")
    @classmethod
    def _booleans_are_not_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        key = info.field_name or ""
        if isinstance(value, bool) and bool not in accepted_types(cls.model_fields[key].annotation):
            raise ValueError("expected a value that is not a boolean")
        return value

    @classmethod
    def default(cls, key: str) -> Any:
        """The value of a key that is not given."""
        return cls.model_fields[key].get_default(call_default_factory=True)

    def changed(self) -> list[str]:
        """Keys whose value is not the default."""
        return [key for key in type(self).model_fields if getattr(self, key) != self.default(key)]


def accepted_types(annotation: Any) -> set[Any]:
    """The plain types inside an annotation: ``str | list[str] | None`` gives ``{str, list, NoneType}``."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return set().union(*(accepted_types(part) for part in typing.get_args(annotation)))
    if origin is Annotated:
        return accepted_types(typing.get_args(annotation)[0])
    if origin is Literal:
        return {type(choice) for choice in typing.get_args(annotation)}
    return {origin or annotation}
