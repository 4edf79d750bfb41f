"""The events of a run in the order of their times, for readers that count or that pair them."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from holdfast.ckpt.descriptors import allow_many
from holdfast.ckpt.errors import NotFoundError
from holdfast.elastic.events import Event, EventFormatError, JobEnded, JobStarted
from holdfast.elastic.events.log import EVENTS_PATTERN, FreshLines
from holdfast.elastic.events.wire import decode_line

_AT_ONCE: Final = 1024


class OrderedEvents:
    """Reads a run directory: first its history, in bounded memory, then what appears.

    ``damaged`` counts lines that are no events. ``over`` is True from the end of the job to the
    next start. Raises ``NotFoundError`` if there is no such directory.
    """

    def __init__(self, run_dir: Path) -> None:
        if not run_dir.is_dir():
            raise NotFoundError(
                f"{run_dir}: no such directory; give the directory that `holdfast run --run-dir` "
                "got"
            )
        allow_many()  # the history has all files open
        self._lines = FreshLines(run_dir, pattern=EVENTS_PATTERN)
        self.damaged = 0
        self.over = False

    def history(self) -> Iterator[list[Event]]:
        """Yield what is there, some events at a time; to be read to its end before `new`."""
        streams = (self._decoded(lines) for _, lines in self._lines.files())
        merged = heapq.merge(*streams, key=_time_s)
        batch: list[Event] = []
        for event in merged:
            self._look(event)
            batch.append(event)
            if len(batch) >= _AT_ONCE:
                yield batch
                batch = []
        yield batch

    def new(self) -> list[Event]:
        """Return the events that appeared since the last call."""
        found = sorted(self._decoded(line for _, line in self._lines.new()), key=_time_s)
        for event in found:
            self._look(event)
        return found

    def _decoded(self, lines: Iterable[bytes]) -> Iterator[Event]:
        for line in lines:
            try:
                yield from decode_line(line)
            except EventFormatError:
                self.damaged += 1

    def _look(self, event: Event) -> None:
        if isinstance(event, JobStarted | JobEnded):
            self.over = isinstance(event, JobEnded)


def _time_s(event: Event) -> float:
    return event.time_s
