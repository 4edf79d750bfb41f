"""Nodes that do not reach each other: exclusion, its time, and the plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
import pytest
from doubles import fakes
from hypothesis import given
from hypothesis import strategies as st
from unreached import broken_pairs

from holdfast.elastic.decisions.agree import (
    AgreePatience,
    Decision,
    FenceWorkers,
    FirstSeen,
    Halt,
    Idle,
    Propose,
    WaitForFences,
    decide,
    faults,
    observe,
)
from holdfast.elastic.decisions.detect import stalled
from holdfast.elastic.membership.records import (
    GenerationRecord,
    JobSpec,
    NodeRecord,
    Setback,
    WorkerRecord,
    WorkerState,
)
from holdfast.elastic.membership.view import JobView
from holdfast.elastic.planning.reach import all_asked, is_wondering, left_out, parted

POLICY = AgreePatience()


def trainer(name: str, *, parked: bool = False, spec: JobSpec | None = None) -> WorkerRecord:
    state = WorkerState.READY if parked else WorkerState.ACTIVE
    return fakes.worker(f"trainer/{name}", state, ready_after=3 if parked else 0, spec=spec)


def node(
    name: str,
    cut: Iterable[str] = (),
    *,
    parked: bool = False,
    trains: bool = True,
    spec: JobSpec | None = None,
    **more: object,
) -> NodeRecord:
    workers = [trainer(name, parked=parked, spec=spec)] if trains else []
    made = fakes.node(name, *workers, fenced=3 if parked else 2, unreachable=cut)
    return msgspec.structs.replace(made, **more)


def generation(*names: str, spares: Iterable[str] = ()) -> GenerationRecord:
    nodes = [fakes.node(name) for name in sorted((*names, *spares))]
    return fakes.generation(3, nodes, ranks=[(name, trainer(name)) for name in names])


def world(
    cuts: Mapping[str, str], *, inside: str = "abcd", spares: str = "", outside: str = ""
) -> JobView:
    """Return a view in which each key says of the letters of its value that it reaches them not."""
    record = generation(*inside, spares=spares)
    nodes = [node(n, cuts.get(n, ""), trains=n not in spares) for n in inside + spares + outside]
    return fakes.view(*nodes, generation=record)


@pytest.mark.parametrize(
    ("cuts", "out"),
    [
        ({}, ""),
        ({"a": "b"}, "b"),
        ({"b": "a"}, "b"),
        ({"a": "b", "b": "a"}, "b"),
        ({"a": "c", "c": "a"}, "c"),
        ({"a": "bcd"}, "a"),
        ({"a": "b", "c": "b", "d": "b"}, "b"),
        ({"a": "b", "b": "c", "c": "d"}, "bc"),
        ({"a": "b", "c": "d"}, "bd"),
        ({"a": "bc", "b": "c"}, "bc"),
        ({"a": "cd", "b": "cd"}, "cd"),
    ],
    ids=[
        "nobody", "one says so", "the other says so", "both say so", "chain", "star said by its "
        "centre", "star said by its leaves", "path", "two pairs", "nobody reaches anybody", "split",
    ],
)  # fmt: skip
def test_who_is_left_out_touches_every_broken_pair(cuts: Mapping[str, str], out: str) -> None:
    assert "".join(left_out(world(cuts))) == out


def test_a_node_with_fewer_trainers_goes_first_and_a_newcomer_before_all() -> None:
    assert list(left_out(world({"c": "s"}, inside="cd", spares="s"))) == ["s"]
    assert list(left_out(world({"s": "d"}, inside="cd", spares="s"))) == ["s"]
    assert list(left_out(world({"x": "z"}, inside="z", spares="", outside="x"))) == ["x"]


def test_who_is_outside_displaces_nobody_inside() -> None:
    view = world({"x": "a", "y": "a"}, outside="xyz")
    assert parted(view) == []
    assert list(left_out(view)) == ["x", "y"], "though a is in more broken pairs than they"
    assert list(left_out(world({"x": "y"}, outside="xyz"))) == ["y"]
    both = world({"a": "b", "b": "x"}, outside="x")
    assert list(left_out(both)) == ["b"], "x may come in for b, who is in more broken pairs"


def test_a_node_that_was_started_again_is_not_blamed_for_its_predecessor() -> None:
    view = world({"a": "b"})
    again = msgspec.structs.replace(view.nodes["b"], incarnation="b#2")
    now = fakes.view(*{**view.nodes, "b": again}.values(), generation=view.generation)
    assert (list(left_out(now)), parted(now)) == ([], [])
    left = [each for each in view.nodes.values() if each.node != "b"]
    gone = fakes.view(*left, generation=view.generation)
    assert (list(left_out(gone)), parted(gone)) == ([], [])


@given(st.dictionaries(st.sampled_from("abcdxy"), st.text("abcdxy", max_size=3), max_size=6))
def test_no_broken_pair_stays_together(cuts: dict[str, str]) -> None:
    view = world(cuts, inside="abcd", outside="xy")
    out = set(left_out(view))
    stay = set(view.nodes) - out
    assert not any(broken_pairs(view).get(name, set()) & stay for name in stay)
    assert out <= broken_pairs(view).keys(), "nobody is left out for nothing"
    assert len(out) < len(view.nodes)


# -- when ------------------------------------------------------------------------------------------


def ask(*moments: tuple[float, JobView], node: str = "a") -> tuple[Decision, str]:
    seen, answer = FirstSeen(), None
    for now_s, view in moments:
        seen = observe(view, seen, now_s=now_s)
        answer = decide(view, seen, node=node, now_s=now_s, policy=POLICY)
    assert answer is not None
    return answer


def probed(view: JobView, *names: str) -> JobView:
    nodes = {
        name: msgspec.structs.replace(each, probed=3 if name in names else 0)
        for name, each in view.nodes.items()
    }
    return fakes.view(*nodes.values(), generation=view.generation)


def test_the_others_are_heard_before_anyone_is_left_out() -> None:
    view = world({"a": "b"})
    assert ask((10.0, probed(view, "a", "b")))[0] == Idle(until_s=12.5)
    decision, reason = ask((10.0, probed(view, "a", "b", "c", "d")))
    assert decision == FenceWorkers(generation=3)
    assert reason == "node a and node b do not reach each other"
    assert faults(view) == [reason]


def test_but_not_for_longer_than_a_while_and_not_when_somebody_has_fenced() -> None:
    view = world({"a": "b"})
    assert ask((10.0, view), (12.4, view))[0] == Idle(until_s=12.5)
    assert ask((10.0, view), (12.5, view))[0] == FenceWorkers(generation=3)
    fenced = msgspec.structs.replace(view.nodes["d"], fenced=3)
    now = fakes.view(*{**view.nodes, "d": fenced}.values(), generation=view.generation)
    assert ask((10.0, now))[0] == FenceWorkers(generation=3)


def test_all_are_to_ask_when_one_gets_no_further_or_reaches_somebody_not() -> None:
    calm = world({})
    assert not is_wondering(calm)
    assert is_wondering(world({"c": "d"}))
    assert not is_wondering(world({"x": "a"}, outside="x")), "it is not in yet"
    stuck = msgspec.structs.replace(calm.nodes["c"], stalled=3)
    view = fakes.view(*{**calm.nodes, "c": stuck}.values(), generation=calm.generation)
    assert is_wondering(view)
    assert not all_asked(probed(calm, "a", "b", "c"))
    assert all_asked(probed(calm, "a", "b", "c", "d"))


def test_a_stall_is_one_only_when_all_have_asked_and_reach_each_other() -> None:
    def view(cuts: Mapping[str, str], *askers: str) -> JobView:
        found = probed(world(cuts, inside="ab", spares="s"), *askers)
        nodes = [
            msgspec.structs.replace(each, stalled=0 if each.node == "s" else 3)
            for each in found.nodes.values()
        ]
        return fakes.view(*nodes, generation=found.generation)

    assert stalled(view({}, "a", "b", "s"))
    assert not stalled(view({}, "a", "b"))
    assert not stalled(view({"a": "s"}, "a", "b", "s"))


# -- the next generation -------------------------------------------------------------------------


def all_parked(cuts: Mapping[str, str], *, least: int = 1, names: str = "abc") -> JobView:
    record = generation(*names)
    spec = JobSpec(min_dp=least)
    nodes = [node(n, cuts.get(n, ""), parked=True, spec=spec) for n in names]
    return fakes.view(*nodes, generation=record, wanted={"trainer": len(names)})


def test_the_next_generation_is_without_the_one_left_out_and_says_why() -> None:
    decision, reason = ask((10.0, all_parked({"c": "a"})))
    assert isinstance(decision, Propose)
    assert sorted(decision.record.nodes) == ["a", "b"]
    assert [member.node for member in decision.record.members] == ["a", "b"]
    assert "c left out: it and a do not reach each other" in reason
    assert decision.record.setbacks["c"].losses == 1


def test_with_too_few_on_one_side_the_job_waits_and_says_for_what() -> None:
    decision, reason = ask((10.0, all_parked({"c": "a"}, least=3)))
    assert isinstance(decision, WaitForFences)
    assert reason == (
        "2 of 3 trainers are ready, waiting for 1 more "
        "(c left out: it and a do not reach each other)"
    )
    assert isinstance(ask((10.0, all_parked({}, least=3)))[0], Propose)


def test_who_is_back_in_reach_waits_as_a_node_that_comes_and_goes() -> None:
    def two(cut: str, losses: int) -> JobView:
        record = generation("a", "b")
        record = msgspec.structs.replace(record, setbacks={"c": Setback(losses=losses)})
        nodes = [node("a", cut), node("b"), node("c", parked=True, fenced=2)]
        return fakes.view(*nodes, generation=record, wanted={"trainer": 3})

    assert ask((0.0, two("c", 0)), (50.0, two("c", 0)))[0] == Idle(until_s=None), "it stays out"
    assert isinstance(ask((0.0, two("", 1)), (5.0, two("", 1)))[0], Halt)
    assert ask((0.0, two("c", 4)), (50.0, two("", 4)))[0] == Idle(until_s=51.0), (
        "from when it is back"
    )
    assert isinstance(ask((0.0, two("c", 4)), (50.0, two("", 4)), (51.2, two("", 4)))[0], Halt)
