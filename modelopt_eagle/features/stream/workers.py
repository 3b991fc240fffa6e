"""Threads that ask servers; a process that ends does not wait for them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue


class Workers:
    """Like a ``ThreadPoolExecutor``, whose threads an ending interpreter joins; a server may be silent for minutes.

    Args:
        count: threads.
        name: of the threads.
    """

    def __init__(self, count: int, name: str):
        self._tasks: SimpleQueue = SimpleQueue()
        for number in range(count):
            threading.Thread(target=_work, args=(self._tasks,), name=f"{name}-{number}", daemon=True).start()
        weakref.finalize(self, _end, self._tasks, count)

    def submit(self, function: Callable, *arguments) -> Future:
        """Have a thread call ``function``; what it returns or raises is the future's."""
        future: Future = Future()
        self._tasks.put((future, function, arguments))
        return future


def _work(tasks: SimpleQueue) -> None:
    """A thread: holds the queue alone, so that its owner can be forgotten."""
    while (task := tasks.get()) is not None:
        future, function, arguments = task
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(function(*arguments))
        except BaseException as error:  # handed to who waits for it
            future.set_exception(error)
        del task, future, function, arguments  # not kept while waiting for the next


def _end(tasks: SimpleQueue, count: int) -> None:
    for _ in range(count):
        tasks.put(None)
