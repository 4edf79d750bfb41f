"""Events of an invented job on three nodes that loses a trainer, a rollout worker and a node."""

from __future__ import annotations

from typing import Any

from holdfast.elastic.events import (
    Detected,
    Event,
    FaultInjected,
    GenerationProposed,
    JobEnded,
    JobStarted,
    RankReformed,
    RolloutRecovered,
    StateRestored,
    StepDone,
    WorkerExited,
    WorkerStarted,
)

BEGIN = 1_700_000_000.0


class Story:
    """Collects events at times given in seconds since the job started."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def at(self, t: float, kind: type[Event], **fields: Any) -> None:
        """Record an event."""
        self.events.append(kind(time_s=BEGIN + t, **fields))

    def kill(self, t: float, what: str, victim: str, *, on: str, seats: tuple[str, ...]) -> None:
        """Record a fault as the demo's nemesis does."""
        self.at(t, FaultInjected, what=what, victim=victim, on=on, seats=seats, pids=(1,))

    def steps(
        self, span: range, *, start: float, seconds: float, generation: int, seats: dict[str, str]
    ) -> float:
        """Record the steps of ``span`` by every seat (seat -> node); return the end of the last."""
        for step in span:
            for rank, (seat, node) in enumerate(seats.items()):
                self.at(
                    start + seconds,
                    StepDone,
                    step=step,
                    generation=generation,
                    rank=rank,
                    seat=seat,
                    node=node,
                    start_s=BEGIN + start,
                    seconds=seconds,
                    stall_s=0.001,
                )
            start += seconds + 0.05
        return start - 0.05

    def generation(
        self, number: int, *, t: float, restore: int, seats: dict[str, str], reason: str
    ) -> None:
        """Record a generation: proposed at ``t``, re-formed 0.05 s and restored 0.11 s later."""
        self.at(
            t,
            GenerationProposed,
            generation=number,
            ranks=tuple(seats),
            restore_step=restore,
            restore_how="memory",
            reason=reason,
        )
        for rank, (seat, node) in enumerate(seats.items()):
            who = {"generation": number, "rank": rank, "seat": seat, "node": node}
            self.at(t + 0.05, RankReformed, world=len(seats), **who)
            self.at(t + 0.11, StateRestored, step=restore, **who)


def hurt_job() -> list[Event]:
    """A job of 18 steps: trainer/1 dies at 8.3 s, rollout/0 at 13 s, node a at 17 s."""
    story = Story()
    story.at(0.0, JobStarted)
    first = {"trainer/0": "a", "trainer/1": "b"}
    for pid, (seat, node) in enumerate({**first, "rollout/0": "c", "rollout/1": "a"}.items(), 100):
        story.at(0.2, WorkerStarted, seat=seat, node=node, pid=pid, attempt=1)
    story.generation(1, t=3.0, restore=0, seats=first, reason="first start")
    story.steps(range(1, 6), start=3.3, seconds=0.9, generation=1, seats=first)  # ends at 8.0
    story.at(
        8.3,
        FaultInjected,
        what="kill_trainer",
        victim="trainer/1",
        on="b",
        pids=(101,),
        seats=("trainer/1",),
    )
    story.at(8.305, WorkerExited, seat="trainer/1", node="b", pid=101, status="killed by SIGKILL")
    story.at(8.31, Detected, what="exit", victim="trainer/1", node="b")
    alone = {"trainer/0": "a"}
    story.generation(2, t=8.36, restore=5, seats=alone, reason="trainer/1 exited; going on smaller")
    story.at(8.4, WorkerStarted, seat="trainer/1", node="b", pid=110, attempt=2)
    story.steps(range(6, 8), start=8.5, seconds=1.3, generation=2, seats=alone)
    story.at(11.25, Detected, what="join", victim="trainer/1", node="b")
    story.generation(3, t=11.35, restore=7, seats=first, reason="trainer/1 is ready to join")
    story.steps(range(8, 13), start=11.5, seconds=0.9, generation=3, seats=first)
    story.at(
        13.0,
        FaultInjected,
        what="kill_rollout",
        victim="rollout/0",
        on="c",
        pids=(102,),
        seats=("rollout/0",),
    )
    story.at(13.001, WorkerExited, seat="rollout/0", node="c", pid=102, status="killed by SIGKILL")
    story.at(13.004, Detected, what="exit", victim="rollout/0", node="c")
    story.at(
        13.06,
        RolloutRecovered,
        worker="rollout/0",
        samples=9,
        unfinished=5,
        tokens=31,
        resampled=2,
    )
    story.at(13.05, WorkerStarted, seat="rollout/0", node="c", pid=111, attempt=2)
    story.at(
        17.0,
        FaultInjected,
        what="kill_node",
        victim="a",
        on="a",
        pids=(1,),
        seats=("trainer/0", "rollout/1"),
    )
    story.at(17.9, Detected, what="node_lost", victim="a", node="b")
    second = {"trainer/1": "b"}
    story.generation(4, t=18.0, restore=11, seats=second, reason="node a is gone; parity has it")
    story.at(18.1, WorkerStarted, seat="trainer/0", node="c", pid=112, attempt=2)
    story.steps(range(12, 15), start=18.15, seconds=1.3, generation=4, seats=second)
    story.at(22.2, Detected, what="join", victim="trainer/0", node="c")
    third = {"trainer/1": "b", "trainer/0": "c"}
    story.generation(5, t=22.3, restore=14, seats=third, reason="trainer/0 is ready to join")
    end = story.steps(range(15, 19), start=22.45, seconds=0.9, generation=5, seats=third)
    story.at(end + 0.4, JobEnded, ok=True)
    return story.events
