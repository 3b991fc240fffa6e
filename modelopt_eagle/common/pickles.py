"""Pickles of tensors that others wrote: read without running anything that is in them."""

from __future__ import annotations

import re
from typing import Any

import torch


def load_tensors(source: Any, **options: Any) -> Any:
    """What ``torch.load`` gives for a file of tensors and plain values; nothing of it is run.

    Args:
        source: a path or an open binary file.
        options: of ``torch.load``, such as ``mmap``.

    Raises:
        ValueError: it is damaged, or holds more than tensors and plain values.
    """
    try:
        return torch.load(source, map_location="cpu", weights_only=True, **options)
    except Exception as error:  # torch, zipfile and pickle raise many kinds; some advise to run what is in the file
        found = re.search(r"Unsupported [^\n.]*|GLOBAL [\w.]+", str(error))
        why = found.group(0).strip() if found else type(error).__name__
        raise ValueError(f"it is damaged, or holds more than tensors and plain values ({why})") from error
