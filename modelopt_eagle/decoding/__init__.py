"""Decoding with a draft head: drafting chains and trees, verification, acceptance. See ``docs/decoding.md``."""

from .generator import PlainGenerator, PseudoSpeculativeGenerator
from .options import DraftPlan, SamplingOptions
from .output import GenerationOutput, Timings

__all__ = [
    "DraftPlan",
    "GenerationOutput",
    "PlainGenerator",
    "PseudoSpeculativeGenerator",
    "SamplingOptions",
    "Timings",
]
