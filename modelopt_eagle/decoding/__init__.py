"""Decoding with a draft head: drafting chains and trees, verification, acceptance. See ``docs/decoding.md``.

``CaptureBuffer``, ``TreeSlots`` and ``relocate_cache`` are for engines that have their own batches and caches. Each
name is imported when it is first asked for: the first two need no transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modelopt_eagle.decoding.capture_buffer import CaptureBuffer
    from modelopt_eagle.decoding.generator import PlainGenerator, PseudoSpeculativeGenerator
    from modelopt_eagle.decoding.options import SamplingOptions
    from modelopt_eagle.decoding.output import GenerationOutput, Timings
    from modelopt_eagle.decoding.relocate import relocate_cache
    from modelopt_eagle.decoding.slots import TreeSlots
    from modelopt_eagle.draft.plan import DraftPlan

_HOMES = {
    "CaptureBuffer": "modelopt_eagle.decoding.capture_buffer",
    "DraftPlan": "modelopt_eagle.draft.plan",
    "GenerationOutput": "modelopt_eagle.decoding.output",
    "PlainGenerator": "modelopt_eagle.decoding.generator",
    "PseudoSpeculativeGenerator": "modelopt_eagle.decoding.generator",
    "SamplingOptions": "modelopt_eagle.decoding.options",
    "Timings": "modelopt_eagle.decoding.output",
    "TreeSlots": "modelopt_eagle.decoding.slots",
    "relocate_cache": "modelopt_eagle.decoding.relocate",
}

__all__ = [
    "CaptureBuffer",
    "DraftPlan",
    "GenerationOutput",
    "PlainGenerator",
    "PseudoSpeculativeGenerator",
    "SamplingOptions",
    "Timings",
    "TreeSlots",
    "relocate_cache",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
