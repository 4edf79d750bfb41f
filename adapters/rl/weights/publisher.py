"""The publisher of weight digests: finds each one once, on its own thread, and answers requests."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeAlias

from holdfast.adapters.rl.weights.places import WeightsPlace
from holdfast.ckpt.errors import CkptError

_KEPT = 64


class Publisher:
    """Finds digests on its own thread, when asked for, and remembers the newest."""

    def __init__(self) -> None:
        self._known: dict[WeightsPlace, str] = {}
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="weights-published", daemon=True).start()

    def ask(
        self,
        place: WeightsPlace,
        find: Callable[[WeightsPlace], str],
        reply: Callable[[str, str], None],
    ) -> None:
        """Have ``reply`` called with (digest, "") or ("", the reason why there is none)."""
        self._jobs.put((place, find, reply))

    def close(self) -> None:
        """Stop answering."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            place, find, reply = job
            why = ""
            if place not in self._known:
                try:
                    self._known[place] = find(place)
                except CkptError as error:
                    why = str(error)
                while len(self._known) > _KEPT:
                    del self._known[next(iter(self._known))]
            reply(self._known.get(place, ""), why)


_Job: TypeAlias = tuple[WeightsPlace, Callable[[WeightsPlace], str], Callable[[str, str], None]]
