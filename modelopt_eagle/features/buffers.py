"""Memory of batches, used again when nobody holds a batch that lies in it: fresh pages cost more than the reading."""

from __future__ import annotations

import math
import mmap
import sys
import threading
from collections.abc import Sequence

import torch

LEAST_BYTES = 2**20
"""A smaller tensor is allocated as usual."""


def _references(things: list, place: int) -> int:
    """References to one of the things in a list, those of the list and of this call among them."""
    return sys.getrefcount(things[place])


_UNUSED = _references([object()], 0)
"""What a buffer counts that no tensor uses."""


class BufferPool:
    """Tensors in memory that is used again.

    A tensor keeps a reference to its buffer until its storage is gone, whoever made views of it; the pool hands a
    buffer out again only when its own reference is the last one. A consumer may keep batches as long as it likes: the
    pool then makes new buffers, and forgets those beyond ``most``.

    Args:
        most: buffers kept.
    """

    def __init__(self, most: int):
        self._most = most
        self._buffers: list[mmap.mmap] = []
        self._lock = threading.Lock()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor on the CPU."""
        size = math.prod(shape) * dtype.itemsize
        if size < LEAST_BYTES:
            return torch.empty(shape, dtype=dtype)
        with self._lock:
            buffer = self._free(size)
            return torch.frombuffer(buffer, dtype=torch.uint8, count=size).view(dtype).view(shape)

    def _free(self, size: int) -> mmap.mmap:
        """The smallest unused buffer that is large enough, or a new one in place of an unused one that is not."""
        best, small = None, None
        for place in range(len(self._buffers)):
            if _references(self._buffers, place) > _UNUSED:
                continue
            length = len(self._buffers[place])
            if length < size:
                small = place
            elif best is None or length < len(self._buffers[best]):
                best = place
        if best is not None:
            return self._buffers[best]
        buffer = mmap.mmap(-1, size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            buffer.madvise(mmap.MADV_HUGEPAGE)
        if small is not None:
            self._buffers[small] = buffer
        elif len(self._buffers) < self._most:
            self._buffers.append(buffer)
        return buffer
