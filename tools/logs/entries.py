"""One line of a run's history: an event in words, or a line that a process printed. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from datetime import datetime, tzinfo
from typing import Any, Final

import msgspec

from holdfast.ckpt.events import ENVELOPE
from holdfast.elastic.events import Event, UserEvent
from holdfast.tools.printing import json_text
from holdfast.tools.show.levels import Importance, importance
from holdfast.tools.show.sentences import sentence

OUTPUT: Final = "output"
"""The kind of a line that a process printed."""

DAMAGED: Final = "damaged"
"""The kind of a line of an event file that is no event."""

_OUT_OF_ORDER: Final = 4096
"""Lines of a file by which one may stand behind its time: a worker's events come in bundles."""


class HistoryLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the history.

    ``time_s`` is in seconds since 1970; ``seat`` is the worker's, ``agent``, ``launcher`` or
    ``sidecar``. ``event`` is None for output and for damaged lines; then ``text`` is the line.
    """

    time_s: float
    node: str
    seat: str
    kind: str
    level: Importance
    text: str = ""
    event: Event | None = None

    @classmethod
    def of(cls, event: Event) -> HistoryLine:
        """Return the entry of an event."""
        return cls(
            time_s=event.time_s,
            node=event.node,
            seat=event.seat or event.source,
            kind=event.kind,
            level=importance(event),
            event=event,
        )

    @property
    def message(self) -> str:
        """The sentence of the event, or the line."""
        return sentence(self.event) if self.event is not None else self.text


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the history that was asked for; empty sets stand for all."""

    since_s: float = 0.0
    least: Importance = Importance.INFO
    nodes: frozenset[str] = frozenset()
    kinds: frozenset[str] = frozenset()

    def takes(self, entry: HistoryLine) -> bool:
        """Say whether an entry is wanted: of a node are also the events that are about it."""
        if entry.time_s < self.since_s or entry.level < self.least:
            return False
        if self.kinds and entry.kind not in self.kinds:
            return False
        return not self.nodes or bool(self.nodes & {entry.node, *_about(entry.event)})


def _about(event: Event | None) -> Iterator[str]:
    """Yield the nodes that another one tells of."""
    for name in ("victim", "on"):
        told = getattr(event, name, "")
        if isinstance(told, str) and told:
            yield told.removesuffix("/sidecar")


def in_order(entries: Iterable[HistoryLine]) -> Iterator[HistoryLine]:
    """Yield the entries of one file by time, where each is out of place by a few thousand lines."""
    waiting: list[tuple[float, int, HistoryLine]] = []
    for number, entry in enumerate(entries):
        heapq.heappush(waiting, (entry.time_s, number, entry))
        if len(waiting) > _OUT_OF_ORDER:
            yield heapq.heappop(waiting)[2]
    while waiting:
        yield heapq.heappop(waiting)[2]


def merged(files: Iterable[Iterable[HistoryLine]]) -> Iterator[HistoryLine]:
    """Yield the entries of many files by time; each is read as far as that needs."""
    return heapq.merge(*map(in_order, files), key=lambda entry: entry.time_s)


def as_text(entry: HistoryLine, *, zone: tzinfo | None = None) -> str:
    """Return the line for people; ``zone`` is that of the times, None for the machine's own."""
    when = datetime.fromtimestamp(entry.time_s, zone).isoformat(sep=" ", timespec="milliseconds")
    level = "" if entry.level is Importance.INFO else f"{entry.level.word.upper()} "
    mark, message = "| " if entry.kind == OUTPUT else "", entry.message
    named = not entry.seat or entry.seat == entry.node or message.startswith(entry.seat)
    who = entry.node if named and not mark else f"{entry.node} {entry.seat}"
    return f"{when[:23]} {who}: {level}{mark}{message}"


def as_json(entry: HistoryLine) -> str:
    """Return the line for machines: an object whose ``fields`` are those of the event's kind."""
    content: dict[str, Any] = {
        "time_s": entry.time_s,
        "level": entry.level.word,
        "node": entry.node,
        "seat": entry.seat,
        "kind": entry.kind,
        "message": entry.message,
        "fields": _fields(entry.event),
    }
    return json_text(content)


def _fields(event: Event | None) -> dict[str, Any]:
    if event is None:
        return {}
    if isinstance(event, UserEvent):
        return dict(event.fields)
    found = msgspec.structs.asdict(event)
    return {name: value for name, value in found.items() if name not in ENVELOPE}
