"""Types of option values that several commands take."""

from __future__ import annotations

import argparse
import json
from typing import Any


def json_object(text: str) -> dict[str, Any]:
    """An option's value as an object of JSON."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"expected JSON ({error.msg}), found {text!r}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected an object, found {text!r}")
    return value
