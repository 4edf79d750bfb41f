"""Nodes that come and go: the memory of their losses, and their waiting times."""

from __future__ import annotations

import msgspec
from doubles import fakes

from holdfast.elastic.decisions.agree import (
    AgreePatience,
    FirstSeen,
    Idle,
    Propose,
    decide,
    observe,
)
from holdfast.elastic.membership.records import (
    GenerationRecord,
    JobSpec,
    NodeRecord,
    Setback,
    WorkerState,
)
from holdfast.elastic.membership.view import JobView
from holdfast.elastic.planning import holdoff
from holdfast.elastic.planning.holdoff import (
    HoldoffPatience,
    held_off,
    setbacks_after,
    strangers,
    why_held_off,
)

PATIENCE = HoldoffPatience(free_losses=1, first_s=2.0, most_s=10.0, forgive_s=100.0)
POLICY = AgreePatience(patience=PATIENCE)


def generation(*names: str, losses: dict[str, int] | None = None) -> GenerationRecord:
    nodes = [fakes.node(name) for name in names]
    ranks = [(name, fakes.worker(f"trainer/{name}")) for name in names]
    record = fakes.generation(3, nodes, ranks=ranks)
    setbacks = {name: Setback(losses=count) for name, count in (losses or {}).items()}
    return msgspec.structs.replace(record, setbacks=setbacks)


def member(name: str, *, fenced: int = 3, spec: JobSpec | None = None) -> NodeRecord:
    worker = fakes.worker(f"trainer/{name}", ready_after=3, spec=spec)
    return fakes.node(name, worker, fenced=fenced)


def returned(name: str, *, fenced: int = 3, spec: JobSpec | None = None) -> NodeRecord:
    worker = fakes.worker(f"trainer/{name}", incarnation=f"new {name}", spec=spec)
    return fakes.node(name, worker, fenced=fenced, incarnation=f"{name}#2")


def test_wait_doubles_with_every_loss_beyond_the_free_ones() -> None:
    waits = [PATIENCE.wait_s(Setback(losses=losses)) for losses in range(6)]
    assert waits == [0.0, 0.0, 2.0, 4.0, 8.0, 10.0]
    assert PATIENCE.wait_s(None) == 0.0
    assert HoldoffPatience().wait_s(Setback(losses=10_000)) == 60.0


def test_losses_are_counted_and_calm_time_forgives_them() -> None:
    old = generation("a", "b", "c", losses={"a": 2, "b": 2, "away": 5})
    view = fakes.view(member("a"), returned("b"), generation=old)
    after = setbacks_after(view, lived_s=130.0, patience=PATIENCE)
    assert after == {
        "a": Setback(losses=1, calm_s=30.0),
        "away": Setback(losses=5),
        "b": Setback(losses=3),
        "c": Setback(losses=1),
    }
    old = msgspec.structs.replace(old, setbacks=after)
    later = setbacks_after(fakes.view(member("a"), generation=old), lived_s=70.0, patience=PATIENCE)
    assert "a" not in later


def test_what_is_remembered_is_bounded() -> None:
    many = {f"gone{number}": 1 + number % 7 for number in range(holdoff.MAX_SETBACKS + 50)}
    view = fakes.view(member("a"), generation=generation("a", losses=many))
    after = setbacks_after(view, lived_s=1.0, patience=PATIENCE)
    assert len(after) == holdoff.MAX_SETBACKS
    assert min(setback.losses for setback in after.values()) == 1
    assert sum(setback.losses == 7 for setback in after.values()) == sum(
        losses == 7 for losses in many.values()
    )


def test_node_waits_from_when_it_was_first_seen() -> None:
    view = fakes.view(member("a"), returned("b"), generation=generation("a", losses={"b": 3}))
    since = dict.fromkeys(strangers(view).values(), 10.0)
    assert held_off(view, since, now_s=13.9, patience=PATIENCE) == {"b": 14.0}
    assert held_off(view, since, now_s=14.0, patience=PATIENCE) == {}


def ask(view: JobView, *, at_s: float, node: str = "a") -> tuple[object, str]:
    seen = observe(view, FirstSeen(), now_s=0.0)
    return decide(view, observe(view, seen, now_s=at_s), node=node, now_s=at_s, policy=POLICY)


