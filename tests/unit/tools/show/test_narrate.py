"""The lines a user of ``holdfast run`` reads."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.elastic.events import (
    CheckpointCarried,
    CheckpointDone,
    CheckpointFailed,
    CheckpointProgress,
    CheckpointRetried,
    CheckpointSkipped,
    CheckpointStarted,
    CheckpointWaiting,
    DataWorkerDeath,
    DataWorkerHang,
    DataWorkersForked,
    Detected,
    Event,
    GenerationProposed,
    JobEnded,
    JobStarted,
    LossJudged,
    NodeReachable,
    RestoreProgressed,
    SnapshotsLeftOut,
    StepDone,
    StepProtected,
    StragglerFound,
    StragglerOver,
    TrainingResumed,
    WorkerHandedOver,
    WorkerRehearsed,
    WorkerStack,
)
from holdfast.tools.show.narrate import Narrator


def lines_of(*events: Event, quiet: bool = False) -> list[str]:
    narrator = Narrator(quiet=quiet)
    return [line for event in events for line in narrator.lines(event)]


def job(trainers: int) -> Event:
    return JobStarted(wanted={"trainer": trainers})


def lost(t: float, victim: str, what: str, why: str = "") -> Event:
    return Detected(time_s=t, victim=victim, what=what, why=why)


def formed(t: float, number: int, ranks: int, step: int) -> list[Event]:
    proposed = GenerationProposed(
        time_s=t,
        generation=number,
        ranks=tuple(f"trainer/{i}" for i in range(ranks)),
        restore_step=step - 1 if step > 1 else None,
    )
    return [proposed, *2 * (TrainingResumed(time_s=t, generation=number, step=step),)]


def test_a_start_is_one_line() -> None:
    assert lines_of(job(4), *formed(1.0, 1, 4, 0)) == ["generation 1: 4 trainers; started"]


def test_a_failure_is_told_with_its_cause_and_its_price() -> None:
    killed = lost(5.0, "trainer/2", "exit", "killed by SIGKILL")
    assert lines_of(job(4), killed, *formed(5.31, 3, 3, 41)) == [
        "trainer/2 was killed by SIGKILL",
        "generation 3: 3 of 4 trainers after trainer/2 was killed by SIGKILL; "
        "resumed at step 41 in 0.31 s",
    ]


def test_a_start_from_nothing_is_told_as_such() -> None:
    lines = lines_of(
        job(1), *formed(1.0, 1, 1, 0), lost(5.0, "n0", "node_lost"), *formed(9.0, 2, 1, 1)
    )
    assert lines[-1] == (
        "generation 2: 1 trainer after n0 was lost; "
        "nothing was left to restore, started over from step 0 in 4.00 s"
    )


def test_nodes_that_do_not_reach_each_other_are_told_and_that_they_do_again() -> None:
    why = "node n1 does not reach node n2"
    missed = lost(5.0, "n2", "unreachable", why)
    again = NodeReachable(time_s=9.0, node="n1", victim="n2")
    assert lines_of(job(3), missed, *formed(5.5, 2, 2, 7), again) == [
        why,
        f"generation 2: 2 of 3 trainers after {why}; resumed at step 7 in 0.50 s",
        "node n1 reaches node n2 again",
    ]


def test_a_join_has_no_price() -> None:
    assert lines_of(job(2), lost(1.0, "trainer/1", "join"), *formed(2.0, 4, 2, 9)) == [
        "generation 4: 2 trainers after trainer/1 joined; resumed at step 9"
    ]


def test_other_roles_are_told_but_do_not_explain_a_generation() -> None:
    crashed = lost(1.0, "rollout/0", "exit", "exit status 1: ValueError")
    assert lines_of(job(1), crashed, *formed(2.0, 1, 1, 0)) == [
        "rollout/0 ended with exit status 1: ValueError",
        "generation 1: 1 trainer; started",
    ]


def test_quiet_says_nothing() -> None:
    assert lines_of(job(1), *formed(1.0, 1, 1, 0), quiet=True) == []


def step(rank: int, **fields: Any) -> Event:
    costs = {"stall_s": 0.01, "seconds": 1.0, "copied_bytes": 0, "generation": 1}
    return StepDone(step=1, rank=rank, **{**costs, **fields})


def test_the_end_says_what_snapshots_cost() -> None:
    protected = [StepProtected(generation=1, step=1, seconds=s) for s in (0.02, 0.03, 0.2)]
    ended = JobEnded(ok=True)
    steps = [
        step(0, copied_bytes=1 << 20),
        step(0, copied_bytes=2 << 20, discarded=1),
        step(1, copied_bytes=2 << 20, discarded=1),
        step(0, copied_bytes=1 << 20, generation=2),
    ]
    assert lines_of(*steps, *protected, ended) == [
        "snapshots held training for 1.0% of the step time; protected after 30 ms (median; "
        "200 ms at most); 5.0 MiB copied, 1 discarded"
    ]


def test_a_job_that_took_no_step_has_no_costs() -> None:
    assert lines_of(JobEnded(ok=False, message="no")) == []


def test_checkpoints_are_told_of_as_far_as_people_care() -> None:
    assert lines_of(
        CheckpointStarted(step=40, bytes=100),
        CheckpointProgress(step=40, bytes=43, total_bytes=100),
        *(
            RestoreProgressed(
                generation=2,
                rank=rank,
                step=40,
                bytes=25,
                total_bytes=100,
                bytes_per_s=2.5,
                left_s=30.0,
            )
            for rank in (0, 1)
        ),
        CheckpointRetried(step=40, error="it failed: full", attempt=2),
        CheckpointSkipped(step=40, reason="the store was still busy"),
        CheckpointCarried(step=40, rebuilt=()),
        CheckpointWaiting(step=40, done=0.43),
        CheckpointFailed(
            step=40, error="checkpoint of step 40 failed: full", in_a_row=1, fatal=False, newest=-1
        ),
        CheckpointDone(step=40, bytes=100, seconds=1.0, bytes_per_s=100),
    ) == [
        "checkpoint of step 40: 43% written",
        "checkpoint of step 40: 25% read by rank 0, 2 B/s, 30 s left",
        "it failed: full; trying again (2)",
        "checkpoint of step 40 was skipped: the store was still busy",
        "checkpoint of step 40 is carried over to the new generation",
        "waiting for the checkpoint of step 40: 43%",
        "checkpoint of step 40 failed: full",
    ]


def test_snapshots_without_room_are_told_of_in_a_loud_voice() -> None:
    left_out = SnapshotsLeftOut(
        seat="trainer/1",
        generation=1,
        step=14,
        newest=10,
        count=4,
        reason="it has no room in memory: declare more",
    )
    assert lines_of(left_out) == [
        "trainer/1: SNAPSHOTS ARE SKIPPED since step 10, 4 so far: it has no room in memory: "
        "declare more"
    ]


SEAT = "trainer/1"
NO_MORE = {"text": "", "kernel": ""}
PACE: dict[str, Any] = {
    **{"times": 2.0, "microbatch_s": 2.0, "others_s": 1.0},
    **{"waits": 0.0, "data": 0.0, "busy": 1.0, "computes": True},
}


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (
            WorkerStack(seat=SEAT, how="py-spy", at='File "train.py", line 3 in load', **NO_MORE),
            'trainer/1 is in File "train.py", line 3 in load',
        ),
        (StragglerFound(victim=SEAT, on="a", why="trainer/1 is slow", **PACE), "trainer/1 is slow"),
        (
            StragglerOver(victim=SEAT),
            "trainer/1 keeps up with the others again",
        ),
        (
            LossJudged(step=7, generation=1, why="loss is nan", action="rollback"),
            "step 7: loss is nan (going back)",
        ),
        (
            WorkerHandedOver(seat=SEAT, generation=1, step=9),
            "trainer/1 hands over at step 9",
        ),
        (
            WorkerRehearsed(
                seat=SEAT, rank=1, world=2, error="KeyError: 'x'", over=False, seconds=1.0
            ),
            "trainer/1: its rehearsal ended early: KeyError: 'x'",
        ),
        (
            DataWorkerDeath(seat=SEAT, loader="data", how="killed by SIGKILL (process 7)", times=1),
            "trainer/1: a worker process of loader 'data' died (killed by SIGKILL (process 7)); "
            "they are started again",
        ),
        (
            DataWorkerHang(
                seat=SEAT,
                loader="data",
                how="it gave nothing for 60 s after its start (process 7)",
                times=2,
            ),
            "trainer/1: a worker process of loader 'data' was stuck (it gave nothing for 60 s "
            "after its start (process 7)), 2 times since the last batch; they are started again",
        ),
        (
            DataWorkersForked(seat=SEAT, loader="data", why="the data set cannot be pickled"),
            "trainer/1: loader 'data' forks its worker processes: the data set cannot be pickled",
        ),
        (
            Detected(victim="node1", what="notice", why="SIGTERM"),
            "node1 got notice of its end (SIGTERM)",
        ),
    ],
    ids=lambda value: value.kind if isinstance(value, Event) else "",
)
def test_what_detection_finds_is_said(event: Event, line: str) -> None:
    assert list(Narrator().lines(event)) == [line]
