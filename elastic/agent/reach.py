"""Asking the sidecars of other nodes for an answer: whom this machine's network reaches.

The way is that of the sidecars among themselves, and of the ranks of a group: from this machine to
that address. What answers is the process, not the kernel that accepts connections for one that is
stopped.
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
"""How long an answer may take, at the first try and at the next."""


class Reach:
    """Whom this node reaches, found out beside the agent's loop; its methods run on the loop.

    ``probing`` knows what was found.
    """

    def __init__(self, node: str, *, key: RunKey, inbox: Inbox) -> None:
        self.probing = Probing(node)
        self._key, self._inbox = key, inbox
        self._background: Background | None = None
        self._over = threading.Event()

    def look(self, view: JobView, *, waits: bool, now_s: float) -> None:
        """Ask whoever is to be asked now, see `Probing.due`; the loop comes round with answers."""
        due = self.probing.due(view, waits=waits, now_s=now_s)
        if not due:
            return
        if self._background is None:  # most nodes never ask
            self._background = Background(self._inbox, name="reach")
        self._background.submit(
            lambda: ask_all(due, self._key, over=self._over),
            then=self._answered,
            failed=lambda _: self._answered(frozenset(due)),  # not for want of an answer
        )

    def _answered(self, names: frozenset[str]) -> None:
        self.probing.answered(names, now_s=time.monotonic())

    def close(self) -> None:
        """Ask nobody any more."""
        self._over.set()


def ask_all(
    asked: Mapping[str, ProbedNode], key: RunKey, *, over: threading.Event
) -> frozenset[str]:
    """Return who answers; at most `AT_ONCE` are asked at the same time.

    Who does not is asked once more. Nobody else is once ``over`` is set.
    """
    found: set[str] = set()
    for timeout_s in TRIES_S:
        left: queue.SimpleQueue[str] = queue.SimpleQueue()
        for name in asked:
            if name not in found:
                left.put(name)

        def work(left: queue.SimpleQueue[str] = left, timeout_s: float = timeout_s) -> None:
            while not over.is_set():
                try:
                    name = left.get_nowait()
                except queue.Empty:
                    return
                if answers(asked[name].address, key, timeout_s=timeout_s):
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
