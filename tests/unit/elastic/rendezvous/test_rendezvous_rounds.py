"""Membership of a rendezvous, decided from all nodes' records."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.elastic.coordinator.base import Entry
from holdfast.elastic.errors import CoordinatorError
from holdfast.elastic.rendezvous.rounds import (
    Closed,
    Enter,
    Form,
    Participant,
    Round,
    RoundLimits,
    RoundView,
    WaitForNodes,
    decide,
    to_restart_for,
)

LIMITS = RoundLimits(least=2, most=3, last_call_s=30.0, settle_s=0.3)


def one(node: str, after: int | None = 0, host: str = "") -> Participant:
    return Participant(node=node, host=host or node, store=f"{node}:1", waits_after=after)


def round_of(number: int, *members: str) -> Round:
    return Round(number=number, members=members, hosts=members, store=f"{members[0]}:1")


def view(*nodes: Participant, newest: Round | None = None, closed: bool = False) -> RoundView:
    revision = 7 if newest else 0
    by_name = {node.node: node for node in nodes}
    return RoundView(nodes=by_name, newest=newest, revision=revision, closed=closed)


def ask(found: RoundView, node: str, *, after: int = 0, settled_s: float = 0.0) -> object:
    return decide(found, node=node, after=after, limits=LIMITS, settled_s=settled_s)[0]


def formed(decision: object) -> tuple[str, ...]:
    assert isinstance(decision, Form)
    return decision.round.members


def test_fewer_than_the_least_wait_without_limit() -> None:
    assert ask(view(one("a")), "a", settled_s=1e9) == WaitForNodes()


def test_the_first_round_waits_for_more_until_the_last_call_is_over() -> None:
    two = view(one("a"), one("b"))
    assert ask(two, "a", settled_s=10.0) == WaitForNodes(seconds=20.0)
    assert formed(ask(two, "a", settled_s=30.0)) == ("a", "b")


def test_a_full_house_does_not_wait() -> None:
    assert formed(ask(view(one("c"), one("a"), one("b")), "b")) == ("a", "b", "c")


def test_nobody_is_admitted_beyond_the_most() -> None:
    assert formed(ask(view(*map(one, "abcd")), "d")) == ("a", "b", "c")


def test_members_enter_and_a_spare_goes_on_waiting() -> None:
    newest = round_of(1, "b", "a", "c")
    found = view(*map(one, "abcd"), newest=newest)
    assert ask(found, "a") == Enter(round=newest, rank=1)
    assert ask(found, "d") == WaitForNodes()


def test_a_round_is_entered_once() -> None:
    newest = round_of(1, "a", "b")
    found = view(one("a", 1), one("b", None), newest=newest)
    assert ask(found, "a", after=1) == WaitForNodes()


def test_workers_that_may_still_run_are_waited_for_and_lost_ones_are_not() -> None:
    newest = round_of(1, "a", "b", "c")
    working = view(one("a", 1), one("b", 1), one("c", None), newest=newest)
    assert ask(working, "a", after=1, settled_s=1e9) == WaitForNodes()
    lost = view(one("a", 1), one("b", 1), newest=newest)
    decision = ask(lost, "a", after=1, settled_s=0.3)
    assert formed(decision) == ("a", "b")
    assert isinstance(decision, Form)
    assert (decision.round.number, decision.expected) == (2, 7)


def test_a_member_that_has_not_yet_entered_counts_as_working() -> None:
    newest = round_of(2, "a", "b")
    found = view(one("a", 2), one("b", 1), newest=newest)
    assert ask(found, "a", after=2, settled_s=1e9) == WaitForNodes()
    assert isinstance(ask(found, "b", after=1), Enter)


def test_survivors_keep_their_ranks_where_the_size_stays() -> None:
    newest = round_of(1, "a", "b", "c")
    found = view(one("a", 1), one("c", 1), one("z", 0), newest=newest)
    assert formed(ask(found, "z")) == ("a", "z", "c")


def test_a_newcomer_takes_the_rank_that_was_lost_on_its_host() -> None:
    newest = Round(number=1, members=("a", "b", "c"), hosts=("h1", "h2", "h3"), store="a:1")
    nodes = [one("b", 1, "h2"), one("x", 0, "h3"), one("y", 0, "h1")]
    found = view(*nodes, newest=newest)
    assert formed(ask(found, "b", after=1)) == ("y", "b", "x")


def test_survivors_that_become_fewer_keep_their_order() -> None:
    newest = round_of(1, "c", "b", "a")
    found = view(one("a", 1), one("c", 1), newest=newest)
    assert formed(ask(found, "a", after=1, settled_s=1.0)) == ("c", "a")


def test_a_closed_rendezvous_tells_the_spare_from_the_member() -> None:
    found = view(one("a", 1), one("d"), newest=round_of(1, "a", "b"), closed=True)
    assert ask(found, "a", after=1) == Closed(needed=True)
    assert ask(found, "d") == Closed(needed=False)


def restart(found: RoundView, node: str, inside: Round) -> list[str]:
    return to_restart_for(found, node=node, inside=inside, limits=LIMITS)


def test_a_round_that_is_whole_goes_on() -> None:
    newest = round_of(1, "a", "b", "c")
    found = view(*(one(name, None) for name in "abc"), one("d"), newest=newest)
    assert restart(found, "a", newest) == []  # it is full: d is a spare


def test_a_round_ends_for_the_lost_the_returned_and_newcomers_with_room() -> None:
    newest = round_of(1, "a", "b", "c")
    found = view(one("a", None), one("b", 1), one("d"), one("e"), newest=newest)
    assert restart(found, "a", newest) == ["c", "b", "d"]


def test_a_node_left_behind_by_a_newer_round_restarts() -> None:
    inside, newest = round_of(1, "a", "b"), round_of(2, "b", "c")
    found = view(*(one(name, None) for name in "abc"), newest=newest)
    assert restart(found, "a", inside) == ["a"]


def test_the_end_of_a_finished_member_ends_nobody_else() -> None:
    newest = round_of(1, "a", "b")
    found = view(one("a", None), newest=newest, closed=True)
    assert restart(found, "a", newest) == []


def entry(key: str, value: object) -> Entry:
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return Entry(key=key, value=text, revision=3)


def test_the_view_is_read_from_the_entries() -> None:
    newest = round_of(4, "a", "b")
    entries = [entry("p/nodes/a", one("a")), entry("p/round", newest), entry("p/closed", "{}")]
    found = RoundView.from_entries(entries, prefix="p/")
    assert found.nodes == {"a": one("a")}
    assert (found.newest, found.revision, found.closed, found.number) == (newest, 3, True, 4)


@pytest.mark.parametrize(("key", "said"), [("p/what", "no record"), ("p/round", "not a readable")])
def test_a_record_that_is_none_is_refused_by_name(key: str, said: str) -> None:
    with pytest.raises(CoordinatorError, match=f"{key}.*{said}"):
        RoundView.from_entries([entry(key, "[]")], prefix="p/")
