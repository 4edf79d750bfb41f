"""Invariants of every seating, plan and decision, for any view."""

from __future__ import annotations

import dataclasses
from collections import Counter

import msgspec
from doubles.strategies import views
from exploring import examples
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from unreached import broken_pairs

from holdfast.elastic.decisions.agree import (
    FenceWorkers,
    Finish,
    FirstSeen,
    Propose,
    decide,
    observe,
)
from holdfast.elastic.decisions.seating import NOWHERE, ChangeSeats, Keep, seat
from holdfast.elastic.membership.readiness import ready_trainers
from holdfast.elastic.membership.records import Origin, WorkerState
from holdfast.elastic.membership.view import JobView, role_of
from holdfast.elastic.planning.plan import extend_timeline, on_timeline, plan
from holdfast.elastic.planning.reach import left_out

broadly = settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def reseated(view: JobView) -> JobView:
    decision, _ = seat(view, max_attempts=100)
    if not isinstance(decision, ChangeSeats):
        return view
    return dataclasses.replace(view, seating=decision.seats, seating_revision=2)


def overfull(view: JobView) -> bool:
    used = Counter((s.node, role_of(s.seat)) for s in view.seating if s.node in view.nodes)
    return any(n > view.nodes[node].slots.get(role, 0) for (node, role), n in used.items())


@broadly
@given(views())
def test_seating_is_whole_and_fits(view: JobView) -> None:
    after = reseated(view)
    assert {s.seat for s in after.seating} == {
        f"{role}/{i}" for role, count in view.wanted.items() for i in range(count)
    }
    assert all(s.node in view.nodes for s in after.seating if s.node != NOWHERE)
    if not overfull(view):
        assert not overfull(after)


@broadly
@given(views())
def test_no_wanted_seat_waits_beside_a_free_slot(view: JobView) -> None:
    after = reseated(view)
    used = Counter((s.node, role_of(s.seat)) for s in after.seating)
    for waiting in (s for s in after.seating if s.node == NOWHERE):
        role = role_of(waiting.seat)
        assert all(used[n, role] >= r.slots.get(role, 0) for n, r in view.nodes.items())


@broadly
@given(views())
def test_seating_is_sticky_and_attempts_only_grow(view: JobView) -> None:
    after = {s.seat: s for s in reseated(view).seating}
    for old in view.seating:
        if old.seat not in after:
            continue
        new = after[old.seat]
        assert new.attempt >= old.attempt
        if old.node in view.nodes:
            assert new.node == old.node
        if new.attempt == old.attempt:
            assert new.node in (old.node, NOWHERE)


@broadly
@given(views())
def test_seating_settles(view: JobView) -> None:
    for _ in range(4):  # a dead worker may sit where the next attempt is ordered
        view = reseated(view)
    assert isinstance(seat(view, max_attempts=100)[0], Keep)


@broadly
@given(views(plannable=True))
def test_plan_takes_every_ready_trainer_once(view: JobView) -> None:
    ready = ready_trainers(view)
    assume(ready)
    record, reason = plan(view)
    assert record.number == view.number + 1
    assert [m.rank for m in record.members] == list(range(len(ready)))
    assert sorted((m.node, m.incarnation) for m in record.members) == sorted(
        (node.node, worker.incarnation) for node, worker in ready
    )
    assert record.snapshots.rank_nodes == tuple(m.node for m in record.members)
    assert set(record.nodes) == {peer.node for peer in record.snapshots.peers}
    assert record.reason == reason
    assert reason.startswith(f"generation {record.number}: {len(ready)} of ")


@broadly
@given(views(plannable=True, cuts=True))
def test_no_two_nodes_of_a_plan_say_that_they_do_not_reach_each_other(view: JobView) -> None:
    assume(any(node.node not in left_out(view) for node, _ in ready_trainers(view)))
    record, _ = plan(view, excluded=view.nodes)
    assert not any(broken_pairs(view).get(n, set()) & record.nodes.keys() for n in record.nodes)
    assert {member.node for member in record.members} <= record.nodes.keys()


@broadly
@given(views(plannable=True))
def test_plan_does_not_depend_on_the_order_of_nodes(view: JobView) -> None:
    assume(ready_trainers(view))
    turned = dataclasses.replace(view, nodes=dict(sorted(view.nodes.items())[::-1]))
    record, turned_record = plan(view)[0], plan(turned)[0]
    assert turned_record.members == record.members
    assert turned_record.restore == record.restore
    assert turned_record.nodes == record.nodes


@broadly
@given(views(plannable=True))
def test_survivors_keep_their_order_where_no_bytes_speak_against_it(view: JobView) -> None:
    nodes = {
        name: msgspec.structs.replace(node, inventory=None) for name, node in view.nodes.items()
    }
    view = dataclasses.replace(view, nodes=nodes)
    assume(ready_trainers(view) and view.generation)
    assert view.generation is not None
    old = {m.incarnation: m.rank for m in view.generation.members}
    record, _ = plan(view)
    now = [(old[m.incarnation], m.rank) for m in record.members if m.incarnation in old]
    assert now == sorted(now)
    if len(record.members) == len(old) and len({m.incarnation for m in record.members}) == len(old):
        assert all(before == after for before, after in now)


@broadly
@given(views(plannable=True))
def test_restore_point_names_only_nodes_that_have_it(view: JobView) -> None:
    assume(ready_trainers(view) and view.generation)
    record, _ = plan(view)
    if record.restore is None:
        return
    for source in record.restore.sources:
        inventory = view.nodes[source.node].inventory
        assert inventory is not None
        key = (record.restore.world.generation, record.restore.step, source.rank)
        has = any((b.generation, b.step, b.rank) == key for b in inventory.blocks)
        assert has is not source.rebuilt


@broadly
@given(views(), st.floats(0, 100))
def test_decision_is_safe_and_has_a_reason(view: JobView, later_s: float) -> None:
    for node in view.nodes:
        seen = observe(view, FirstSeen(), now_s=0.0)
        seen = observe(view, seen, now_s=later_s)
        decision, reason = decide(view, seen, node=node, now_s=later_s)
        assert reason
        match decision:
            case FenceWorkers(generation=generation):
                assert generation == view.number > view.nodes[node].fenced
            case Propose(record=record, expected=expected):
                assert expected == view.generation_revision
                states = {w.incarnation: w.state for _, w in view.workers()}
                assert {states[m.incarnation] for m in record.members} == {WorkerState.READY}
                group = view.generation.nodes if view.generation else {}
                assert all(view.nodes[n].fenced >= view.number for n in group if n in view.nodes)
            case Finish(outcome=outcome) if outcome.ok and view.generation:
                members = {(m.node, m.incarnation) for m in view.generation.members}
                left = [w for n, w in view.workers() if (n.node, w.incarnation) in members]
                assert WorkerState.DONE in {w.state for w in left}
                assert WorkerState.ACTIVE not in {w.state for w in left}


@settings(max_examples=examples(200))
@given(st.lists(st.integers(-1, 12), min_size=1, max_size=20))
def test_timeline_says_what_the_whole_chain_says(steps: list[int]) -> None:
    timeline: tuple[Origin, ...] = ()
    for number, step in enumerate(steps, 1):
        timeline = extend_timeline(timeline, Origin(generation=number, step=step))
    for generation in range(1, len(steps) + 1):
        for step in range(13):
            whole = all(step <= origin for origin in steps[generation:])
            assert on_timeline(generation, step=step, timeline=timeline) is whole
