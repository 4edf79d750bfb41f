"""Watches that wait: nobody misses a change, nobody gets one twice, a prefix is looked at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from holdfast.ckpt.transport import Request
from holdfast.elastic.coordinator import waiting as waiting_watches
from holdfast.elastic.coordinator.base import KeyEvent
from holdfast.elastic.coordinator.memory import KeyValueTable
from holdfast.elastic.coordinator.waiting import ServedWatch, WaitingWatches

PREFIXES = ("job/", "nodes/")


@dataclass(slots=True)
class Asked:
    """A request of which only the socket matters."""

    peer: bytes


def watch(peer: int, prefix: str, *, after: int, deadline_s: float = 9.0) -> ServedWatch:
    """Return a watch of a socket."""
    return ServedWatch(cast("Request", Asked(b"%d" % peer)), prefix, after, deadline_s)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("put"), st.sampled_from(PREFIXES)),
            st.tuples(st.just("watch"), st.integers(0, 7)),
            st.tuples(st.just("tick"), st.integers(0, 3)),
        )
    ),
    st.integers(1, 9),
)
def test_every_watch_gets_each_change_once(
    steps: list[tuple[str, str | int]], gather_from: int
) -> None:
    table, waiting = KeyValueTable(), WaitingWatches(gather_from=gather_from)
    now_s = 0.0
    seen: dict[int, list[int]] = {peer: [] for peer in range(8)}
    revision_of = dict.fromkeys(range(8), 0)
    pending: set[int] = set()

    def got(peer: int, revisions: list[int]) -> None:
        seen[peer] += revisions
        revision_of[peer] = table.revision
        pending.discard(peer)

    def events(prefix: str, after: int) -> list[KeyEvent]:
        return table.events(prefix, after=after)

    def tick() -> None:
        answers, complete = waiting.changed(events, revision=table.revision, now_s=now_s)
        for found, watches in answers:
            for each in watches:
                got(int(each.request.peer), [event.revision for event in found])
        late = [peer for peer in pending if events(PREFIXES[peer % 2], revision_of[peer])]
        assert complete is not bool(late)
        for each in waiting.over(now_s):
            found = events(each.prefix, each.after)
            got(int(each.request.peer), [event.revision for event in found])

    written: dict[str, list[int]] = {prefix: [] for prefix in PREFIXES}
    for kind, what in steps:
        if kind == "put":
            written[str(what)].append(table.put(f"{what}x", ""))
        elif kind == "tick":
            now_s += float(what)
            tick()
        elif int(what) not in pending:
            peer = int(what)
            prefix, after = PREFIXES[peer % 2], revision_of[peer]
            if found := events(prefix, after):
                got(peer, [event.revision for event in found])
            else:
                pending.add(peer)
                waiting.add(watch(peer, prefix, after=after, deadline_s=now_s + 2.0))
    tick()
    now_s += waiting_watches.GATHER_MOST_S
    tick()
    for peer, revisions in seen.items():
        wanted = written[PREFIXES[peer % 2]]
        assert revisions == wanted[: len(revisions)]
        if peer in pending:
            assert revisions == wanted


def test_those_that_wait_for_the_same_are_looked_at_once() -> None:
    table, waiting = KeyValueTable(), WaitingWatches()
    for peer in range(100):
        waiting.add(watch(peer, "job/", after=0))
    looks = []

    def events(prefix: str, after: int) -> list[KeyEvent]:
        looks.append((prefix, after))
        return table.events(prefix, after=after)

    for _ in range(3):
        table.put("nodes/a", "")
        assert waiting.changed(events, revision=table.revision, now_s=0.0) == ([], True)
    assert looks == [("job/", 0), ("job/", 1), ("job/", 2)]


def test_an_answer_to_many_waits_for_the_changes_that_follow() -> None:
    table, waiting = KeyValueTable(), WaitingWatches(gather_from=3)
    for peer in range(3):
        waiting.add(watch(peer, "job/", after=0))
    waiting.add(watch(3, "nodes/", after=0))

    def told(now_s: float) -> tuple[list[list[int]], bool]:
        answers, complete = waiting.changed(
            lambda prefix, after: table.events(prefix, after=after),
            revision=table.revision,
            now_s=now_s,
        )
        return [[event.revision for event in found] for found, _ in answers], complete

    table.put("job/a", "")
    table.put("nodes/a", "")
    assert told(1.0) == ([[2]], False), "few wait for nothing"
    table.put("job/b", "")
    assert told(1.0 + waiting_watches.GATHER_EACH_S) == ([], False)
    assert told(1.0 + 3 * waiting_watches.GATHER_EACH_S) == ([[1, 3]], True)


def test_a_watch_ends_at_its_time_unless_its_socket_asks_anew() -> None:
    waiting = WaitingWatches()
    waiting.add(watch(1, "job/", after=0, deadline_s=5.0))
    waiting.add(watch(2, "job/", after=0, deadline_s=5.0))
    waiting.drop(b"2")
    waiting.add(watch(2, "job/", after=0, deadline_s=7.0))
    assert not waiting.over(4.9)
    assert [each.request.peer for each in waiting.over(5.0)] == [b"1"]
    assert [each.request.peer for each in waiting.over(8.0)] == [b"2"]
    assert not waiting.over(99.0)
