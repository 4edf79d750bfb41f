"""The view of a sea: which record follows, and what it makes of the sea."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from doubles import seas

from holdfast.elastic.errors import SeaError
from holdfast.elastic.sea.records import Entered, Left, Record
from holdfast.elastic.sea.settings import Islands, Quorum
from holdfast.elastic.sea.view import View

ALL = Islands(every=4, portions=2, overlap=1, founders=2)
QUORUM = Islands(every=4, portions=2, overlap=1, wait=Quorum(0.5), age_limit=1)


def sea(islands: Islands = ALL, *names: str) -> View:
    return seas.entered(seas.founded(islands), *(names or ("a", "b")))


def merged(view: View, *names: str) -> View:
    return view.after(seas.merged(view, *(seas.work(view, name) for name in names)))


def test_a_merge_moves_the_tide_and_remembers_weights_and_bases() -> None:
    view = sea()
    works = [seas.work(view, "a", weight=7), seas.work(view, "b", weight=8)]
    view = view.after(seas.merged(view, *works))
    assert (view.tide, view.portion, view.length) == (1, 1, 4)
    assert view.weights == {"a": 7, "b": 8}
    assert view.members["a"].merged == (1, 0)
    view = merged(merged(view, "a", "b"), "a", "b")
    assert (view.tide, view.merges(0), view.merges(1)) == (3, 2, 1)
    assert view.bases == (1, 0)


def test_the_view_of_all_records_is_that_of_one_after_the_other() -> None:
    view = sea()
    records = [
        view.founded,
        *(
            Entered(number=at, island=name, tide=0, weight=10, lineage=at)
            for at, name in ((1, "a"), (2, "b"))
        ),
        seas.merged(view, *(seas.work(view, name) for name in "ab")),
    ]
    assert View.of(each for each in records if each) == merged(view, "a", "b")


def _other(view: View, **changes: object) -> Record:
    return seas.merged(view, *(seas.work(view, name) for name in "ab"), **changes)


def _with(view: View, **changes: object) -> Record:
    return seas.merged(view, seas.work(view, "a"), seas.work(view, "b", **changes))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (lambda v: _other(v, number=v.length + 1), "number 4 where 3 is next"),
        (lambda v: _other(v, number=v.length - 1), "number 2 where 3 is next"),
        (lambda v: _other(v, tide=1), "portion 0 in tide 1"),
        (lambda v: _other(v, portion=1), "portion 1 in tide 0"),
        (lambda v: _other(v, whole=30), "weighs 30 where it weighs 20"),
        (lambda v: _other(v, parts=()), "0 of 2 islands are too few"),
        (lambda v: seas.merged(v, seas.work(v, "a")), "1 of 2 islands are too few"),
        (lambda v: seas.merged(v, *[seas.work(v, "a")] * 2), "named twice"),
        (lambda v: _with(v, island="c"), "c takes no part"),
        (lambda v: _with(v, base=1), "b says 1 merges of 0"),
        (lambda v: _with(v, state=seas.digest("odd")), "works of b, whose weights are not"),
        (lambda v: msgspec.structs.replace(v.founded, number=3), "has only one"),
        (lambda v: Entered(number=3, island="a", tide=0, weight=1, lineage=3), "already"),
        (lambda v: Entered(number=3, island="c", tide=1, weight=1, lineage=3), "1 merges of 0"),
        (lambda v: Entered(number=3, island="c", tide=0, weight=1, lineage=1), "never left"),
        (lambda v: Left(number=3, island="c", why="done"), "c takes no part"),
        (lambda v: Left(number=3, island="a", why="astray"), "do not show a astray"),
        (lambda v: Left(number=3, island="a", why="astray", portion=2), "no portion 2"),
    ],
)
def test_a_record_that_does_not_follow_is_refused(
    record: Callable[[View], Record], message: str
) -> None:
    view = sea()
    with pytest.raises(SeaError, match=message):
        view.after(record(view))


def test_the_first_merge_waits_for_the_founders() -> None:
    view = sea(ALL, "a")
    with pytest.raises(SeaError, match="1 islands are there of 2 founders"):
        merged(view, "a")


def test_a_logbook_begins_with_its_founding() -> None:
    with pytest.raises(SeaError, match="begins with Founded"):
        View().after(Entered(number=0, island="a", tide=0, weight=1, lineage=0))
    with pytest.raises(SeaError, match="no settings before it is founded"):
        _ = View().portion


def test_an_absent_island_counts_in_the_whole() -> None:
    view = sea(QUORUM)
    record = seas.merged(view, seas.work(view, "a", weight=30))
    assert record.whole == 40
    with pytest.raises(SeaError, match="weighs 30 where it weighs 40"):
        view.after(msgspec.structs.replace(record, whole=30))


def test_a_quorum_is_a_share_of_the_weight() -> None:
    view = seas.entered(sea(QUORUM, "a"), "b", weight=11)
    assert not view.is_enough([seas.work(view, "a").part])
    assert view.is_enough([seas.work(view, "a", weight=11).part])


def test_a_work_is_merged_once() -> None:
    view = sea(QUORUM)
    old = seas.work(view, "a")
    view = merged(merged(view, "a"), "a", "b")
    assert not view.fits(old)
    with pytest.raises(SeaError, match="merge 1 has it already"):
        view.after(seas.merged(view, old))
    assert view.fits(seas.work(view, "a"))


def test_a_late_work_is_merged_until_it_is_too_old() -> None:
    view = sea(QUORUM)
    late = seas.work(view, "b")
    view = merged(merged(view, "a"), "a")
    assert view.fits(late)
    after = view.after(seas.merged(view, late, seas.work(view, "a")))
    assert after.members["b"].merged == (2, 0)
    view = merged(merged(view, "a"), "a")
    assert not view.fits(late)
    with pytest.raises(SeaError, match="2 merges old, allowed are 1"):
        view.after(seas.merged(view, late, seas.work(view, "a")))


def test_an_island_comes_back_with_its_lineage_or_begins_anew() -> None:
    view = merged(sea(), "a", "b")
    view = seas.left(merged(view, "a", "b"), "b")
    old = seas.work(view, "b", base=0, tide=0)
    back = Entered(number=view.length, island="b", tide=0, weight=5, lineage=2)
    same = view.after(back)
    assert same.members["b"].merged == (1, 1)
    assert not same.fits(old)
    assert same.fits(seas.work(same, "b"))
    anew = view.after(msgspec.structs.replace(back, tide=2, lineage=view.length))
    assert anew.members["b"].lineage == view.length
    assert not anew.fits(seas.work(anew, "b", lineage=2))
    again = seas.left(anew, "b")
    with pytest.raises(SeaError, match="never left with work of lineage 2"):
        again.after(msgspec.structs.replace(back, number=again.length))


def test_the_digest_of_the_larger_weight_is_the_seas() -> None:
    view = sea(ALL, "a", "b", "c")
    odd = seas.digest("odd")
    parts = [seas.work(view, name).part for name in "ab"]
    parts.append(seas.work(view, "c", weight=15, state=odd).part)
    assert view.astray(0, parts) == ("c",)
    heavy = msgspec.structs.replace(parts[2], weight=21)
    assert view.astray(0, [*parts[:2], heavy]) == ("a", "b")
    even = msgspec.structs.replace(parts[2], weight=20)
    assert view.astray(0, [*parts[:2], even]) == ("c",), "of two as large, the older"
    left = Left(number=view.length, island="c", why="astray", portion=0, seen=tuple(parts))
    assert set(view.after(left).members) == {"a", "b"}
    with pytest.raises(SeaError, match="do not show a astray"):
        view.after(msgspec.structs.replace(left, island="a"))


def test_a_digest_that_was_agreed_upon_stays() -> None:
    view = sea(QUORUM)
    view = merged(merged(view, "a"), "a")
    late = seas.work(view, "b", base=0, tide=0, weight=500, state=seas.digest("odd"))
    assert view.astray(0, [late.part]) == ("b",)
    assert view.states[0] == {0: seas.digest("state0.0")}


def test_a_sea_that_is_too_heavy_is_refused() -> None:
    view = seas.entered(seas.founded(QUORUM), "a", "b", weight=(1 << 30) + 5)
    with pytest.raises(SeaError, match="weigh 2147483658 together"):
        view.whole([])


def test_islands_take_steps_by_their_speed_from_the_first_merge_that_tells_it() -> None:
    islands = Islands(every=40, portions=2, overlap=1, least_every=10)
    view = seas.entered(seas.founded(islands), "a", "b", "c", "d")
    assert [view.stride(name) for name in "abcd"] == [20] * 4
    times = {"a": 1000, "b": 1030, "c": 2100, "d": 90_000}
    works = [seas.work(view, name, step_us=us) for name, us in times.items()]
    view = view.after(seas.merged(view, *works))
    assert [view.stride(name) for name in "abcd"] == [20, 19, 10, 5]
    view = view.after(seas.merged(view, *(seas.work(view, name) for name in "abcd")))
    assert [view.stride(name) for name in "abcd"] == [20, 19, 10, 5], "the last known speeds"
    view = seas.left(view, "a")
    assert [view.stride(name) for name in "abcd"] == [20, 20, 10, 5]


def test_without_a_least_number_all_islands_take_the_same_steps() -> None:
    view = seas.entered(seas.founded(Islands(every=40, portions=2, overlap=1)), "a", "b")
    works = [seas.work(view, name, step_us=us) for name, us in (("a", 10), ("b", 90))]
    view = view.after(seas.merged(view, *works))
    assert [view.stride(name) for name in "ab"] == [20, 20]
