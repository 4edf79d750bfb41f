"""Watches that wait: nobody misses a change, nobody gets one twice, a prefix is looked at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from holdfast.ckpt.transport import Request
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
            st.just(("tick", 0)),
        )
    )
)
def test_every_watch_gets_each_change_once(steps: list[tuple[str, str | int]]) -> None:
    table, waiting = KeyValueTable(), WaitingWatches()
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
        for found, watches in waiting.changed(events, revision=table.revision):
            for each in watches:
                got(int(each.request.peer), [event.revision for event in found])

    written: dict[str, list[int]] = {prefix: [] for prefix in PREFIXES}
    for kind, what in steps:
        if kind == "put":
            written[str(what)].append(table.put(f"{what}x", ""))
        elif kind == "tick":
            tick()
        elif int(what) not in pending:
            peer = int(what)
            prefix, after = PREFIXES[peer % 2], revision_of[peer]
            if found := events(prefix, after):
                got(peer, [event.revision for event in found])
            else:
                pending.add(peer)
                waiting.add(watch(peer, prefix, after=after))
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
        assert not waiting.changed(events, revision=table.revision)
    assert looks == [("job/", 0), ("job/", 1), ("job/", 2)]


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
