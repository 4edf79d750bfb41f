"""The queue through which helper threads reach the agent's loop, and a thread for slow calls."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator
from typing import TypeAlias, TypeVar

from holdfast.ckpt.errors import HoldfastError

Delivery: TypeAlias = Callable[[], None]
"""A function to run on the loop's thread."""


class Inbox:
    """Takes deliveries from any thread; the loop runs them in order."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Return a descriptor that is readable when a delivery waits."""
        return self._wake

    def post(self, delivery: Delivery) -> None:
        """Make the loop run ``delivery`` soon; callable from any thread."""
        self._queue.put(delivery)
        os.eventfd_write(self._wake, 1)

    def wake(self) -> None:
        """Wake the loop without a delivery; callable from any thread."""
        os.eventfd_write(self._wake, 1)

    def take(self) -> Iterator[Delivery]:
        """Yield the deliveries so far; later ones wait for the next call."""
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return
        for _ in range(self._queue.qsize()):
            yield self._queue.get()


_T = TypeVar("_T")
_Job: TypeAlias = Callable[[], None]


class Background:
    """A thread that runs slow calls in order; their results reach the loop through its inbox."""

    def __init__(self, inbox: Inbox, *, name: str) -> None:
        self._inbox = inbox
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(
        self,
        job: Callable[[], _T],
        *,
        then: Callable[[_T], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Run ``job`` after all earlier ones, then ``then`` or ``failed`` on the loop."""

        def run() -> None:
            try:
                result = job()
            except (HoldfastError, OSError) as error:
                caught = error
                self._inbox.post(lambda: failed(caught))
            else:
                self._inbox.post(lambda: then(result))

        self._jobs.put(run)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def close(self, *, timeout_s: float) -> None:
        """End after the pending jobs; wait at most ``timeout_s`` for them."""
        self._jobs.put(None)
        self._thread.join(timeout_s)
