"""Slow calls off the loop: one thread that runs them in order and delivers what came of them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeAlias, TypeVar

from holdfast.ckpt.errors import HoldfastError
from holdfast.elastic.agent.inbox import Inbox

_T = TypeVar("_T")
_Job: TypeAlias = Callable[[], None]


class Background:
    """Runs jobs one after another; their results reach the loop through its inbox."""

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
        """Run ``job`` when all before it are done, then ``then`` or ``failed`` on the loop."""

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
        """End after the job under way, waiting at most ``timeout_s`` for it."""
        self._jobs.put(None)
        self._thread.join(timeout_s)
