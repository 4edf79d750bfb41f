"""The traces of generations: one for each change of the ranks, with its phases as spans. Pure.

A machine of the job may read the files of its own nodes alone. It knows the number of a generation
from its own ranks, so its spans belong to the same trace as those of the machine that proposed it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from holdfast.elastic.events import (
    Detected,
    Event,
    FaultInjected,
    FencingBegun,
    FencingDone,
    GenerationProposed,
    JobStarted,
    RankReformed,
    StateRestored,
    StepDone,
    TrainingResumed,
    WorkerStarted,
)
from holdfast.elastic.membership.records import TRAINER
from holdfast.elastic.membership.view import role_of
from holdfast.tools.traces.spans import ROOT, SpanMark, Teller, Tellers, TraceSpan

_WEAK: Final = ("sidecar_exit", "unreachable")
"""Kinds of detections that need not lead to another generation."""

_WEAK_S: Final = 60.0
_MOST_PENDING: Final = 1000


@dataclass(slots=True)
class _Open:
    """A generation that was proposed and has not completed a step."""

    proposed: GenerationProposed
    cause: str
    start_s: float
    marks: tuple[SpanMark, ...]
    newest_step: int


@dataclass(slots=True)
class _Fence:
    begun: FencingBegun
    done_s: float | None = None


@dataclass(slots=True)
class GenerationTraces:
    """Folds events into the spans of generations: bounded by the number of ranks and nodes.

    ``cause`` of a trace is ``start``, ``join``, ``notice`` or ``loss``: the gravest of what was
    detected since the generation before.
    """

    run: str = ""
    _started_s: float = 0.0
    _tellers: Tellers = field(default_factory=Tellers)
    _detected: list[Detected] = field(default_factory=list)
    _faults: list[FaultInjected] = field(default_factory=list)
    _fences: dict[str, _Fence] = field(default_factory=dict)
    _open: dict[int, _Open] = field(default_factory=dict)
    _proposed_s: dict[int, float] = field(default_factory=dict)
    _awaited: dict[str, int] = field(default_factory=dict)
    _newest: int = 0
    _step: int = 0

    def add(self, event: Event) -> Iterator[TraceSpan]:
        """Yield the spans that an event completes."""
        match event:
            case JobStarted(run=run):
                self.run, self._started_s = run, self._started_s or event.time_s
            case WorkerStarted():
                self._tellers.add(event)
            case FaultInjected():
                self._faults = [*self._faults[-_MOST_PENDING:], event]
            case Detected() if _of_trainers(event):
                self._detected = [*self._detected[-_MOST_PENDING:], event]
            case FencingBegun():
                self._fences.setdefault(event.node, _Fence(event))
            case FencingDone() if event.node in self._fences:
                self._fences[event.node].done_s = event.time_s
            case GenerationProposed():
                yield from self._on_proposed(event)
            case RankReformed(generation=number):
                yield from self._fenced(number)
                yield from self._on_reformed(event)
            case StateRestored():
                yield self._restore(event)
            case StepDone():
                yield from self._on_step(event)
            case TrainingResumed(generation=number):
                yield from self._resumed(number, event.time_s)

    def close(self, time_s: float) -> Iterator[TraceSpan]:
        """Yield the spans of generations that never completed a step."""
        for number in sorted(self._open):
            yield self._root(number, time_s, error="the job ended before it completed a step")

    def _on_proposed(self, event: GenerationProposed) -> Iterator[TraceSpan]:
        number = event.generation
        if number <= self._newest:
            return
        for older in sorted(self._open):
            error = f"overtaken by generation {number}"
            yield self._root(older, event.time_s, error=error)
        self._newest = number
        causes = [each for each in self._detected if _counts(each, at_s=event.time_s)]
        start_s, seen_s, cause = self._beginning(event, causes)
        self._proposed_s = {number: event.time_s}
        marks = tuple(
            SpanMark(
                name=each.what, time_s=each.time_s, about=_facts(victim=each.victim, why=each.why)
            )
            for each in causes[-32:]
        )
        self._open[number] = _Open(event, cause, start_s, marks, self._step)
        teller = self._tellers.of(event)
        if start_s < seen_s:
            yield self._span(number, "detect", start_s, seen_s, teller)
        about = _facts(reason=event.reason)
        yield self._span(number, "agree", seen_s, event.time_s, teller, about=about)
        yield from self._fenced(number)

    def _beginning(
        self, event: GenerationProposed, causes: list[Detected]
    ) -> tuple[float, float, str]:
        """Return when the change began, when it was seen, and its cause."""
        kinds = {each.what for each in causes}
        if event.generation == 1:
            start_s = self._started_s or event.time_s
            return start_s, start_s, "start"
        cause = "loss"
        if kinds and kinds <= {"join"}:
            cause = "join"
        elif kinds and kinds <= {"join", "notice"}:
            cause = "notice"
        grave = [each for each in causes if each.what != "join"] or causes
        fences = [fence.begun.time_s for fence in self._fences.values()]
        seen_s = min([each.time_s for each in grave] or fences, default=event.time_s)
        names = {each.victim for each in grave}
        hurt = [
            fault.time_s
            for fault in self._faults
            if fault.time_s <= seen_s and names & {fault.victim, fault.on, *fault.seats}
        ]
        return max(hurt, default=seen_s), seen_s, cause

    def _fenced(self, number: int) -> Iterator[TraceSpan]:
        """Yield the fences of the generations before ``number``, once it is known."""
        for node, fence in list(self._fences.items()):
            begun = fence.begun
            if begun.generation >= number or fence.done_s is None:
                continue
            del self._fences[node]
            about = _facts(reason=begun.reason)
            teller = Teller(node=node, role="agent")
            yield self._span(
                number, "fence", begun.time_s, fence.done_s, teller, of=node, about=about
            )

    def _on_reformed(self, event: RankReformed) -> Iterator[TraceSpan]:
        start_s = self._proposed_s.get(event.generation, event.time_s)
        about = _facts(rank=event.rank, world=event.world)
        yield self._worker_span(event.generation, "reform", start_s, event, about=about)

    def _restore(self, event: StateRestored) -> TraceSpan:
        self._awaited[event.seat] = event.generation
        about = _facts(
            rank=event.rank, step=event.step, tier=event.tier, bytes=event.bytes, how=event.how
        )
        start_s = event.time_s - event.seconds
        return self._worker_span(event.generation, "restore", start_s, event, about=about)

    def _on_step(self, event: StepDone) -> Iterator[TraceSpan]:
        if self._awaited.get(event.seat) == event.generation:
            del self._awaited[event.seat]
            about = _facts(rank=event.rank, step=event.step)
            yield self._worker_span(
                event.generation, "first step", event.began_s, event, about=about
            )
            yield from self._resumed(event.generation, event.time_s)
        self._step = max(self._step, event.step)

    def _resumed(self, number: int, time_s: float) -> Iterator[TraceSpan]:
        if number in self._open:
            proposed_s = self._open[number].proposed.time_s
            self._detected = [each for each in self._detected if each.time_s > proposed_s]
            self._faults = [each for each in self._faults if each.time_s > proposed_s]
            yield self._root(number, time_s)

    def _root(self, number: int, end_s: float, *, error: str = "") -> TraceSpan:
        found = self._open.pop(number)
        proposed = found.proposed
        about = _facts(
            cause=found.cause,
            generation=number,
            ranks=len(proposed.ranks),
            restore_how=proposed.restore_how,
            reason=proposed.reason,
        )
        if proposed.restore_step is not None:
            about["holdfast.restore_step"] = proposed.restore_step
            about["holdfast.steps_lost"] = max(found.newest_step - proposed.restore_step, 0)
        return TraceSpan(
            run=self.run,
            trace=trace_of(number),
            key=ROOT,
            parent="",
            name=_NAMES[found.cause],
            start_s=found.start_s,
            end_s=max(end_s, found.start_s),
            teller=self._tellers.of(proposed),
            about=about,
            marks=found.marks,
            error=error,
        )

    def _worker_span(
        self,
        number: int,
        name: str,
        start_s: float,
        event: Event,
        *,
        about: dict[str, str | int | float],
    ) -> TraceSpan:
        teller = self._tellers.of(event)
        return self._span(number, name, start_s, event.time_s, teller, of=event.seat, about=about)

    def _span(
        self,
        number: int,
        name: str,
        start_s: float,
        end_s: float,
        teller: Teller,
        *,
        of: str = "",
        about: dict[str, str | int | float] | None = None,
    ) -> TraceSpan:
        return TraceSpan(
            run=self.run,
            trace=trace_of(number),
            key=f"{name} {of}",
            parent=ROOT,
            name=name,
            start_s=start_s,
            end_s=max(start_s, end_s),
            teller=teller,
            about={**(about or {}), "holdfast.generation": number},
        )


_NAMES: Final = {
    "start": "start of training",
    "loss": "recovery",
    "join": "change for a join",
    "notice": "change after a notice",
}


def trace_of(number: int) -> str:
    """Return the name of a generation's trace."""
    return f"generation {number}"


def _facts(**found: str | int | float) -> dict[str, str | int | float]:
    """Return attributes with our prefix; empty texts are left out."""
    return {f"holdfast.{name}": value for name, value in found.items() if value != ""}


def _of_trainers(event: Detected) -> bool:
    """Return whether a detection may lead to another generation."""
    return "/" not in event.victim or role_of(event.victim) == TRAINER or event.what in _WEAK


def _counts(event: Detected, *, at_s: float) -> bool:
    return event.what not in _WEAK or at_s - event.time_s <= _WEAK_S
