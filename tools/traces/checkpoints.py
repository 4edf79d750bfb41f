"""The traces of checkpoints: each attempt to write one is a span. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from holdfast.elastic.events import (
    CheckpointCarried,
    CheckpointDone,
    CheckpointFailed,
    CheckpointProgress,
    CheckpointRetried,
    CheckpointSkipped,
    CheckpointStarted,
    Event,
    JobStarted,
    WorkerStarted,
)
from holdfast.tools.traces.spans import ROOT, SpanMark, Tellers, TraceSpan

_MOST_OPEN: Final = 16
_MOST_MARKS: Final = 64


@dataclass(slots=True)
class _Writing:
    """A checkpoint under way; ``since_s`` is the start of this attempt."""

    step: int
    start_s: float
    since_s: float
    nbytes: int = 0
    attempt: int = 1
    marks: list[SpanMark] = field(default_factory=list)


@dataclass(slots=True)
class CheckpointTraces:
    """Folds events into the spans of checkpoints; at most 16 are under way."""

    run: str = ""
    _tellers: Tellers = field(default_factory=Tellers)
    _writing: dict[int, _Writing] = field(default_factory=dict)

    def add(self, event: Event) -> Iterator[TraceSpan]:
        """Yield the spans that an event completes."""
        match event:
            case JobStarted(run=run):
                self.run = run
            case WorkerStarted():
                self._tellers.add(event)
            case CheckpointStarted(step=step, bytes=nbytes):
                found = self._found(step, event.time_s)
                found.nbytes = nbytes
            case CheckpointCarried(step=step, rebuilt=ranks):
                found = self._found(step, event.time_s)
                self._mark(found, event, ranks_rebuilt=len(ranks))
            case CheckpointProgress(step=step, bytes=nbytes):
                self._mark(self._found(step, event.time_s), event, bytes=nbytes)
            case CheckpointRetried(step=step, error=error):
                found = self._found(step, event.time_s)
                yield self._attempt(found, event, error=error)
                found.attempt, found.since_s = found.attempt + 1, event.time_s
            case CheckpointDone(step=step, seconds=seconds, bytes=nbytes):
                found = self._found(step, event.time_s - seconds)
                found.nbytes = nbytes
                yield from self._over(found, event)
            case CheckpointFailed(step=step, error=error):
                yield from self._over(self._found(step, event.time_s), event, error=error)
            case CheckpointSkipped(step=step, reason=reason):
                found = self._found(step, event.time_s)
                self._mark(found, event, reason=reason)
                del self._writing[step]
                yield self._root(found, event, error="")

    def close(self, time_s: float) -> Iterator[TraceSpan]:
        """Yield the spans of checkpoints that were not complete at the end."""
        for found in list(self._writing.values()):
            event = CheckpointStarted(step=found.step, bytes=found.nbytes, time_s=time_s)
            yield from self._over(found, event, error="the job ended before it was durable")

    def _found(self, step: int, start_s: float) -> _Writing:
        if step not in self._writing:
            while len(self._writing) >= _MOST_OPEN:
                del self._writing[next(iter(self._writing))]
            self._writing[step] = _Writing(step, start_s, start_s)
        return self._writing[step]

    def _mark(self, found: _Writing, event: Event, **about: str | int) -> None:
        facts = {f"holdfast.{name}": value for name, value in about.items()}
        if len(found.marks) < _MOST_MARKS:
            found.marks.append(SpanMark(name=event.kind, time_s=event.time_s, about={**facts}))

    def _over(self, found: _Writing, event: Event, *, error: str = "") -> Iterator[TraceSpan]:
        del self._writing[found.step]
        yield self._attempt(found, event, error=error)
        yield self._root(found, event, error=error)

    def _attempt(self, found: _Writing, event: Event, *, error: str) -> TraceSpan:
        return TraceSpan(
            run=self.run,
            trace=f"checkpoint {found.step}",
            key=f"write {found.attempt}",
            parent=ROOT,
            name="write",
            start_s=found.since_s,
            end_s=max(found.since_s, event.time_s),
            teller=self._tellers.of(event),
            about={"holdfast.step": found.step, "holdfast.attempt": found.attempt},
            error=error,
        )

    def _root(self, found: _Writing, event: Event, *, error: str) -> TraceSpan:
        return TraceSpan(
            run=self.run,
            trace=f"checkpoint {found.step}",
            key=ROOT,
            parent="",
            name="checkpoint",
            start_s=found.start_s,
            end_s=max(found.start_s, event.time_s),
            teller=self._tellers.of(event),
            about={
                "holdfast.step": found.step,
                "holdfast.bytes": found.nbytes,
                "holdfast.result": event.kind.removeprefix("checkpoint_"),
            },
            marks=tuple(found.marks),
            error=error,
        )
