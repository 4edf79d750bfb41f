"""Spans as values, and the numbers by which every reader of a job calls the same span. Pure."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from holdfast.elastic.events import Event, WorkerStarted
from holdfast.elastic.membership.view import role_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanMark:
    """A moment within a span."""

    name: str
    time_s: float
    about: dict[str, str | int | float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Teller:
    """The process that a span is about: ``pid`` is 0 where the events do not tell it."""

    node: str
    role: str
    seat: str = ""
    pid: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSpan:
    """A part of a trace, from ``start_s`` to ``end_s`` in seconds since 1970.

    ``trace`` and ``key`` name the trace and the span in it within a run, ``parent`` is the key of
    the span around it, empty for the outermost. ``links`` are the outermost spans of other traces.
    ``error`` is empty where all went well.
    """

    run: str
    trace: str
    key: str
    parent: str
    name: str
    start_s: float
    end_s: float
    teller: Teller
    about: dict[str, str | int | float] = field(default_factory=dict)
    marks: tuple[SpanMark, ...] = ()
    links: tuple[str, ...] = ()
    error: str = ""


ROOT = "root"
"""The key of the outermost span of every trace."""


def trace_number(run: str, trace: str) -> int:
    """Return the number of a trace, 128 bits: the same for every reader on every machine."""
    return int.from_bytes(hashlib.sha256(f"{run}\0{trace}".encode()).digest()[:16]) or 1


def span_number(run: str, trace: str, key: str) -> int:
    """Return the number of a span, 64 bits."""
    return int.from_bytes(hashlib.sha256(f"{run}\0{trace}\0{key}".encode()).digest()[:8]) or 1


class Tellers:
    """The processes of a job by the seats that their events name."""

    def __init__(self) -> None:
        self._pids: dict[tuple[str, str], int] = {}

    def add(self, event: WorkerStarted) -> None:
        """Remember a process that was started."""
        self._pids[event.node, event.seat] = event.pid

    def of(self, event: Event) -> Teller:
        """Return the process that an event is about: a worker if it has a seat."""
        if not event.seat:
            return Teller(node=event.node, role=event.source or "agent")
        pid = self._pids.get((event.node, event.seat), 0)
        return Teller(node=event.node, role=role_of(event.seat), seat=event.seat, pid=pid)
