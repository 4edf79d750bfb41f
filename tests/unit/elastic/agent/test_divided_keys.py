"""A follower hears a change as its difference, and reads parts where it has nothing before."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
from doubles import fakes
from doubles.memory_coordinator import MemoryCoordinator

from holdfast.elastic.agent.registry import Registry
from holdfast.elastic.agent.watch import KeyWatch
from holdfast.elastic.coordinator.base import Entry, KeyEvent
from holdfast.elastic.errors import CoordinatorError
from holdfast.elastic.membership.divided import parts_prefix
from holdfast.elastic.membership.records import GenerationRecord, Seating
from holdfast.elastic.membership.view import JobView, generation_key, job_prefix, run_prefix

RUN = "run"
KEY = generation_key(RUN)
WANTED = {"trainer": 9}
DEADLINE_S = 30.0


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def record(number: int, nodes: int) -> GenerationRecord:
    each = [fakes.node(f"n{n}", fakes.worker(f"trainer/{n}")) for n in range(nodes)]
    return fakes.generation(number, each, ranks=[(node.node, node.workers[0]) for node in each])


class Follower:
    """An agent that watches a prefix: its view, and the bytes that it was told."""

    def __init__(self, coordinator: MemoryCoordinator, prefix: str) -> None:
        self.view = JobView(run=RUN, nodes={}, wanted=WANTED)
        self.starts = self.told_bytes = 0
        self.watch = KeyWatch(coordinator, prefix, start=self._start, change=self._change)

    def _start(self, entries: Sequence[Entry]) -> None:
        self.starts += 1
        self.view = JobView.from_entries(entries, run=RUN, wanted=WANTED)

    def _change(self, events: Sequence[KeyEvent]) -> None:
        self.told_bytes += sum(len(event.value) for event in events)
        self.view = self.view.after(events)

    def has(self, found: GenerationRecord) -> Callable[[], bool]:
        return lambda: self.view.generation == found


@pytest.fixture
def coordinator() -> MemoryCoordinator:
    return MemoryCoordinator()


@pytest.fixture
def registry(coordinator: MemoryCoordinator) -> Registry:
    return Registry(coordinator, run=RUN, lease=lambda: 0)


@pytest.fixture
def follow(coordinator: MemoryCoordinator) -> Iterator[Callable[..., Follower]]:
    made: list[Follower] = []

    def make(prefix: str = job_prefix(RUN)) -> Follower:
        made.append(Follower(coordinator, prefix))
        return made[-1]

    yield make
    for each in made:
        each.watch.close()


def parts_left(coordinator: MemoryCoordinator) -> list[str]:
    return [entry.key for entry in coordinator.range(parts_prefix(RUN))[0]]


def shown(coordinator: MemoryCoordinator) -> JobView:
    entries, _ = coordinator.range(run_prefix(RUN))
    return JobView.from_entries(entries, run=RUN, wanted=WANTED)


def propose(registry: Registry, coordinator: MemoryCoordinator, found: GenerationRecord) -> bool:
    view = shown(coordinator)
    return registry.propose(found, expected=view.generation_revision, beside=view)


@pytest.mark.parametrize("prefix", [job_prefix(RUN), run_prefix(RUN)])
def test_change_reaches_who_watches_and_who_follows(
    coordinator: MemoryCoordinator,
    registry: Registry,
    follow: Callable[..., Follower],
    prefix: str,
) -> None:
    early = follow(prefix)
    assert propose(registry, coordinator, record(1, 300))
    until(early.has(record(1, 300)))
    before = early.told_bytes
    assert propose(registry, coordinator, record(2, 299))
    until(early.has(record(2, 299)))
    if prefix == job_prefix(RUN):
        assert early.told_bytes - before < 2048
    assert early.starts <= 2
    late = follow(prefix)
    until(late.has(record(2, 299)))


def test_parts_of_the_newest_record_alone_remain(
    coordinator: MemoryCoordinator, registry: Registry
) -> None:
    seats = (Seating(seat="trainer/0", node="n0", attempt=1),)
    assert registry.seat(seats, expected=0, beside=shown(coordinator))
    for number in range(1, 6):
        assert propose(registry, coordinator, record(number, 9 - number))
    kinds = [key.split("/")[2] for key in parts_left(coordinator)]
    assert kinds == ["generation", "seating"]
    assert shown(coordinator).generation == record(5, 4)
    assert shown(coordinator).seating == seats


def test_parts_of_who_was_slower_are_removed_with_the_next_change(
    coordinator: MemoryCoordinator, registry: Registry
) -> None:
    assert propose(registry, coordinator, record(1, 9))
    view = shown(coordinator)
    assert propose(registry, coordinator, record(2, 8))
    assert not registry.propose(record(2, 7), expected=view.generation_revision, beside=view)
    assert len(parts_left(coordinator)) == 2
    assert shown(coordinator).generation == record(2, 8)
    assert propose(registry, coordinator, record(3, 8))
    assert len(parts_left(coordinator)) == 1


def test_a_record_that_replaces_parts_while_they_are_read_is_read_instead(
    coordinator: MemoryCoordinator, registry: Registry, follow: Callable[..., Follower]
) -> None:
    assert propose(registry, coordinator, record(1, 9))
    get, asked = coordinator.get, threading.Event()

    def late(key: str) -> Entry | None:
        if not asked.is_set():
            asked.set()
            assert propose(registry, coordinator, record(2, 8))
        return get(key)

    coordinator.get = late  # type: ignore[method-assign]
    follower = follow()
    until(follower.has(record(2, 8)))
    assert follower.starts == 1


def test_a_coordinator_that_does_not_answer_loses_no_change(
    coordinator: MemoryCoordinator, registry: Registry, follow: Callable[..., Follower]
) -> None:
    get, refused = coordinator.get, threading.Event()

    def once(key: str) -> Entry | None:
        if not refused.is_set():
            refused.set()
            raise CoordinatorError("away")
        return get(key)

    follower = follow()
    until(lambda: follower.starts == 1)
    coordinator.get = once  # type: ignore[method-assign]
    assert propose(registry, coordinator, record(1, 9))
    until(follower.has(record(1, 9)))
    assert refused.is_set()
