"""The next record: whom a merge waits for, and who is put out."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from doubles import seas

from holdfast.elastic.sea.decide import Since, decide
from holdfast.elastic.sea.records import Left, Merged, Record, Work
from holdfast.elastic.sea.settings import Islands, Quorum
from holdfast.elastic.sea.view import View

ALL = Islands(every=4, portions=2, overlap=1, patience_s=60)
QUORUM = dataclasses.replace(ALL, wait=Quorum(0.6, grace_s=5), age_limit=1)


def sea(islands: Islands, *names: str) -> View:
    return seas.entered(seas.founded(islands), *(names or "abc"))


def decided(
    view: View, *works: Work, islands: Islands = ALL, now: float = 100, me: str = "a", **since: Any
) -> Record | None:
    found = decide(view, works, now=now, since=Since(**since), islands=islands, me=me)
    if found is not None:
        view.after(found)
    return found


def works(view: View, names: str, **changes: Any) -> list[Work]:
    return [seas.work(view, name, **changes) for name in names]


def test_all_are_waited_for() -> None:
    view = sea(ALL)
    assert decided(view, *works(view, "ab")) is None
    found = decided(view, *works(view, "cba"))
    assert found == seas.merged(view, *works(view, "abc"))


def test_only_members_decide_and_only_for_a_sea_that_is_founded() -> None:
    view = sea(ALL)
    assert decided(view, *works(view, "abc"), me="d") is None
    assert decide(View(), [], now=0, since=Since(), islands=ALL, me="a") is None


def test_the_first_merge_waits_for_the_founders() -> None:
    islands = dataclasses.replace(ALL, founders=3)
    view = sea(islands, "a", "b")
    assert decided(view, *works(view, "ab"), islands=islands) is None
    more = seas.entered(view, "c")
    assert isinstance(decided(more, *works(more, "abc"), islands=islands), Merged)


def test_a_silent_island_that_is_missing_is_put_out() -> None:
    view = sea(ALL)
    heard = {"a": 0.0, "b": 0.0, "c": 39.0}
    found = decided(view, *works(view, "ab"), heard=heard)
    assert found == Left(number=view.length, island="c", why="silent")
    assert decided(view, *works(view, "ab"), heard={**heard, "c": 40.0}) is None
    assert decided(view, *works(view, "ab"), heard={}) is None, "unknown is not silent"
    assert isinstance(decided(view, *works(view, "abc"), heard=heard), Merged)
    assert decided(view, *works(view, "ab"), heard=heard, me="c") is None, "nobody outs himself"


def test_a_quorum_waits_for_grace_but_not_for_those_who_are_all_there() -> None:
    view = sea(QUORUM)
    some = works(view, "bc")
    arrived = {"b": 90.0, "c": 96.0}
    assert decided(view, *some, islands=QUORUM, now=100, arrived=arrived) is None
    found = decided(view, *some, islands=QUORUM, now=101, arrived=arrived)
    assert isinstance(found, Merged)
    assert found.whole == 30
    assert [part.island for part in found.parts] == ["b", "c"]
    assert decided(view, *some[:1], islands=QUORUM, now=200, arrived=arrived) is None
    assert isinstance(decided(view, *works(view, "abc"), islands=QUORUM, now=96), Merged)


def test_of_several_works_of_an_island_the_newest_that_fits_counts() -> None:
    view = sea(QUORUM)
    for _ in range(2):
        view = view.after(seas.merged(view, *works(view, "bc")))
    old = seas.work(view, "a", base=0, tide=0, digest=seas.digest("old"))
    new = seas.work(view, "a", base=1, tide=1, digest=seas.digest("new"))
    other = seas.work(view, "a", portion=1, base=0)
    strange = seas.work(view, "a", lineage=99, base=1, tide=9)
    found = decided(view, old, new, other, strange, *works(view, "bc"), islands=QUORUM)
    assert isinstance(found, Merged)
    assert found.parts[0].digest == seas.digest("new")


@pytest.mark.parametrize("me", ["a", "c"])
def test_an_island_whose_weights_are_not_the_seas_is_put_out_by_anybody(me: str) -> None:
    view = sea(ALL)
    odd = seas.work(view, "c", state=seas.digest("odd"))
    assert decided(view, odd, *works(view, "a"), me=me) is None, "no vote before all are there"
    found = decided(view, odd, *works(view, "ab"), me=me)
    assert isinstance(found, Left)
    assert (found.island, found.why, len(found.seen)) == ("c", "astray", 3)


def test_a_digest_that_was_agreed_upon_decides_at_once() -> None:
    view = sea(QUORUM)
    for _ in range(2):
        view = view.after(seas.merged(view, *works(view, "bc")))
    late = seas.work(view, "a", base=0, tide=0, weight=900, state=seas.digest("odd"))
    found = decided(view, late, islands=QUORUM)
    assert isinstance(found, Left)
    assert (found.island, found.why) == ("a", "astray")


def test_a_decision_depends_on_its_arguments_alone() -> None:
    view = sea(QUORUM)
    some = works(view, "abc")
    found = {
        str(decided(view, *order, islands=QUORUM)) for order in (some, some[::-1], some[1:] + some)
    }
    assert len(found) == 1
