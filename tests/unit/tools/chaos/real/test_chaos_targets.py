"""The victims of a strike, and its moment."""

from __future__ import annotations

import math
from typing import Any

import pytest

from holdfast.elastic.events import (
    FencingBegun,
    FencingDone,
    GenerationProposed,
    StepDone,
    UserEvent,
)
from holdfast.tools.chaos.faults.injector import Victim
from holdfast.tools.chaos.judging.record import StepCommit, Told
from holdfast.tools.chaos.real.due import Due
from holdfast.tools.chaos.real.seen import JobProgress
from holdfast.tools.chaos.real.targets import choose, part_of
from holdfast.tools.chaos.scenarios.scenario import StrikeTarget, When
from holdfast.tools.chaos.scenarios.strikes import Strike

WORKERS = [
    Victim(name=seat, part="worker", pids=(number,), node=node, seat=seat)
    for number, (seat, node) in enumerate(
        [("rollout/0", "c"), ("trainer/0", "b"), ("trainer/1", "a"), ("trainer/2", "c")], 1
    )
]
NODES = [Victim(name=f"node {name}", part="node", pids=(9,), node=name) for name in "abc"]


def seen(*events: Told) -> JobProgress:
    found = JobProgress()
    found.take(events)
    return found


PROPOSED = GenerationProposed(
    time_s=1.0, node="b", generation=1, ranks=("trainer/1", "trainer/0", "trainer/2")
)


def step(number: int, *, t: float, rank: int = 0, attempt: int = 0) -> StepCommit:
    return StepCommit(t=t, step=number, rank=rank, attempt=attempt)


FIRST = When(step=1)


def strike(when: When = FIRST, *, number: int = 0, pick: float = 0.0, **progress: Any) -> Strike:
    kind = progress.pop("kind", "kill")
    return Strike(number=number, kind=kind, target=StrikeTarget(**progress), when=when, pick=pick)


def names(found: Strike, among: list[Victim], knowing: JobProgress | None = None) -> list[str]:
    knowing = knowing or seen(PROPOSED)
    return [each.name for each in choose(found, among, workers=WORKERS, seen=knowing)]


def test_one_is_picked_of_those_that_fit() -> None:
    assert {names(strike(pick=n / 10), WORKERS)[0] for n in range(11)} == {w.name for w in WORKERS}
    assert names(strike(role="rollout", pick=0.9), WORKERS) == ["rollout/0"]
    assert names(strike(node="c", role="trainer"), WORKERS) == ["trainer/2"]
    assert names(strike(rank=0), WORKERS) == ["trainer/1"]
    assert names(strike(rank=0), NODES) == ["node a"]
    assert names(strike(role="rollout"), NODES) == ["node c"]
    assert names(strike(node="d"), NODES) == []
    assert names(strike(node=("c", "a"), which="all"), NODES) == ["node a", "node c"]


def test_several_are_hit_at_once_and_never_one_of_them_twice() -> None:
    for pick in (0.1, 0.5, 0.9):
        found = names(strike(pick=pick, count=2), NODES)
        assert len(set(found)) == 2 and found == names(strike(pick=pick, count=2), NODES)
    assert sorted(names(strike(count=9), NODES)) == [each.name for each in NODES]
    assert names(strike(which="all"), NODES) == [each.name for each in NODES]


def test_the_leader_is_who_proposed_the_newest_generation() -> None:
    assert names(strike(which="leader"), NODES) == ["node b"]
    assert names(strike(which="leader"), WORKERS) == ["trainer/0"]
    assert names(strike(which="leader"), [NODES[0], NODES[2]]) == ["node a"], "b is gone"
    seats = ("worker/2", "worker/1")
    plain = [Victim(name=seat, part="worker", pids=(1,), seat=seat) for seat in seats]
    progress = seen(step(1, t=1.0, rank=2), step(1, t=1.0, rank=1))
    assert names(strike(which="leader"), plain, progress) == ["worker/1"]


