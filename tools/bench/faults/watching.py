"""Watching a running job's events, and waiting for conditions on them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

from holdfast.ckpt.errors import PeerError
from holdfast.elastic.events import Event, StepDone, of_kind
from holdfast.elastic.events.log import EventReader

STEPS_BETWEEN: Final = 3
"""Steps that every rank makes before the next fault."""

_LIMIT_S: Final = 300.0
_POLL_S: Final = 0.02
_TOLD_LINES: Final = 12
_T = TypeVar("_T")


class Log:
    """All events of a job so far, ordered by time.

    ``ended`` returns how the job ended, "" while it runs; ``outputs`` returns the files with the
    output of its processes.
    """

    def __init__(
        self, directory: Path, *, ended: Callable[[], str], outputs: Callable[[], Sequence[Path]]
    ) -> None:
        self._reader, self._ended, self._outputs = EventReader(directory), ended, outputs
        self.events: list[Event] = []

    def until(self, look: Callable[[Sequence[Event]], _T | None], what: str) -> _T:
        """Wait until ``look`` returns a value. Raises ``PeerError`` if the job ends before."""
        deadline_s, fresh = time.monotonic() + _LIMIT_S, True
        while True:
            ended = self._ended()
            fresh |= self.read()
            if fresh and (found := look(self.events)) is not None:
                return found
            fresh = False
            if ended or time.monotonic() > deadline_s:
                how = ended or f"takes longer than {_LIMIT_S:g} s"
                raise PeerError(f"the job {how} before {what}; {self._said()}")
            time.sleep(_POLL_S)

    def read(self) -> bool:
        """Read new events; return whether there were any."""
        if fresh := self._reader.new():
            self.events = sorted([*self.events, *fresh], key=lambda event: event.time_s)
        return bool(fresh)

    def _said(self) -> str:
        lines = [
            line
            for output in self._outputs()
            for line in output.read_text(errors="replace").splitlines()[-_TOLD_LINES:]
        ]
        return "\n".join(["its last output:", *lines]) if lines else "it has no output"


def trained(events: Sequence[Event], *, since_s: float, world: int) -> bool | None:
    """Return True if ``world`` ranks have made some steps since, else None; for `Log.until`."""
    seats = [event.seat for event in of_kind(events, StepDone) if event.began_s > since_s]
    enough = [seat for seat in set(seats) if seats.count(seat) >= STEPS_BETWEEN]
    return True if len(enough) >= world else None