def test_leaving_on_notice_does_not_count_and_is_known_after_the_node_is_gone() -> None:
    old = generation("a", "b", losses={"b": 1})
    leaver = msgspec.structs.replace(fakes.node("b"), leaving=1)
    seen = observe(fakes.view(member("a"), leaver, generation=old), FirstSeen(), now_s=0.0)
    for now_s in (1.0, 2.0):
        back = fakes.view(member("a"), returned("b"), generation=old)
        seen = observe(back, seen, now_s=now_s)
    assert list(seen.leavers) == ["b"]
    decision, _ = decide(back, seen, node="a", now_s=2.0, policy=POLICY)
    assert isinstance(decision, Propose)
    assert set(decision.record.nodes) == {"a", "b"}, "it would be excluded after another loss"
    assert decision.record.setbacks == {"b": Setback(losses=1)}
    later = msgspec.structs.replace(decision.record, nodes={"a": old.nodes["a"]})
    seen = observe(fakes.view(member("a"), generation=later), seen, now_s=3.0)
    assert seen.leavers == {}, "forgotten with the generation"


def test_flapping_node_does_not_end_a_generation_before_its_time() -> None:
    old = generation("a", losses={"b": 3})
    worker = fakes.worker("trainer/a", state=WorkerState.ACTIVE)
    view = fakes.view(fakes.node("a", worker, fenced=2), returned("b", fenced=2), generation=old)
    decision, _ = ask(view, at_s=3.0)
    assert decision == Idle(until_s=4.0)
    _, reason = ask(view, at_s=5.0)
    assert "trainer/b on b wants to join" in reason


def test_flapping_node_is_left_out_of_a_generation_that_others_make() -> None:
    old = generation("a", "c", losses={"b": 3})
    view = fakes.view(member("a"), returned("b"), generation=old, wanted={"trainer": 3})
    decision, reason = ask(view, at_s=1.0)
    assert isinstance(decision, Propose)
    assert set(decision.record.nodes) == {"a"}
    assert [each.node for each in decision.record.members] == ["a"]
    assert decision.record.setbacks == {"b": Setback(losses=3), "c": Setback(losses=1)}
    assert "b excluded after repeated losses" in reason


def test_node_started_again_within_its_generation_is_held_off_too() -> None:
    old = generation("a", "b", losses={"b": 2})
    view = fakes.view(member("a"), returned("b"), generation=old)
    decision, _ = ask(view, at_s=1.0)
    assert isinstance(decision, Propose)
    assert set(decision.record.nodes) == {"a"}
    assert decision.record.setbacks == {"b": Setback(losses=3)}


def test_flapping_node_is_taken_in_where_the_job_cannot_go_on_without() -> None:
    spec = JobSpec(dp=2)
    old = generation("a", "c", losses={"b": 9})
    view = fakes.view(member("a", spec=spec), returned("b", spec=spec), generation=old)
    decision, reason = ask(view, at_s=1.0)
    assert isinstance(decision, Propose)
    assert set(decision.record.nodes) == {"a", "b"}
    assert "excluded" not in reason


def test_flapping_node_is_taken_in_where_it_holds_what_others_do_not() -> None:
    old = generation("a", "b", losses={"b": 9})
    alone = msgspec.structs.replace(old, snapshots=msgspec.structs.replace(old.snapshots, parity=0))
    there = {n: fakes.inventory(n, alone.snapshots, 7) for n in "ab"}
    kept = msgspec.structs.replace(returned("b"), inventory=there["b"])
    view = fakes.view(
        msgspec.structs.replace(member("a"), inventory=there["a"]), kept, generation=alone
    )
    decision, _ = ask(view, at_s=1.0)
    assert isinstance(decision, Propose)
    assert decision.record.restore is not None
    assert set(decision.record.nodes) == {"a", "b"}


def test_a_node_that_waits_is_told_why() -> None:
    old = generation("a", losses={"b": 3, "c": 1})
    view = fakes.view(member("a"), returned("b"), returned("c"), generation=old)
    why = "it was lost 3 times, and waits 4 s before it is let in"
    assert why_held_off(view, "b", patience=PATIENCE) == why
    assert [why_held_off(view, name, patience=PATIENCE) for name in ("a", "c", "away")] == [""] * 3
    assert why_held_off(fakes.view(member("a")), "a") == ""


def test_a_node_that_was_lost_just_now_and_is_back_waits_too() -> None:
    old = generation("a", "b", losses={"b": 2})
    view = fakes.view(member("a"), returned("b"), generation=old)
    assert why_held_off(view, "b", patience=PATIENCE).startswith("it was lost 3 times")
