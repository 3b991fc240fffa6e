"""Validation: acceptance length by real decoding, speed-up, reports. See ``docs/validation.md``."""

from modelopt_eagle.validation.measure import measure_acceptance
from modelopt_eagle.validation.report import AcceptanceReport
from modelopt_eagle.validation.speed import Speed, measure_speed

__all__ = ["AcceptanceReport", "Speed", "measure_acceptance", "measure_speed"]
