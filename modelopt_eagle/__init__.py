"""EAGLE-3 draft heads: train, validate, export and serve them. See ``docs/library.md`` and ``docs/design.md``.

The names below are for programs; each is imported when it is first asked for: ``import modelopt_eagle`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modelopt_eagle.export import export_checkpoint, load_draft
    from modelopt_eagle.pipeline import run
    from modelopt_eagle.recipe import load_recipe
    from modelopt_eagle.target import load_target
    from modelopt_eagle.training import train
    from modelopt_eagle.validation import measure_acceptance

__version__ = "0.1.0"

_HOMES = {
    "export_checkpoint": "modelopt_eagle.export",
    "load_draft": "modelopt_eagle.export",
    "load_recipe": "modelopt_eagle.recipe",
    "load_target": "modelopt_eagle.target",
    "measure_acceptance": "modelopt_eagle.validation",
    "run": "modelopt_eagle.pipeline",
    "train": "modelopt_eagle.training",
}

__all__ = [
    "export_checkpoint",
    "load_draft",
    "load_recipe",
    "load_target",
    "measure_acceptance",
    "run",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