def test_the_slowest_is_who_takes_longest_without_waiting() -> None:
    progress = seen(
        PROPOSED,
        StepDone(step=1, seat="trainer/0", generation=1, seconds=5.0, waited_s=4.5),
        StepDone(step=1, rank=1, seat="trainer/2", generation=1, seconds=5.0, waited_s=0.5),
    )
    assert names(strike(which="slowest"), WORKERS, progress) == ["trainer/2"]
    assert names(strike(which="slowest"), NODES, progress) == ["node c"]


def test_all_of_a_job_is_hit_whatever_node_is_meant() -> None:
    job = [Victim(name="the job", part="job", pids=(1,))]
    assert names(strike(kind="join", node="spare-0"), job) == ["the job"]


def test_a_job_without_nodes_has_workers_and_itself() -> None:
    assert part_of(strike(kind="preempt"), nodes=True) == "node"
    assert part_of(strike(kind="preempt"), nodes=False) == "worker"
    assert part_of(strike(kind="kill", part="job"), nodes=False) == "job"
    assert part_of(strike(kind="lose"), nodes=False) is None


def test_moments_are_counted_from_the_first_step_and_from_complete_steps() -> None:
    early, late, at = (
        strike(When(s=2.0)),
        strike(When(step=5, after_s=0.5), number=1),
        strike(When(step=9), number=2),
    )
    due = Due([early, late, at])
    assert due.take(seen(), now=1e9) == []
    progress = seen(step(1, t=10.0), step(6, t=13.0))
    assert due.moment(early, progress) == 12.0
    assert due.moment(late, progress) == 13.5
    assert due.moment(at, progress) == math.inf
    assert due.take(progress, now=13.0) == [early]
    assert due.take(progress, now=14.0) == [late]
    assert due.left == [at]


def fenced(t: float) -> FencingDone:
    return FencingDone(time_s=t, generation=1)


def test_strikes_that_wait_for_the_same_event_take_one_each() -> None:
    pair = [strike(When(state="fenced"), number=number) for number in range(2)]
    due, progress = Due(pair), seen(fenced(1.0), fenced(1.1))
    assert due.take(progress, now=2.0) == pair[:1]
    assert due.take(progress, now=2.1) == []
    progress.take([fenced(2.5)])
    assert due.take(progress, now=2.6) == pair[1:]


def test_a_strike_during_recovery_waits_for_the_event_behind_the_fault_before() -> None:
    second = strike(When(recovery="fencing"), number=1)
    due, progress = Due([second]), seen(FencingBegun(time_s=1.0, generation=1, reason=""))
    assert due.take(progress, now=2.0) == [], "no fault was done"
    due.struck(3.0)
    assert due.take(progress, now=4.0) == [], "that one was before it"
    progress.take([FencingBegun(time_s=3.2, generation=1, reason="")])
    assert due.take(progress, now=4.0) == [second]


def test_a_restart_of_a_job_without_events_is_seen_by_its_steps() -> None:
    progress = seen(step(1, t=1.0, attempt=0), step(2, t=2.0, attempt=0), step(2, t=5.0, attempt=1))
    assert progress.first_after("restarted", 0.0) == pytest.approx(5.0)
    assert progress.step == 2


def test_an_event_of_the_jobs_own_is_a_moment_too() -> None:
    progress = seen(UserEvent(name="evaluated", time_s=2.0))
    assert progress.first_after("own:evaluated", 0.0) == 2.0
    assert progress.first_after("evaluated", 0.0) is None


def test_a_launcher_of_each_machine_is_hit_by_the_name_of_its_node() -> None:
    launchers = [
        Victim(name=f"launcher of {name}", part="launcher", pids=(9,), node=name) for name in "ab"
    ]
    assert names(strike(part="launcher", node="b"), launchers) == ["launcher of b"]
    assert names(strike(part="launcher", node="c"), launchers) == []
    (only,) = [Victim(name="the launcher", part="launcher", pids=(9,))]
    assert names(strike(part="launcher", node="b"), [only]) == ["the launcher"]
