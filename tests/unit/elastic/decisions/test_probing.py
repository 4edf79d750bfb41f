"""Probing between nodes: the choice of peers, the times, and the conclusions."""

from __future__ import annotations

from itertools import pairwise

import msgspec
from doubles import fakes

from holdfast.elastic.decisions.probing import Probing
from holdfast.elastic.membership.view import JobView


def view(*names: str, number: int = 3, group: str = "abc", **changed: dict[str, object]) -> JobView:
    """Return a generation of ``group`` of which the nodes ``names`` are there."""
    ranks = [(name, fakes.worker(f"trainer/{name}")) for name in group]
    record = fakes.generation(number, [fakes.node(name) for name in group], ranks=ranks)
    nodes = [msgspec.structs.replace(fakes.node(n), **changed.get(n, {})) for n in names]
    return fakes.view(*nodes, generation=record)


CALM = view("a", "b", "c", "x")


def test_nobody_is_asked_while_all_goes_well() -> None:
    assert Probing("a").due(CALM, waits=False, now_s=0.0) == {}


def test_who_waits_asks_all_others_of_the_group_as_they_are_now() -> None:
    due = Probing("a").due(CALM, waits=True, now_s=0.0)
    assert {name: (each.address, each.mark) for name, each in due.items()} == {
        "b": ("sim://b/1", "b#1/1"),
        "c": ("sim://c/1", "c#1/1"),
    }
    down = view("a", "b", "c", b={"sidecar": ""})
    assert list(Probing("a").due(down, waits=True, now_s=0.0)) == ["c"]
    assert Probing("x").due(CALM, waits=True, now_s=0.0) == {}, "it is in no group"


def test_every_node_begins_behind_itself_and_many_are_asked_more_rarely() -> None:
    names = [f"n{number:03}" for number in range(500)]
    nodes = [fakes.node(name) for name in names]
    record = fakes.generation(3, nodes, ranks=[("n000", fakes.worker("trainer/0"))])
    world = fakes.view(*nodes, generation=record)
    probing = Probing("n250")
    due = probing.due(world, waits=True, now_s=0.0)
    assert list(due) == names[251:] + names[:250]
    probing.answered(due.keys(), now_s=0.0)
    assert not probing.due(world, waits=True, now_s=4.9)
    assert probing.due(world, waits=True, now_s=5.0)


def test_a_node_asks_as_well_when_another_gets_no_further_or_misses_somebody() -> None:
    stuck = view("a", "b", "c", b={"stalled": 3})
    missed = view("a", "b", "c", b={"unreachable": {"c": "c#1/1"}})
    for wondering in (stuck, missed):
        probing = Probing("a")
        assert list(probing.due(wondering, waits=False, now_s=0.0)) == ["b", "c"]
        probing.answered(["b", "c"], now_s=1.0)
        assert probing.unreachable == {}
        assert probing.probed(wondering) == 3
        assert probing.probed(CALM) == 0, "nobody wants to know"


def test_one_round_at_a_time_and_again_while_it_lasts() -> None:
    probing = Probing("a")
    assert probing.due(CALM, waits=True, now_s=0.0)
    assert not probing.due(CALM, waits=True, now_s=50.0)
    probing.answered(["b", "c"], now_s=51.0)
    assert not probing.due(CALM, waits=True, now_s=52.0)
    assert probing.due(CALM, waits=True, now_s=55.0)
    probing.answered(["b", "c"], now_s=55.0)
    probing.due(CALM, waits=False, now_s=55.1)
    assert probing.due(CALM, waits=True, now_s=55.2), "another wait: at once"


def test_who_does_not_answer_is_asked_on_ever_more_rarely_until_it_does() -> None:
    probing = Probing("a")
    probing.due(CALM, waits=True, now_s=0.0)
    probing.answered(["c"], now_s=0.0)
    assert probing.unreachable == {"b": "b#1/1"}
    assert probing.probed(CALM) == 3
    after = view("a", "b", "c", number=4, group="ac")
    asked_s = []
    for tick in range(1, 600):
        if due := probing.due(after, waits=False, now_s=tick / 10):
            assert list(due) == ["b"]
            asked_s.append(tick / 10)
            probing.answered([], now_s=tick / 10)
    pauses = [round(later - now, 1) for now, later in pairwise(asked_s)]
    assert asked_s[0] == 2.0
    assert pauses == sorted(pauses)
    assert max(pauses) <= 10.1
    probing.due(after, waits=False, now_s=100.0)
    probing.answered(["b"], now_s=100.0)
    assert probing.unreachable == {}
    assert probing.due(after, waits=False, now_s=200.0) == {}


def test_who_is_gone_or_another_now_is_asked_no_more() -> None:
    for now in (view("a", "c"), view("a", "b", "c", b={"incarnation": "b#2"})):
        probing = Probing("a")
        probing.due(CALM, waits=True, now_s=0.0)
        probing.answered(["c"], now_s=0.0)
        assert probing.due(now, waits=False, now_s=5.0) == {}
        assert probing.unreachable == {}


def test_silence_counts_for_nothing_when_all_is_well_by_then() -> None:
    probing = Probing("a")
    probing.due(CALM, waits=True, now_s=0.0)
    probing.due(view("a", "b", "c", number=4), waits=False, now_s=1.0)
    probing.answered([], now_s=2.0)
    assert probing.unreachable == {}


def test_a_node_that_is_alone_has_asked_everybody() -> None:
    probing = Probing("a")
    alone = view("a", group="a", a={"stalled": 3})
    assert probing.due(alone, waits=True, now_s=0.0) == {}
    assert probing.probed(alone) == 3
