"""Probes of the sidecars of other nodes, to find the nodes that this machine can reach.

Probes take the path that sidecars use among themselves and ranks use in a group: from this machine
to that address. The process answers, not the kernel, which accepts connections even for a stopped
process.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping
from typing import Final

from holdfast.ckpt.transport import RunKey, answers
from holdfast.elastic.agent.inbox import Background, Inbox
from holdfast.elastic.decisions.probing import ProbedNode, Probing
from holdfast.elastic.membership.view import JobView

AT_ONCE: Final = 64
TRIES_S: Final = (1.0, 2.0)
"""Time limits of an answer, at the first try and at the next."""


class Reach:
    """Finds the nodes that this node reaches, on a thread; its methods run on the agent's loop.

    ``probing`` holds the results.
    """

    def __init__(self, node: str, *, key: RunKey, inbox: Inbox) -> None:
        self.probing = Probing(node)
        self._key, self._inbox = key, inbox
        self._background: Background | None = None
        self._over = threading.Event()

    def look(self, view: JobView, *, waits: bool, now_s: float) -> None:
        """Probe the nodes that are due, see `Probing.due`; answers come back to the loop."""
        due = self.probing.due(view, waits=waits, now_s=now_s)
        if not due:
            return
        if self._background is None:  # most nodes never probe
            self._background = Background(self._inbox, name="reach")
        self._background.submit(
            lambda: ask_all(due, self._key, over=self._over),
            then=self._answered,
            failed=lambda _: self._answered(frozenset(due)),  # a missing answer is no failure
        )

    def _answered(self, names: frozenset[str]) -> None:
        self.probing.answered(names, now_s=time.monotonic())

    def close(self) -> None:
        """Stop probing."""
        self._over.set()


def ask_all(
    probed: Mapping[str, ProbedNode], key: RunKey, *, over: threading.Event
) -> frozenset[str]:
    """Return the nodes that answer; probe at most `AT_ONCE` at the same time.

    A node that does not answer is probed once more. No further probes start once ``over`` is set.
    """
    found: set[str] = set()
    for timeout_s in TRIES_S:
        left: queue.SimpleQueue[str] = queue.SimpleQueue()
        for name in probed:
            if name not in found:
                left.put(name)

        def work(left: queue.SimpleQueue[str] = left, timeout_s: float = timeout_s) -> None:
            while not over.is_set():
                try:
                    name = left.get_nowait()
                except queue.Empty:
                    return
                if answers(probed[name].address, key, timeout_s=timeout_s):
                    found.add(name)

        threads = [
            threading.Thread(target=work, name="reach-ask", daemon=True)
            for _ in range(min(AT_ONCE, left.qsize()))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return frozenset(found)
