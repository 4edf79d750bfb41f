"""Tells what each policy version's weights must be, as found out beside training, once for each."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeAlias

from ckpt.errors import CkptError

VersionKey: TypeAlias = tuple[int, int]
"""(generation of the snapshot, policy version)."""

_KEPT = 64


class Publisher:
    """Finds digests on a thread of its own, where they are asked for, and remembers the newest."""

    def __init__(self) -> None:
        self._known: dict[VersionKey, str] = {}
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="weights-published", daemon=True).start()

    def ask(
        self,
        key: VersionKey,
        find: Callable[[int, int], str],
        reply: Callable[[str, str], None],
    ) -> None:
        """Have ``reply(digest, "")`` called, or with an empty digest and why there is none."""
        self._jobs.put((key, find, reply))

    def close(self) -> None:
        """Answer nobody any more."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            key, find, reply = job
            why = ""
            if key not in self._known:
                try:
                    self._known[key] = find(*key)
                except CkptError as error:
                    why = str(error)
                while len(self._known) > _KEPT:
                    del self._known[next(iter(self._known))]
            reply(self._known.get(key, ""), why)


_Job: TypeAlias = tuple[VersionKey, Callable[[int, int], str], Callable[[str, str], None]]
