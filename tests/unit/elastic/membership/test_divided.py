"""A divided record is read from the one before it, or from its parts, or refused by its key."""

from __future__ import annotations

import pytest
from doubles import fakes

from holdfast.elastic.coordinator.base import Entry, EventKind, KeyEvent
from holdfast.elastic.errors import CoordinatorError
from holdfast.elastic.membership import divided as module
from holdfast.elastic.membership.divided import (
    DividedRecord,
    divided,
    head_of,
    lacking,
    part_keys,
    parts_of,
    parts_prefix,
    superseded,
)
from holdfast.elastic.membership.records import GenerationRecord, Seating
from holdfast.elastic.membership.view import (
    JobView,
    encode,
    generation_key,
    run_prefix,
    seating_key,
)

RUN = "run"
KEY = generation_key(RUN)
WANTED = {"trainer": 3}


def record(number: int, nodes: int = 3) -> GenerationRecord:
    each = [fakes.node(f"n{n}", fakes.worker(f"trainer/{n}")) for n in range(nodes)]
    return fakes.generation(number, each, ranks=[(node.node, node.workers[0]) for node in each])


def chain(count: int, *, nodes: int = 3) -> list[DividedRecord]:
    """Return generations 1 to ``count``, of revisions 10, 20, …; their nodes become fewer."""
    found, before = [], None
    for number in range(1, count + 1):
        now = record(number, nodes - number)
        found.append(divided(KEY, now, base=10 * (number - 1), before=before))
        before = now
    return found


def put(key: str, value: str, revision: int) -> KeyEvent:
    return KeyEvent(kind=EventKind.PUT, key=key, value=value, revision=revision)


def parts(found: DividedRecord, revision: int = 1) -> list[Entry]:
    return [Entry(key=key, value=text, revision=revision) for key, text in found.parts.items()]


def empty() -> JobView:
    return JobView(run=RUN, nodes={}, wanted=WANTED)


def first(found: DividedRecord) -> JobView:
    entries = [Entry(key=KEY, value=found.head, revision=10), *parts(found)]
    return JobView.from_entries(entries, run=RUN, wanted=WANTED)


def test_whole_record_is_read_from_its_parts() -> None:
    (found,) = chain(1)
    view = first(found)
    assert view.generation == record(1, 2)
    assert view.generation_revision == 10
    assert set(view.decoded) == {KEY}, "parts are no records of their own"


def test_next_record_is_read_from_the_one_before_without_a_part() -> None:
    one, two, three = chain(3, nodes=9)
    view = first(one).after([put(KEY, two.head, 20)])
    assert view.generation == record(2, 7)
    assert view.after([put(KEY, three.head, 30)]).generation == record(3, 6)


def test_several_changes_at_once_build_on_each_other_in_any_order() -> None:
    one, two, three = chain(3, nodes=9)
    events = [put(KEY, three.head, 30), put(KEY, two.head, 20)]
    assert first(one).after(events).generation == record(3, 6)
    late = [put(KEY, one.head, 10), *events]
    assert first(one).after(late).generation == record(3, 6)


def test_a_reader_that_missed_a_change_needs_the_parts() -> None:
    one, _, three = chain(3, nodes=9)
    view = first(one)
    with pytest.raises(CoordinatorError, match="run/job/generation: 1 of its 1 parts are missing"):
        view.after([put(KEY, three.head, 30)])
    told = [put(key, text, 29) for key, text in three.parts.items()]
    assert view.after([*told, put(KEY, three.head, 30)]).generation == record(3, 6)
    entries = [Entry(key=KEY, value=three.head, revision=30), *parts(three)]
    found = JobView.from_entries(entries, run=RUN, wanted=WANTED, before=view)
    assert found.generation == record(3, 6)


def test_record_that_is_not_divided_follows_one_that_is_and_the_other_way() -> None:
    one, two = chain(2, nodes=9)
    plain = encode(record(1, 8))
    view = empty().after([put(KEY, plain, 10)])
    assert view.after([put(KEY, two.head, 20)]).generation == record(2, 7)
    assert first(one).after([put(KEY, encode(record(2)), 20)]).generation == record(2)


def test_seating_is_divided_alike() -> None:
    key = seating_key(RUN)
    seats = tuple(Seating(seat=f"trainer/{n}", node=f"n{n}", attempt=1) for n in range(9))
    one = divided(key, seats, base=0, before=())
    two = divided(key, seats[1:], base=10, before=seats)
    entries = [Entry(key=key, value=one.head, revision=10), *parts(one)]
    view = JobView.from_entries(entries, run=RUN, wanted=WANTED)
    assert view.seating == seats
    assert view.after([put(key, two.head, 20)]).seating == seats[1:]


def test_large_record_has_parts_that_a_store_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART_CHARS", 1000)
    (found,) = chain(1, nodes=80)
    assert len(found.parts) > 10
    assert max(map(len, found.parts.values())) == 1000
    assert first(found).generation == record(1, 79)
    shuffled = dict(zip(found.parts, reversed(found.parts.values()), strict=True))
    with pytest.raises(CoordinatorError, match="another digest"):
        first(DividedRecord(head=found.head, parts=shuffled))


def test_difference_that_is_too_large_for_a_head_is_not_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told, long = head_of(KEY, chain(2)[1].head), 10
    assert told is not None and len(told.difference) > long
    monkeypatch.setattr(module, "MOST_DIFFERENCE_CHARS", long)
    head = head_of(KEY, chain(2)[1].head)
    assert head is not None and head.difference == ""


def test_needed_parts_are_those_of_heads_whose_record_before_is_not_known() -> None:
    one, two = chain(2, nodes=9)
    both = [(KEY, one.head), (KEY, two.head)]
    assert lacking(both, follows=True) == tuple(one.parts), "the first tells no difference"
    assert lacking([(KEY, two.head)], follows=True) == ()
    assert lacking([(KEY, two.head)], follows=False) == tuple(two.parts)
    assert lacking([(KEY, two.head), *two.parts.items()], follows=False) == ()
    assert lacking([("run/nodes/a", "{}")], follows=False) == ()


def test_parts_that_nobody_needs_are_those_against_the_same_or_an_earlier_record() -> None:
    one, two, three = chain(3, nodes=9)
    rival = divided(KEY, record(2, 4), base=10, before=None)
    there = [*one.parts, *rival.parts, *two.parts, *three.parts]
    assert superseded(KEY, there, base=10, own=two.parts) == [*one.parts, *rival.parts]
    assert superseded(KEY, [f"{parts_of(KEY)}strange", "x"], base=10, own=()) == []


def test_keys_of_parts_are_the_runs_own_and_apart_from_the_keys_of_the_job() -> None:
    (found,) = chain(1)
    head = head_of(KEY, found.head)
    assert head is not None
    assert part_keys(KEY, head) == tuple(found.parts)
    assert all(key.startswith(parts_prefix(RUN)) for key in found.parts)
    assert parts_prefix(RUN).startswith(run_prefix(RUN))


@pytest.mark.parametrize("value", ["divided:", "divided:{}", "divided:{}\n{}", "divided:\n"])
def test_damaged_head_is_refused_by_the_name_of_its_key(value: str) -> None:
    with pytest.raises(CoordinatorError, match="run/job/generation: not a readable head"):
        empty().after([put(KEY, value, 10)])


def test_damaged_difference_is_refused_by_the_name_of_its_key() -> None:
    one, two = chain(2, nodes=9)
    cut = two.head[:-5]
    with pytest.raises(CoordinatorError, match="run/job/generation: no difference from the record"):
        first(one).after([put(KEY, cut, 20)])
