"""The next batches, prepared in a background thread while the trainer works on this one, and memory for them."""

from __future__ import annotations

import math
import mmap
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
_END = object()
LEAST_BYTES = 2**20
"""A smaller tensor is allocated as usual."""


class Prefetcher:
    """Runs ``make`` over a list of work in one thread, at most ``depth`` results ahead.

    Args:
        depth: results that may wait; memory is bounded by ``depth + 2`` of them.

    Attributes:
        waited: seconds that the consumer has waited for results so far.
        peak: the most results that waited at once.
    """

    def __init__(self, depth: int):
        self.depth = depth
        self.waited = 0.0
        self.peak = 0

    def run(self, work: Sequence, make: Callable[[object], T], cancel: Callable[[], None] | None = None) -> Iterator[T]:
        """Results in the order of ``work``; an exception of ``make`` is raised here, at its place in the order.

        Closing the iterator ends the thread after the result that it is making, which ``cancel`` breaks off.
        """
        ready: queue.Queue = queue.Queue(maxsize=self.depth)
        stop = threading.Event()

        def put(item) -> bool:
            while not stop.is_set():
                try:
                    ready.put(item, timeout=0.1)
                    self.peak = max(self.peak, ready.qsize())
                    return True
                except queue.Full:
                    continue
            return False

        def produce():
            try:
                for item in work:
                    if not put((make(item), None)):
                        return
                put((_END, None))
            except BaseException as error:  # handed to the consumer, which raises it
                put((None, error))

        thread = threading.Thread(target=produce, name="feature-prefetch", daemon=True)
        thread.start()
        try:
            while True:
                begun = time.perf_counter()
                result, error = ready.get()
                self.waited += time.perf_counter() - begun
                if error is not None:
                    raise error
                if result is _END:
                    return
                yield result
        finally:
            stop.set()
            if cancel is not None:
                cancel()
            thread.join()


def _references(things: list, place: int) -> int:
    """References to one of the things in a list, those of the list and of this call among them."""
    return sys.getrefcount(things[place])


_UNUSED = _references([object()], 0)
"""What a buffer counts that no tensor uses."""


class BufferPool:
    """Tensors in memory that is used again: fresh pages cost more than the reading.

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

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
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
