"""Decoding with a draft head: drafting chains and trees, verification, acceptance. See ``docs/decoding.md``.

``CaptureBuffer``, ``TreeSlots`` and ``relocate_cache`` are for engines that have their own batches and caches.
"""

from modelopt_eagle.decoding.capture_buffer import CaptureBuffer
from modelopt_eagle.decoding.generator import PlainGenerator, PseudoSpeculativeGenerator
from modelopt_eagle.decoding.options import SamplingOptions
from modelopt_eagle.decoding.output import GenerationOutput, Timings
from modelopt_eagle.decoding.relocate import relocate_cache
from modelopt_eagle.decoding.slots import TreeSlots
from modelopt_eagle.draft.plan import DraftPlan

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
