"""Islands that meet in pairs: which record follows, what it makes of the sea, and who writes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from doubles import seas

from holdfast.elastic.errors import ConfigError, SeaError
from holdfast.elastic.sea import place
from holdfast.elastic.sea.decide import Since, decide
from holdfast.elastic.sea.portions import merges_of
from holdfast.elastic.sea.records import Entered, Left, Merged, Record, Work, decode_record, encode
from holdfast.elastic.sea.settings import Islands, Quorum
from holdfast.elastic.sea.view import View

PAIRS = Islands(every=4, portions=2, overlap=1, patience_s=60, founders=2, topology="pairs")


def sea(names: str = "abcd") -> View:
    return seas.entered(seas.founded(PAIRS), *names)


def work(view: View, name: str, **changes: Any) -> Work:
    """Return a work of an island for its next meeting."""
    tide = view.members[name].tide
    base = merges_of(tide % 2, tide, portions=2)
    made = {"tide": tide, "portion": tide % 2, "base": base, "digest": seas.digest(f"{name}{tide}")}
    return seas.work(view, name, **{**made, **changes})


def meeting(view: View, *works: Work, **changes: Any) -> Merged:
    found = seas.merged(view, *works, tide=works[0].tide, portion=works[0].portion)
    return msgspec.structs.replace(found, **changes)


def met(view: View, name: str) -> View:
    """Return the view after an island met the partner that is due."""
    return view.after(meeting(view, *(work(view, each) for each in view.awaited(name))))


def ended(view: View, name: str) -> View:
    tide = view.members[name].tide
    parts = tuple(
        work(view, name, portion=portion, base=merges_of(portion, tide, portions=2)).part
        for portion in range(2)
    )
    return view.after(Left(number=view.length, island=name, why="done", last=parts))


def decided(view: View, me: str, *works: Work, now: float = 100.0, **since: Any) -> Record | None:
    found = decide(view, works, now=now, since=Since(**since), islands=PAIRS, me=me)
    if found is not None:
        view.after(found)
    return found


def pair_of(view: View) -> tuple[str, str, list[str]]:
    """Return two islands that meet next, and the others."""
    one = next(iter(view.members))
    other = view.partner(one)
    assert other is not None
    return one, other, [name for name in view.members if name not in (one, other)]


def test_a_meeting_moves_its_two_islands_and_no_other() -> None:
    view = sea()
    one, other, rest = pair_of(view)
    view = met(view, one)
    assert {name: each.tide for name, each in view.members.items()} == {
        one: 1,
        other: 1,
        rest[0]: 0,
        rest[1]: 0,
    }
    assert (view.tide, view.oldest) == (1, 0)
    assert view.partner(rest[0]) == rest[1], "the first meeting of a tide fixes its pairs"
    view = met(view, rest[0])
    assert (view.oldest, view.pairings) == (1, {})


def test_an_island_waits_for_its_partner_alone_and_one_that_is_odd_for_nobody() -> None:
    view = sea("abc")
    one, other, (odd,) = pair_of(view)
    assert decided(view, one, work(view, one), work(view, odd)) is None
    assert decided(view, odd, work(view, one)) is None
    alone = decided(view, odd, work(view, odd))
    assert isinstance(alone, Merged)
    assert [part.island for part in alone.parts] == [odd]
    both = decided(view, other, work(view, one), work(view, other))
    assert isinstance(both, Merged)
    assert [part.island for part in both.parts] == sorted([one, other])
    assert both.whole == 20


def test_who_is_behind_is_waited_for_and_who_is_ahead_is_not() -> None:
    view = sea("abcd")
    for _ in range(40):  # until somebody's partner is at an older tide
        late = next((n for n in view.members if view.members[n].tide > view.oldest), None)
        other = late and view.partner(late)
        if late and other and view.members[other].tide < view.members[late].tide:
            break
        view = met(view, next(iter(sorted(view.members, key=lambda n: view.members[n].tide))))
    assert late
    assert other
    assert decided(view, late, work(view, late), work(view, other)) is None


def test_a_partner_that_is_put_out_is_missing() -> None:
    view = sea()
    one, other, rest = pair_of(view)
    view = met(view, rest[0])
    heard = dict.fromkeys([*rest, one], 95.0)
    left = decided(view, one, work(view, one), heard={**heard, other: 30.0})
    assert left == Left(number=view.length, island=other, why="silent")
    view = view.after(left)
    alone = decided(view, one, work(view, one), heard=heard)
    assert isinstance(alone, Merged)
    assert [part.island for part in alone.parts] == [one]


def test_an_island_that_enters_takes_part_from_the_next_tide_on() -> None:
    view = sea("abcd")
    one, _, rest = pair_of(view)
    view = seas.entered(met(view, one), "e")
    assert view.members["e"].tide == 1
    assert view.partner(rest[0]) == rest[1]


def test_an_island_that_comes_back_with_its_state_goes_on_at_the_next_tide() -> None:
    view = sea("ab")
    view = view.after(Left(number=view.length, island="b", why="silent"))
    view = met(met(view, "a"), "a") if len(view.members) > 1 else view
    with pytest.raises(SeaError, match="never left with work"):
        view.after(Entered(number=view.length, island="b", tide=view.tide, weight=1, lineage=1))
    back = Entered(number=view.length, island="b", tide=view.tide, weight=1, lineage=2)
    assert view.after(back).members["b"].lineage == 2


def test_an_island_that_has_ended_meets_nobody_and_the_sea_is_over_when_all_have() -> None:
    view = sea("ab")
    view = ended(met(view, "a"), "a")
    assert (view.ended, view.is_over) == (("a",), False)
    assert view.partner("b") is None
    silent = decided(view, "a", now=100, heard={"b": 10.0})
    assert silent == Left(number=view.length, island="b", why="silent"), "it waits for b"
    view = ended(view, "b")
    assert (view.ended, view.is_over) == (("a", "b"), True)
    with pytest.raises(SeaError, match="all islands have ended"):
        seas.entered(view, "c")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (lambda v, a, b, c: meeting(v, work(v, a)), "met where"),
        (lambda v, a, b, c: meeting(v, work(v, a), work(v, c)), "met where"),
        (lambda v, a, b, c: meeting(v, work(v, a), work(v, b), work(v, c)), "met where"),
        (lambda v, a, b, c: meeting(v, work(v, a), work(v, b), whole=30), "do not weigh 30"),
        (lambda v, a, b, c: meeting(v, work(v, a), work(v, b), tide=1), "of tide 1 where 0"),
        (lambda v, a, b, c: meeting(v, work(v, a), work(v, b), portion=1), "portion 1 has no"),
        (lambda v, a, b, c: meeting(v, work(v, a), work(v, b, base=1)), "based on 0 meetings"),
        (lambda v, a, b, c: meeting(v, work(v, a), parts=()), "or none"),
        (lambda v, a, b, c: meeting(v, work(v, a), work(v, b, island="e")), "e takes no part"),
        (lambda v, a, b, c: Left(number=v.length, island=a, why="astray"), "no common weights"),
        (
            lambda v, a, b, c: Left(number=v.length, island=a, why="done", last=(work(v, a).part,)),
            "not those of all portions",
        ),
        (
            lambda v, a, b, c: Left(
                number=v.length, island=a, why="silent", last=(work(v, a).part,)
            ),
            "only at the end",
        ),
    ],
)
def test_a_record_that_does_not_follow_is_refused(
    record: Callable[..., Record], message: str
) -> None:
    view = sea()
    one, other, rest = pair_of(view)
    with pytest.raises(SeaError, match=message):
        view.after(record(view, one, other, rest[0]))


def test_an_entry_at_an_older_tide_is_refused() -> None:
    view = met(sea(), "a")
    with pytest.raises(SeaError, match="enters at tide 0, where 1 is next"):
        view.after(Entered(number=view.length, island="e", tide=0, weight=1, lineage=view.length))


def test_a_place_has_the_pairs_and_an_older_logbook_is_read() -> None:
    view = met(sea(), "a")
    made = place.place_of(view, before=place.START, digest=place.START, left=None)
    assert view.founded is not None
    assert place.decode(place.encode(made)).view(view.founded) == view
    old = encode(view.founded).replace(b',"topology":"pairs"', b"")
    found = decode_record(old, origin="old")
    assert found == msgspec.structs.replace(
        view.founded, settings=msgspec.structs.replace(view.settings, topology="all")
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topology": "ring"}, "give 'all' or 'pairs'"),
        ({"wait": Quorum(0.5)}, "give wait='all', or topology='all'"),
        ({"least_every": 4}, "give least_every=None, or topology='all'"),
    ],
)
def test_settings_that_do_not_go_with_pairs_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    given: dict[str, Any] = {"topology": "pairs", "portions": 1, "overlap": 1, **changes}
    with pytest.raises(ConfigError, match=message):
        Islands(**given)
