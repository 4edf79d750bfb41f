"""A worker process of a simulation: its record and its actions."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.elastic.membership.records import JobSpec, RoleAsk, WorkerRecord, WorkerState


@dataclass(slots=True)
class SimulatedWorker:
    """A worker process: the values of its record, and the generation in which it acts (0: none)."""

    seat: str
    attempt: int
    incarnation: str
    spec: JobSpec | None
    state: WorkerState = WorkerState.STARTING
    ready_after: int = 0
    active_in: int = 0
    hung: bool = False
    ending: str = ""
    handed: bool = False
    asks: RoleAsk | None = None

    @property
    def acts(self) -> bool:
        """True if the process could still affect the job."""
        return self.state is WorkerState.ACTIVE

    def record(self) -> WorkerRecord:
        """Return the worker's part of the node's record."""
        return WorkerRecord(
            seat=self.seat,
            incarnation=self.incarnation,
            pid=0,
            state=self.state,
            attempt=self.attempt,
            ready_after=self.ready_after,
            spec=self.spec,
            ending=self.ending,
            asks=self.asks,
        )

    def kill(self, ending: str) -> None:
        """End the process."""
        if self.state is not WorkerState.DONE:
            self.state, self.active_in, self.ending = WorkerState.DEAD, 0, ending
