"""The traces of joins, of trainers that come to running ones and of rollout workers' work. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from holdfast.elastic.events import (
    Detected,
    Event,
    JobStarted,
    RankReformed,
    RolloutRecovered,
    StatePrefetched,
    StateRestored,
    StepDone,
    WorkerExited,
    WorkerRehearsed,
    WorkerStarted,
)
from holdfast.elastic.membership.records import TRAINER
from holdfast.elastic.membership.view import role_of
from holdfast.tools.traces.generations import trace_of
from holdfast.tools.traces.spans import ROOT, Tellers, TraceSpan


@dataclass(slots=True)
class _Joining:
    """A trainer that was started and has not completed a step."""

    started: WorkerStarted
    ready_s: float = 0.0
    asked_s: float = 0.0
    parts: list[tuple[str, float, float, str]] = field(default_factory=list)


@dataclass(slots=True)
class JoinTraces:
    """Folds events into the spans of joins: bounded by the number of seats.

    The trainers of the first generation join nobody: they have no such trace.
    """

    run: str = ""
    _tellers: Tellers = field(default_factory=Tellers)
    _joining: dict[str, _Joining] = field(default_factory=dict)
    _lost_s: dict[str, Detected] = field(default_factory=dict)

    def add(self, event: Event) -> Iterator[TraceSpan]:
        """Yield the spans that an event completes."""
        match event:
            case JobStarted(run=run):
                self.run = run
            case WorkerStarted(seat=seat):
                self._tellers.add(event)
                if role_of(seat) == TRAINER:
                    self._joining[seat] = _Joining(event, ready_s=event.time_s)
            case WorkerExited(seat=seat, pid=pid):
                if seat in self._joining and self._joining[seat].started.pid == pid:
                    del self._joining[seat]
            case Detected(what="join", victim=seat) if seat in self._joining:
                found = self._joining[seat]
                start_s, found.asked_s = found.ready_s, event.time_s
                found.parts.append(("wait for its turn", start_s, event.time_s, ""))
            case Detected(victim=seat) if "/" in seat and role_of(seat) != TRAINER:
                self._lost_s.setdefault(seat, event)
            case RolloutRecovered():
                yield from self._recovered(event)
            case _ if event.seat in self._joining:
                yield from self._of_joining(self._joining[event.seat], event)

    def close(self, time_s: float) -> Iterator[TraceSpan]:
        """Yield the joins that were under way at the end."""
        for found in [each for each in self._joining.values() if each.asked_s]:
            yield from self._spans(found, time_s, link=(), error="the job ended before it joined")

    def _of_joining(self, found: _Joining, event: Event) -> Iterator[TraceSpan]:
        match event:
            case WorkerRehearsed(seconds=seconds, error=error):
                begun_s = event.time_s - seconds
                found.parts.append(("start", found.started.time_s, begun_s, ""))
                found.parts.append(("rehearse", begun_s, event.time_s, error))
                found.ready_s = event.time_s
            case StatePrefetched(seconds=seconds):
                found.parts.append(("prefetch", event.time_s - seconds, event.time_s, ""))
            case RankReformed():
                since_s = found.asked_s or found.ready_s
                found.parts.append(("enter the generation", since_s, event.time_s, ""))
            case StateRestored(seconds=seconds):
                found.parts.append(("restore", event.time_s - seconds, event.time_s, ""))
            case StepDone(generation=number):
                del self._joining[event.seat]
                if found.asked_s:
                    found.parts.append(("first step", event.began_s, event.time_s, ""))
                    yield from self._spans(found, event.time_s, link=(trace_of(number),))

    def _spans(
        self, found: _Joining, end_s: float, *, link: tuple[str, ...], error: str = ""
    ) -> Iterator[TraceSpan]:
        started = found.started
        trace = f"join {started.seat} {started.node} {started.pid}"
        teller = self._tellers.of(started)
        for number, (name, start_s, part_end_s, wrong) in enumerate(found.parts):
            yield TraceSpan(
                run=self.run,
                trace=trace,
                key=f"{name} {number}",
                parent=ROOT,
                name=name,
                start_s=start_s,
                end_s=max(start_s, part_end_s),
                teller=teller,
                error=wrong,
            )
        yield TraceSpan(
            run=self.run,
            trace=trace,
            key=ROOT,
            parent="",
            name="join",
            start_s=started.time_s,
            end_s=max(started.time_s, end_s),
            teller=teller,
            about={"holdfast.seat": started.seat, "holdfast.attempt": started.attempt},
            links=link,
            error=error,
        )

    def _recovered(self, event: RolloutRecovered) -> Iterator[TraceSpan]:
        lost = self._lost_s.pop(event.worker, None)
        start_s = event.time_s if lost is None else lost.time_s
        yield TraceSpan(
            run=self.run,
            trace=f"rollout {event.worker} {start_s!r}",
            key=ROOT,
            parent="",
            name="recovery of a rollout worker",
            start_s=start_s,
            end_s=max(start_s, event.time_s),
            teller=self._tellers.of(event),
            about={
                "holdfast.worker": event.worker,
                "holdfast.samples": event.samples,
                "holdfast.unfinished": event.unfinished,
                "holdfast.tokens": event.tokens,
            },
        )
