"""The state of a running job, folded from its events one at a time. Pure."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable

from holdfast.elastic.events import (
    Event,
    FaultInjected,
    GenerationProposed,
    MetricsLogged,
    RolloutRecovered,
    SamplingChanged,
    StateRestored,
    StepDone,
    WorkerExited,
    WorkerStarted,
)
from holdfast.elastic.membership.records import TRAINER
from holdfast.elastic.membership.view import role_of

_STEPS_REMEMBERED = 16


class LiveState:
    """The present state of a job: its newest step and generation, its workers, its faults.

    ``stepped`` is the newest generation that completed a step. ``alive`` maps node and seat to a
    process id. ``training`` maps the seats of the generation's trainers to their nodes.
    ``salvaged`` maps each recovered rollout worker to the number of its samples that were
    unfinished.
    """

    def __init__(self) -> None:
        self.step = 0
        self.generation = 0
        self.metrics: dict[int, dict[str, float | None]] = {}
        self.alive: dict[str, dict[str, int]] = {}
        self.training: dict[str, str] = {}
        self.faults: list[FaultInjected] = []
        self.history: list[Event] = []
        self.unrecovered: set[str] = set()
        self.stepped = 0
        self.salvaged: dict[str, int] = {}
        self._sampling: dict[str, float] = {}
        self._seconds: deque[float] = deque(maxlen=_STEPS_REMEMBERED)

    def apply(self, events: Iterable[Event]) -> None:
        """Apply new events, oldest first."""
        for event in events:
            self.history.append(event)
            self._apply(event)

    def _apply(self, event: Event) -> None:
        match event:
            case WorkerStarted(node=node, seat=seat, pid=pid):
                self.alive.setdefault(node, {})[seat] = pid
            case WorkerExited(node=node, seat=seat, pid=pid):
                self._gone(node, seat, pid=pid)
            case FaultInjected():
                self._on_fault(event)
            case GenerationProposed(generation=generation):
                self._on_proposed(generation)
            case StateRestored(generation=generation) if generation == self.generation:
                self.training[event.seat] = event.node
            case StepDone():
                self._on_step(event)
            case SamplingChanged(samples=samples):
                self._sampling[event.seat] = event.time_s if samples else 0.0
            case RolloutRecovered(worker=worker, unfinished=unfinished):
                self.salvaged[worker] = unfinished
            case MetricsLogged(step=step, values=values):
                self.metrics[step] = values

    @property
    def step_seconds(self) -> float:
        """Median duration of the newest steps; 1 s if none is known."""
        return statistics.median(self._seconds) if self._seconds else 1.0

    def participants(self) -> dict[str, list[str]]:
        """Return the participating seats by node: this generation's trainers, all other workers."""
        return {
            node: [
                seat
                for seat in sorted(seats)
                if role_of(seat) != TRAINER or self.training.get(seat) == node
            ]
            for node, seats in self.alive.items()
        }

    def busy(self, *, since: float) -> list[str]:
        """Return the rollout workers that began to sample after ``since`` and have not stopped."""
        return sorted(seat for seat, began in self._sampling.items() if began >= since)

    def count(self, role: str) -> int:
        """Return the number of participating workers of a role."""
        return sum(role_of(s) == role for seats in self.participants().values() for s in seats)

    def _on_fault(self, event: FaultInjected) -> None:
        self.faults.append(event)
        self.unrecovered.add(event.victim)
        for seat in event.seats:
            self.salvaged.pop(seat, None)
            self._gone(event.on, seat)
        if event.victim == event.on:
            self.alive.pop(event.on, None)

    def _gone(self, node: str, seat: str, *, pid: int | None = None) -> None:
        seats = self.alive.get(node, {})
        if seat in seats and pid in (None, seats[seat]):
            del seats[seat]
            self._sampling.pop(seat, None)
            if self.training.get(seat) == node:
                del self.training[seat]

    def _on_proposed(self, generation: int) -> None:
        if generation > self.generation:
            self.generation = generation
            self.training.clear()

    def _on_step(self, event: StepDone) -> None:
        self.step = max(self.step, event.step)
        self.stepped = max(self.stepped, event.generation)
        self._seconds.append(event.seconds)
        self.unrecovered.clear()
