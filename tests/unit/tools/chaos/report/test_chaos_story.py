"""The report's view of a run: recoveries by fault, durations, lost nodes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from chaos_runs import SYNTHETIC, commit, holdfast_events, plain_events, struck
from synthetic_run import BEGIN

from holdfast.elastic.events import (
    Detected,
    Event,
    FaultInjected,
    GenerationProposed,
    JobEnded,
    JobStarted,
    StateRestored,
    StepDone,
    WorkerStarted,
)
from holdfast.tools.chaos.judging.checker import check
from holdfast.tools.chaos.judging.history import of_events
from holdfast.tools.chaos.judging.record import Told, time_of
from holdfast.tools.chaos.judging.result import Result, Struck
from holdfast.tools.chaos.report.run import ReportedRun, judged
from holdfast.tools.chaos.report.story import tell


def run_of(events: Sequence[Told], *strikes: Struck, problems: tuple[str, ...] = ()) -> ReportedRun:
    history = of_events(events)
    verdict = check(history)
    result = Result(
        name="run",
        world="real",
        seed=0,
        only=None,
        held=verdict.held and not problems,
        seconds=1.0,
        verdict=verdict,
        struck=strikes,
        problems=problems,
        replay="",
    )
    return judged(events, history, verdict, folder="run", result=result)


def test_each_recovery_is_of_the_strike_that_the_job_went_back_for() -> None:
    story = tell(holdfast_events(), struck=SYNTHETIC)
    assert story is not None
    assert [fault.kind for fault in story.faults] == ["stop", "kill", "kill", "lose"]
    assert [fault.node for fault in story.faults] == ["c", "b", "c", "a"]
    assert [(r.kind, r.victim) for r in story.recoveries] == [
        ("kill", "trainer/1"),
        ("kill", "rollout/0"),
        ("lose", "a"),
    ]
    killed, handed_on, lost = story.recoveries
    assert killed.generation == 2
    assert killed.detect_s == pytest.approx(0.01)
    assert killed.agree_s == pytest.approx(0.05)
    assert killed.total_s == pytest.approx(0.17)
    assert handed_on.generation is None
    assert handed_on.total_s == pytest.approx(0.06)
    assert lost.generation == 4
    assert lost.detect_s == pytest.approx(0.9)


def test_faults_among_the_events_count_where_there_is_no_result() -> None:
    fault = FaultInjected(time_s=BEGIN + 8.3, what="kill", victim="trainer/1", on="b")
    events = sorted([*holdfast_events(), fault], key=time_of)
    story = tell(events)
    assert story is not None
    (recovery,) = story.recoveries
    assert recovery.generation == 2


def test_of_a_plain_job_the_whole_recovery_is_known_but_not_its_phases() -> None:
    run = run_of(plain_events(), struck(0, "stop", "worker/0", 2.5), struck(1, "kill", "job", 7.5))
    (recovery,) = run.recoveries
    assert recovery.kind == "kill"
    assert recovery.detect_s is None and recovery.restore_s is None
    assert recovery.reexecute_s == pytest.approx(1.8)  # steps 5 and 6 again
    assert recovery.total_s == pytest.approx(6.5)  # until 14.0 s
    assert recovery.steps_lost == 2
    assert any("generations" in words for words in run.unknown)
    story = run.timeline
    assert story is not None
    assert story.shares["productive"] == pytest.approx(0.8 * 10)
    assert story.shares["re-executed"] == pytest.approx(0.8 * 2)
    assert story.shares["recovery"] == pytest.approx(12.2 - 7.5)
    assert sum(story.shares.values()) == pytest.approx(story.wall_s)


def test_without_samples_a_step_begins_where_the_one_before_ended() -> None:
    story = tell(plain_events(samples=False))
    assert story is not None
    assert [run.start_s for run in story.steps if run.rank == 0][:3] == [0.0, 0.0, 1.0]


def test_what_is_struck_at_once_is_recovered_from_together() -> None:
    run = run_of(
        plain_events(), struck(0, "kill", "worker/0", 7.4), struck(1, "kill", "worker/1", 7.5)
    )
    assert [recovery.total_s for recovery in run.recoveries] == pytest.approx([6.6, 6.5])


def test_a_rank_that_ended_is_recovered_from_however_many_steps_others_made() -> None:
    events = holdfast_events()
    for step in range(100, 103):  # of others, before they were told
        events.append(msgspec.structs.replace(step_event(step, generation=1), time_s=BEGIN + 8.32))
    events.sort(key=time_of)
    story = tell(events, struck=[SYNTHETIC[1]])
    assert story is not None
    assert [recovery.generation for recovery in story.recoveries] == [2]


def test_steps_that_no_later_attempt_reached_are_undone_all_the_same() -> None:
    events = [commit(1.0 + step, step, 0, 0) for step in range(6)]
    events += [commit(10.0 + step, step, 0, 1) for step in range(2, 4)]
    story = tell(events)
    assert story is not None
    assert [(run.step, run.generation) for run in story.steps if not run.stands] == [
        (step, 1) for step in range(2, 6)
    ]


def test_a_run_that_never_told_anything_is_shown_as_that() -> None:
    run = run_of([], problems=("the job failed: no such script",))
    assert not run.held
    assert run.timeline is None
    assert "any step" in run.unknown


def machines(*, tier: str = "peer", ok: bool = True) -> list[Event]:
    """Return a job on three nodes that lost two of them at once, and then ended."""
    seats = {f"trainer/{n}": node for n, node in enumerate("abc")}
    events: list[Event] = [
        JobStarted(time_s=BEGIN, nodes=("a", "b", "c")),
        GenerationProposed(time_s=BEGIN, generation=1, ranks=tuple(seats), reason="the first"),
    ]
    for pid, (seat, node) in enumerate(seats.items()):
        events.append(WorkerStarted(time_s=BEGIN + 0.1, seat=seat, node=node, pid=pid))
    for step in range(1, 4):
        events.append(step_event(step, generation=1))
    for name in "bc":
        events.append(Detected(time_s=BEGIN + 3.4, what="node_lost", victim=name))
    if ok:
        two = {"generation": 2, "ranks": ("trainer/0",), "reason": "b and c are lost"}
        events.append(GenerationProposed(time_s=BEGIN + 3.5, restore_step=3, **two))
        events.append(StateRestored(time_s=BEGIN + 3.6, generation=2, step=3, tier=tier))
        events += [step_event(step, generation=2) for step in range(4, 7)]
    events.append(JobEnded(time_s=BEGIN + 7.0, ok=ok))
    return events


def step_event(step: int, *, generation: int) -> StepDone:
    at = {"time_s": BEGIN + step, "start_s": BEGIN + step - 0.5, "seconds": 0.5}
    who = {"rank": 0, "seat": "trainer/0", "node": "a"}
    return StepDone(step=step, generation=generation, **at, **who)


LOST = (struck(0, "lose", "node b", 3.2), struck(1, "lose", "node c", 3.3))


@pytest.mark.parametrize(
    ("events", "problems", "outcome"),
    [
        (machines(), (), "memory"),
        (machines(tier="parity"), (), "parity"),
        (machines(tier="checkpoint"), (), "checkpoint"),
        (machines(tier="none"), (), "beginning"),
        (machines(ok=False), (), "refused"),
        (machines(ok=False), ("the job was stuck",), "lost"),
    ],
)
def test_what_became_of_nodes_that_were_lost_at_once(
    events: list[Event], problems: tuple[str, ...], outcome: str
) -> None:
    (loss,) = run_of(events, *LOST, problems=problems).losses
    assert (loss.nodes, loss.of, loss.outcome) == (("b", "c"), 3, outcome)


def test_steps_lost_are_counted_from_the_checkpoint_that_was_restored() -> None:
    events = [
        msgspec.structs.replace(event, restore_step=None)
        if isinstance(event, GenerationProposed)
        else event
        for event in machines(tier="checkpoint")
    ]
    (recovery, *_) = run_of(events, *LOST).recoveries
    assert (recovery.restore_step, recovery.steps_lost) == (3, 0)


def test_a_machine_lost_behind_a_recovery_is_another_loss() -> None:
    run = run_of(machines(), *LOST, struck(2, "lose", "node a", 6.5))
    assert [(loss.nodes, loss.outcome) for loss in run.losses] == [
        (("b", "c"), "memory"),
        (("a",), "memory"),
    ]
