"""The conformance suite of `Coordinator`, run by each implementation's tests."""

from __future__ import annotations

import threading
import time

import pytest

from holdfast.elastic.coordinator.base import Coordinator, EventKind, KeyEvent
from holdfast.elastic.errors import CoordinatorError, LeaseExpiredError

PATIENCE_S = 10.0


def watch_until(
    coordinator: Coordinator, prefix: str, *, after: int, count: int
) -> tuple[list[KeyEvent], int]:
    """Collect ``count`` events or fail."""
    events: list[KeyEvent] = []
    deadline_s = time.monotonic() + PATIENCE_S
    while len(events) < count:
        assert time.monotonic() < deadline_s, f"only {events} came"
        found, after = coordinator.watch(prefix, after=after, timeout_s=0.5)
        events += found
    return events, after


class CoordinatorConformance:
    """Subclasses provide the fixture ``coordinator``, and ``short_s``: a lease that ends soon."""

    short_s = 0.2

    def test_absent_key(self, coordinator: Coordinator) -> None:
        assert coordinator.get("r/a") is None
        assert coordinator.delete("r/a") is False

    def test_put_then_get(self, coordinator: Coordinator) -> None:
        first = coordinator.put("r/a", "1")
        second = coordinator.put("r/a", "zwei ü")
        entry = coordinator.get("r/a")
        assert second > first
        assert entry is not None
        assert (entry.key, entry.value, entry.revision, entry.lease) == (
            "r/a", "zwei ü", second, None,
        )  # fmt: skip

    def test_range_is_ordered_and_keeps_to_its_prefix(self, coordinator: Coordinator) -> None:
        for key in ("r/nodes/b", "r/nodes/a", "r/x", "rr/nodes/a"):
            coordinator.put(key, key)
        entries, revision = coordinator.range("r/nodes/")
        assert [entry.key for entry in entries] == ["r/nodes/a", "r/nodes/b"]
        assert revision >= max(entry.revision for entry in entries)

    def test_delete_is_seen(self, coordinator: Coordinator) -> None:
        coordinator.put("r/a", "1")
        assert coordinator.delete("r/a") is True
        assert coordinator.get("r/a") is None

    def test_compare_and_set_needs_the_revision(self, coordinator: Coordinator) -> None:
        assert coordinator.compare_and_set("r/g", "1", expected=0)
        assert not coordinator.compare_and_set("r/g", "other", expected=0)
        entry = coordinator.get("r/g")
        assert entry is not None
        assert coordinator.compare_and_set("r/g", "2", expected=entry.revision)
        assert not coordinator.compare_and_set("r/g", "3", expected=entry.revision)
        entry = coordinator.get("r/g")
        assert entry is not None and entry.value == "2"

    def test_compare_and_set_after_delete_starts_at_absent(self, coordinator: Coordinator) -> None:
        old = coordinator.put("r/g", "1")
        coordinator.delete("r/g")
        assert not coordinator.compare_and_set("r/g", "2", expected=old)
        assert coordinator.compare_and_set("r/g", "2", expected=0)

    def test_of_racing_compare_and_sets_one_wins(self, coordinator: Coordinator) -> None:
        rounds, racers = 10, 6
        wins: list[list[int]] = [[] for _ in range(rounds)]
        gate = threading.Barrier(racers)

        def race(racer: int) -> None:
            for turn in range(rounds):
                gate.wait(PATIENCE_S)
                if coordinator.compare_and_set(f"r/race{turn}", str(racer), expected=0):
                    wins[turn].append(racer)

        threads = [threading.Thread(target=race, args=(i,)) for i in range(racers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        for turn in range(rounds):
            entry = coordinator.get(f"r/race{turn}")
            assert entry is not None
            assert wins[turn] == [int(entry.value)]

    def test_lease_that_ends_deletes_its_keys_and_tells(self, coordinator: Coordinator) -> None:
        lease = coordinator.grant(self.short_s)
        coordinator.put("r/nodes/a", "1", lease=lease)
        coordinator.put("r/nodes/b", "2", lease=lease)
        revision = coordinator.put("r/nodes/c", "no lease")
        events, _ = watch_until(coordinator, "r/nodes/", after=revision, count=2)
        assert [(e.kind, e.key) for e in events] == [
            (EventKind.DELETE, "r/nodes/a"),
            (EventKind.DELETE, "r/nodes/b"),
        ]
        assert [entry.key for entry in coordinator.range("r/")[0]] == ["r/nodes/c"]

    def test_lease_lives_while_kept_alive(self, coordinator: Coordinator) -> None:
        lease = coordinator.grant(1.0)
        coordinator.put("r/a", "1", lease=lease)
        end_s = time.monotonic() + 1.3
        while time.monotonic() < end_s:
            coordinator.keep_alive(lease)
            time.sleep(0.05)
        assert coordinator.get("r/a") is not None

    def test_everything_refuses_an_ended_lease(self, coordinator: Coordinator) -> None:
        lease = coordinator.grant(60)
        coordinator.revoke(lease)
        with pytest.raises(LeaseExpiredError, match=str(lease)):
            coordinator.keep_alive(lease)
        with pytest.raises(LeaseExpiredError):
            coordinator.put("r/a", "1", lease=lease)
        with pytest.raises(LeaseExpiredError):
            coordinator.compare_and_set("r/a", "1", expected=0, lease=lease)
        assert coordinator.get("r/a") is None
        coordinator.revoke(lease)  # nothing happens

    def test_revoke_deletes_at_once(self, coordinator: Coordinator) -> None:
        lease = coordinator.grant(60)
        coordinator.put("r/a", "1", lease=lease)
        coordinator.revoke(lease)
        assert coordinator.get("r/a") is None

    def test_key_put_anew_without_lease_outlives_it(self, coordinator: Coordinator) -> None:
        lease = coordinator.grant(60)
        coordinator.put("r/a", "1", lease=lease)
        coordinator.put("r/a", "2")
        coordinator.revoke(lease)
        entry = coordinator.get("r/a")
        assert entry is not None and entry.value == "2"

    def test_lease_needs_time(self, coordinator: Coordinator) -> None:
        with pytest.raises(CoordinatorError, match="positive"):
            coordinator.grant(0)

    def test_watch_returns_empty_when_nothing_happens(self, coordinator: Coordinator) -> None:
        revision = coordinator.put("r/a", "1")
        start_s = time.monotonic()
        events, after = coordinator.watch("r/", after=revision, timeout_s=0.2)
        assert events == []
        assert after >= revision
        assert time.monotonic() - start_s >= 0.19

    def test_watch_sees_what_happened_before_it_began(self, coordinator: Coordinator) -> None:
        _, revision = coordinator.range("r/")
        coordinator.put("r/a", "1")
        coordinator.put("other", "x")
        coordinator.delete("r/a")
        events, after = coordinator.watch("r/", after=revision, timeout_s=5)
        assert [(e.kind, e.key, e.value) for e in events] == [
            (EventKind.PUT, "r/a", "1"),
            (EventKind.DELETE, "r/a", ""),
        ]
        assert [e.revision for e in events] == sorted(e.revision for e in events)
        assert coordinator.watch("r/", after=after, timeout_s=0) == ([], after)

    def test_watch_misses_nothing_under_concurrent_writes(self, coordinator: Coordinator) -> None:
        _, after = coordinator.range("r/")
        writers, each = 3, 30

        def write(number: int) -> None:
            for i in range(each):
                coordinator.put(f"r/{number}", str(i))

        threads = [threading.Thread(target=write, args=(n,)) for n in range(writers)]
        for thread in threads:
            thread.start()
        events, _ = watch_until(coordinator, "r/", after=after, count=writers * each)
        for thread in threads:
            thread.join(PATIENCE_S)
        for number in range(writers):
            values = [e.value for e in events if e.key == f"r/{number}"]
            assert values == [str(i) for i in range(each)]
        assert len({e.revision for e in events}) == len(events)

    def test_blocking_watch_does_not_block_other_calls(self, coordinator: Coordinator) -> None:
        _, after = coordinator.range("r/")
        found: list[KeyEvent] = []

        def watch() -> None:
            found.extend(coordinator.watch("r/", after=after, timeout_s=PATIENCE_S)[0])

        watchers = [threading.Thread(target=watch) for _ in range(3)]
        for thread in watchers:
            thread.start()
        start_s = time.monotonic()
        for _ in range(20):
            coordinator.get("r/a")
        assert time.monotonic() - start_s < PATIENCE_S / 2
        coordinator.put("r/a", "wake")
        for thread in watchers:
            thread.join(PATIENCE_S)
        assert [event.value for event in found] == ["wake"] * 3

    def test_watch_from_an_unknown_future_asks_to_read_again(
        self, coordinator: Coordinator
    ) -> None:
        revision = coordinator.put("r/a", "1")
        events, after = coordinator.watch("r/", after=revision + 1000, timeout_s=5)
        assert [event.kind for event in events] == [EventKind.RESET]
        assert after == revision
