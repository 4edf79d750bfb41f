"""How the agent's helper threads reach its loop: a queue with a file descriptor to select on."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Iterator
from typing import TypeAlias

Delivery: TypeAlias = Callable[[], None]
"""Something to do on the loop's thread."""


class Inbox:
    """Takes deliveries from any thread; the loop runs them in order."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Readable when something was delivered."""
        return self._wake

    def post(self, delivery: Delivery) -> None:
        """Have the loop run ``delivery`` soon; callable from any thread."""
        self._queue.put(delivery)
        os.eventfd_write(self._wake, 1)

    def take(self) -> Iterator[Delivery]:
        """Yield what was delivered until now; what comes of it has its turn after others."""
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return
        for _ in range(self._queue.qsize()):
            yield self._queue.get()
