"""The watches that wait at the embedded coordinator, by what they watch.

Thousands wait for the same changes: a prefix is looked at once for all that wait there.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from holdfast.ckpt.transport import Request
from holdfast.elastic.coordinator.base import KeyEvent

EventsAfter = Callable[[str, int], Sequence[KeyEvent]]
"""Returns the changes under a prefix that are newer than a revision."""


@dataclass(slots=True, eq=False)
class ServedWatch:
    """A request that waits, until a time of the server's clock, for changes after a revision."""

    request: Request
    prefix: str
    after: int
    deadline_s: float


@dataclass(slots=True)
class _Waiting:
    """Those that watch one prefix: none of them has missed a change up to the revision ``seen``."""

    seen: int
    watches: dict[bytes, ServedWatch] = field(default_factory=dict)


class WaitingWatches:
    """At most one watch for each client socket; one thread at a time calls this."""

    def __init__(self) -> None:
        self._at: dict[str, _Waiting] = {}
        self._of: dict[bytes, ServedWatch] = {}
        self._deadlines: list[tuple[float, int, ServedWatch]] = []
        self._numbers = itertools.count()

    def add(self, watch: ServedWatch) -> None:
        """Let the watch of a socket that has none wait; there is no change for it yet."""
        peer = watch.request.peer
        self._of[peer] = watch
        self._at.setdefault(watch.prefix, _Waiting(watch.after)).watches[peer] = watch
        heapq.heappush(self._deadlines, (watch.deadline_s, next(self._numbers), watch))

    def drop(self, peer: bytes) -> None:
        """Forget a socket's watch, if it has one: it was abandoned, or is answered."""
        if (watch := self._of.pop(peer, None)) is not None:
            waiting = self._at[watch.prefix]
            del waiting.watches[peer]
            if not waiting.watches:
                del self._at[watch.prefix]

    def over(self, now_s: float) -> list[ServedWatch]:
        """Remove and return the watches whose time is over."""
        found = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            watch = heapq.heappop(self._deadlines)[-1]
            if self._of.get(watch.request.peer) is watch:
                self.drop(watch.request.peer)
                found.append(watch)
        return found

    def changed(
        self, events: EventsAfter, *, revision: int
    ) -> list[tuple[Sequence[KeyEvent], list[ServedWatch]]]:
        """Remove and return the watches for which there are ``events`` up to ``revision``."""
        answers = []
        for prefix, waiting in list(self._at.items()):
            if events(prefix, waiting.seen):
                places: dict[int, list[ServedWatch]] = {}
                for watch in waiting.watches.values():
                    places.setdefault(max(watch.after, waiting.seen), []).append(watch)
                for place, watches in places.items():
                    if found := events(prefix, place):
                        answers.append((found, watches))
                        for watch in watches:
                            self.drop(watch.request.peer)
            waiting.seen = revision
        return answers
