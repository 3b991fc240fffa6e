"""Prepare the next batches in a background thread while the trainer works on this one."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")
_END = object()


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

    def run(self, work: Sequence, make: Callable[[object], T]) -> Iterator[T]:
        """Results in the order of ``work``; an exception of ``make`` is raised here, at its place in the order.

        Closing the iterator ends the thread after the result that it is making.
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
            thread.join()
