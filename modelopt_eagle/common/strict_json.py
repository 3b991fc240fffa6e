"""JSON that others wrote: whatever it holds, it is a value or a ``ValueError``."""

from __future__ import annotations

import json
from typing import Any, NoReturn


def parse_json(text: str | bytes | bytearray, *, finite: bool = True) -> Any:
    """The value of a JSON text.

    Args:
        text: JSON; bytes must be UTF-8.
        finite: refuse ``NaN``, ``Infinity`` and numbers that overflow to it (Python's own writer makes the first two).

    Returns:
        what ``json.loads`` returns.

    Raises:
        ValueError: no JSON, not UTF-8, nested more deeply than Python reads, a number with thousands of digits, or one
            that is not finite.
    """
    try:
        if not isinstance(text, str):
            text = bytes(text).decode("utf-8")
        return json.loads(
            text,
            parse_constant=_refuse_constant if finite else None,
            parse_float=_finite_float if finite else None,
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _finite_float(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"the number {text[:40]} is too large")
    return value
