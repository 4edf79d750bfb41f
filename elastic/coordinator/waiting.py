"""The watches that wait at the embedded coordinator, by what they watch.

Thousands wait for the same changes: a prefix is looked at once for all that wait there. And an
answer to all of them takes long: so it waits for a part of that time, and tells what comes until
then as well.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from holdfast.ckpt.transport import Request
from holdfast.elastic.coordinator.base import KeyEvent

GATHER_FROM: Final = 128
GATHER_EACH_S: Final = 40e-6
GATHER_MOST_S: Final = 0.1

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
class _WatchedPrefix:
    """Those that watch one prefix: none of them has missed a change up to the revision ``seen``.

    ``since_s`` is the time at which a newer change was found that they wait for others with.
    """

    seen: int
    watches: dict[bytes, ServedWatch] = field(default_factory=dict)
    since_s: float | None = None

    def gathers(self, now_s: float, *, gather_from: int) -> bool:
        """Return whether a change that there is now is to wait for others."""
        if len(self.watches) < gather_from:
            return False
        self.since_s = now_s if self.since_s is None else self.since_s
        return now_s < self.since_s + min(GATHER_EACH_S * len(self.watches), GATHER_MOST_S)


class WaitingWatches:
    """At most one watch for each client socket; one thread at a time calls this.

    From ``gather_from`` watches of one prefix on, a change waits for those that follow it.
    """

    def __init__(self, *, gather_from: int = GATHER_FROM) -> None:
        self._gather_from = gather_from
        self._at: dict[str, _WatchedPrefix] = {}
        self._of: dict[bytes, ServedWatch] = {}
        self._deadlines: list[tuple[float, int, ServedWatch]] = []
        self._numbers = itertools.count()

    def add(self, watch: ServedWatch) -> None:
        """Let the watch of a socket that has none wait; there is no change for it yet."""
        peer = watch.request.peer
        self._of[peer] = watch
        self._at.setdefault(watch.prefix, _WatchedPrefix(watch.after)).watches[peer] = watch
        heapq.heappush(self._deadlines, (watch.deadline_s, next(self._numbers), watch))

    def drop(self, peer: bytes) -> None:
        """Forget a socket's watch, if it has one: it was abandoned, or is answered."""
        if (watch := self._of.pop(peer, None)) is not None:
            waiting = self._at[watch.prefix]
            del waiting.watches[peer]
            if not waiting.watches:
                del self._at[watch.prefix]

    def over(self, now_s: float) -> list[ServedWatch]:
        """Remove and return the watches whose time is over.

        There may be changes after their ``after``, which gather others.
        """
        found = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            watch = heapq.heappop(self._deadlines)[-1]
            if self._of.get(watch.request.peer) is watch:
                watch.after = max(watch.after, self._at[watch.prefix].seen)
                self.drop(watch.request.peer)
                found.append(watch)
        return found

    def changed(
        self, events: EventsAfter, *, revision: int, now_s: float
    ) -> tuple[list[tuple[Sequence[KeyEvent], list[ServedWatch]]], bool]:
        """Remove and return the watches for which there are ``events`` up to ``revision``.

        Also return whether all are told: else call it again, with the same revision or a newer one.
        """
        answers, complete = [], True
        for prefix, waiting in list(self._at.items()):
            if events(prefix, waiting.seen):
                if waiting.gathers(now_s, gather_from=self._gather_from):
                    complete = False
                    continue
                waiting.since_s = None
                places: dict[int, list[ServedWatch]] = {}
                for watch in waiting.watches.values():
                    places.setdefault(max(watch.after, waiting.seen), []).append(watch)
                for place, watches in places.items():
                    if found := events(prefix, place):
                        answers.append((found, watches))
                        for watch in watches:
                            self.drop(watch.request.peer)
            waiting.seen = revision
        return answers, complete
