"""Validation: acceptance length by real decoding, speed-up, reports. See ``docs/validation.md``."""

from .measure import measure_acceptance
from .report import AcceptanceReport
from .speed import Speed, measure_speed

__all__ = ["AcceptanceReport", "Speed", "measure_acceptance", "measure_speed"]
