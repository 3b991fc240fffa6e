"""Decoding with a draft head: drafting chains and trees, verification, acceptance. See ``docs/decoding.md``.

``CaptureBuffer``, ``TreeSlots`` and ``relocate_cache`` are for engines that have their own batches and caches.
"""

from .capture_buffer import CaptureBuffer
from .generator import PlainGenerator, PseudoSpeculativeGenerator
from .options import DraftPlan, SamplingOptions
from .output import GenerationOutput, Timings
from .relocate import relocate_cache
from .slots import TreeSlots

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
