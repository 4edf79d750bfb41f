"""The part of a run in a sea of islands. Pure."""

from __future__ import annotations

import math
from typing import Final

from holdfast.elastic.events import (
    Event,
    IslandJoined,
    IslandLeft,
    TideAdopted,
    TidePublished,
    WeightsGiven,
)
from holdfast.tools.live.view import IslandView

_NEVER: Final = -math.inf
_STATES: Final = {
    "done": "left: its work is done",
    "silent": "put out: it was silent",
    "astray": "put out: it went astray",
    "lost": "lost",
}


class SeaPart:
    """Folds the events of islands."""

    def __init__(self) -> None:
        self._name = ""
        self._state = ""
        self._changed_s = _NEVER
        self._adopted: TideAdopted | None = None
        self._sent_bytes = 0
        self._fetched: dict[str, tuple[int, int]] = {}
        self._tide, self._merges, self._given, self._waited_s = 0, 0, 0, 0.0

    def apply(self, event: Event) -> None:
        """Take over an event of any kind."""
        match event:
            case IslandJoined(island=island, how=how):
                self._change(event, island, f"takes part; its weights were {how}")
                self._tide = max(self._tide, event.tide)
            case IslandLeft(island=island, why=why):
                self._change(event, island, _STATES.get(why, why))
            case TidePublished():
                self._sent_bytes += event.bytes
            case TideAdopted():
                self._fetch(event.seat, event.fetched_bytes)
                self._tide = max(self._tide, event.tide)
                self._merges += 1
                self._waited_s += event.waited_s
                if self._adopted is None or event.time_s >= self._adopted.time_s:
                    self._adopted = event
            case WeightsGiven():
                self._given += 1

    def _change(self, event: Event, island: str, state: str) -> None:
        if event.time_s >= self._changed_s:
            self._changed_s, self._name, self._state = event.time_s, island, state

    def _fetch(self, seat: str, total: int) -> None:
        """Note the total of a generation; a smaller one than before is that of the next."""
        before, now = self._fetched.get(seat, (0, 0))
        self._fetched[seat] = (before + now, total) if total < now else (before, total)

    def view(self) -> IslandView | None:
        """Return the view; None in a run that is no island."""
        if not self._name and self._adopted is None:
            return None
        newest = self._adopted
        return IslandView(
            island=self._name,
            state=self._state,
            tide=self._tide,
            step=newest.step if newest else None,
            islands=newest.islands if newest else None,
            merges=self._merges,
            waited_s=self._waited_s,
            waited_last_s=newest.waited_s if newest else None,
            sent_bytes=self._sent_bytes,
            fetched_bytes=sum(map(sum, self._fetched.values())),
            given=self._given,
        )
