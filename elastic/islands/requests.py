"""The open requests for the sea's weights, as a member of the sea sees them.

The members answer in turn, by their names. A request whose island is gone is removed by the first
of them, and by the next ones a moment later if the first does not; so are weights that nobody waits
for any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

from holdfast.elastic.islands.mailbox import Mailbox
from holdfast.elastic.islands.messages import Asked

_TURN_BEATS: Final = 2
_LOADING: Final = 10
"""An island that loads the weights gives no sign; it has so many times the patience."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpenRequest:
    """A request, when it was first seen, and when a sign of it was new."""

    request: Asked
    since_s: float
    stirred_s: float


class OpenRequests:
    """The requests, for the island ``me``.

    ``beat_s`` are the seconds between two signs of life. ``remove`` gets the root of weights that
    nobody waits for any more, and removes them.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        *,
        me: str,
        beat_s: float,
        patience_s: float,
        remove: Callable[[str], None],
    ) -> None:
        self._mailbox, self._me, self._remove = mailbox, me, remove
        self._beat_s, self._patience_s = beat_s, patience_s
        self._open: dict[str, _OpenRequest] = {}
        self._swept_s = -float("inf")

    def look(self, now: float, *, missed_s: float = 0.0) -> set[str]:
        """Read the requests, and return the islands that gave a sign of life by one.

        ``missed_s`` is time in which this island could not look.
        """
        found, stirred = {}, set[str]()
        for request in self._mailbox.asked():
            known = self._open.get(request.id)
            if known is None or request != known.request:
                since_s = now if known is None else known.since_s
                known = _OpenRequest(request=request, since_s=since_s, stirred_s=now)
                stirred.add(request.island)
            elif missed_s > 0:
                known = replace(known, stirred_s=min(known.stirred_s + missed_s, now))
            found[request.id] = known
        self._open = found
        return stirred

    def mine(self, members: Iterable[str], now: float) -> Asked | None:
        """Return a request that it is this island's turn to answer."""
        for each in list(self._open.values()):
            turn_s = self._turn_s(members, each.request)
            if turn_s is None or self._mailbox.given(each.request) is not None:
                continue
            if now - each.since_s >= turn_s:
                return each.request
        return None

    def tidy(self, members: Iterable[str], now: float) -> None:
        """Remove requests whose island is gone, and what is left of closed ones."""
        for each in list(self._open.values()):
            turn_s = self._turn_s(members, each.request)
            silent_s = now - each.stirred_s - (turn_s or 0.0)
            if turn_s is None or silent_s <= self._patience_s:
                continue
            is_answered = self._mailbox.given(each.request) is not None
            if not is_answered or silent_s > _LOADING * self._patience_s:
                self._mailbox.close_request(each.request)
                self._clear(each.request.id)
                self._open.pop(each.request.id, None)
        if self._me == min(members, default="") and now - self._swept_s > self._patience_s:
            self._sweep(now)

    def _sweep(self, now: float) -> None:
        """Remove the answers to closed requests, whoever gave them."""
        answered = self._mailbox.answered()  # before the open ones: a closed one never opens again
        still = {request.id for request in self._mailbox.asked()}
        for each in answered:
            if each not in still:
                self._clear(each)
        self._swept_s = now

    def _clear(self, request: str) -> None:
        for root in self._mailbox.given_roots(request):
            self._remove(root)
        self._mailbox.forget_answer(request)

    def _turn_s(self, members: Iterable[str], request: Asked) -> float | None:
        """Return for how many seconds members before this one may act; None: it may not."""
        able = sorted(set(members) - {request.island})
        return able.index(self._me) * _TURN_BEATS * self._beat_s if self._me in able else None
