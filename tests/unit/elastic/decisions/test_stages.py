"""A job of several stages: when the next one begins, what it restores, and who takes part."""

from __future__ import annotations

import msgspec
from doubles import fakes

from holdfast.elastic.decisions.agree import Finish, FirstSeen, Idle, Propose, decide, observe
from holdfast.elastic.membership.records import JobSpec, WorkerRecord, WorkerState
from holdfast.elastic.membership.view import JobView
from holdfast.elastic.planning.plan import choose_restore

DONE, READY = WorkerState.DONE, WorkerState.READY
SECOND = JobSpec(stage=1)


def _trainer(number: int, state: WorkerState, **more: object) -> WorkerRecord:
    return msgspec.structs.replace(fakes.worker(f"trainer/{number}", state), **more)


def _at_the_end(*now: WorkerRecord, fenced: int = 3) -> JobView:
    """Return a view of generation 4, the first stage's last: trainers 0 on a, 1 on b."""
    before = [fakes.worker(f"trainer/{i}", WorkerState.ACTIVE) for i in range(2)]
    nodes = [fakes.node(name, each) for name, each in zip("ab", before, strict=True)]
    record = fakes.generation(4, nodes, ranks=list(zip("ab", before, strict=True)))
    world = record.snapshots
    return fakes.view(
        *(
            fakes.node(name, each, fenced=fenced, inventory=fakes.inventory(name, world, 7))
            for name, each in zip("ab", now, strict=False)
        ),
        *(fakes.node(f"c{i}", each, fenced=fenced) for i, each in enumerate(now[2:])),
        generation=record,
    )


def _decide(view: JobView) -> tuple[object, str]:
    seen = observe(view, FirstSeen(), now_s=100.0)
    return decide(view, seen, node="a", now_s=200.0)


def test_the_job_goes_on_while_a_script_may_come_to_another_stage() -> None:
    view = _at_the_end(_trainer(0, DONE), _trainer(1, DONE, lingers=True))
    assert _decide(view) == (Idle(), "the work is complete; waiting for trainer/1")
    over, _ = _decide(_at_the_end(_trainer(0, DONE), _trainer(1, DONE)))
    assert isinstance(over, Finish)
    assert over.outcome.ok


def test_a_stage_begins_once_all_have_come_to_it_and_restores_nothing_of_the_one_before() -> None:
    ready = {"ready_after": 4, "spec": SECOND}
    waits = _at_the_end(_trainer(0, READY, **ready), _trainer(1, DONE, lingers=True), fenced=4)
    assert not isinstance(_decide(waits)[0], Propose)
    view = _at_the_end(_trainer(0, READY, **ready), _trainer(1, READY, **ready), fenced=4)
    decision, reason = _decide(view)
    assert isinstance(decision, Propose)
    record = decision.record
    assert (record.snapshots.stage, record.restore, record.timeline[-1].step) == (1, None, -1)
    assert "stage 1 of the script begins" in reason


def test_the_same_view_within_a_stage_restores_its_newest_step() -> None:
    view = _at_the_end(*(_trainer(i, READY, ready_after=4) for i in range(2)), fenced=4)
    points, _ = choose_restore(view)
    assert [point.step for point in points] == [7]


def test_a_script_that_is_over_while_others_begin_another_stage_ends_the_job_by_name() -> None:
    view = _at_the_end(_trainer(0, DONE), _trainer(1, READY, ready_after=4, spec=SECOND), fenced=4)
    decision, reason = _decide(view)
    assert isinstance(decision, Finish)
    assert not decision.outcome.ok
    assert reason.startswith("the scripts of trainer/0 ended after stage 0, trainer/1 began")


def test_a_worker_that_is_still_at_the_finished_stage_waits_outside() -> None:
    ready = {"ready_after": 4, "spec": SECOND}
    view = _at_the_end(
        _trainer(0, READY, **ready), _trainer(1, READY, **ready), _trainer(2, READY), fenced=4
    )
    decision, _ = _decide(view)
    assert isinstance(decision, Propose)
    assert [member.seat for member in decision.record.members] == ["trainer/0", "trainer/1"]


def test_a_worker_that_broke_between_two_stages_is_neither_waited_for_nor_the_end() -> None:
    onward = _trainer(0, READY, ready_after=4, spec=SECOND)
    view = _at_the_end(onward, _trainer(1, DONE, broke=True), fenced=4)
    decision, _ = _decide(view)
    assert isinstance(decision, Propose)
    assert [member.seat for member in decision.record.members] == ["trainer/0"]
    over, _ = _decide(_at_the_end(_trainer(0, DONE), _trainer(1, DONE, broke=True)))
    assert isinstance(over, Finish), "no other stage began"
    assert over.outcome.ok
