"""A client under load, whose acknowledged writes and observed changes are checked afterwards."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Self

from holdfast.elastic.coordinator.base import Coordinator, EventKind, KeyEvent
from holdfast.elastic.errors import CoordinatorError

PATIENCE_S = 60.0


class History:
    """Writers that put and compare-and-set, each on a connection of its own, and one watcher.

    A writer never writes the same key twice, so that every event has one cause. On leaving the
    block all of it is checked.
    """

    def __init__(self, connect: Callable[[], Coordinator], *, writers: int = 3) -> None:
        self._reader, self._watcher = connect(), connect()
        _, self._after = self._reader.range("h/")
        self._stop, self._stop_watching = threading.Event(), threading.Event()
        self.acknowledged: dict[str, str] = {}
        self.uncertain: dict[str, str] = {}
        self.failures: list[str] = []
        self.events: list[KeyEvent] = []
        self.resets = 0
        self._threads = [
            threading.Thread(target=self._write, args=(connect(), f"h/{number}"), daemon=True)
            for number in range(writers)
        ]
        self._watching = threading.Thread(target=self._watch, daemon=True)
        for thread in [*self._threads, self._watching]:
            thread.start()

    def _write(self, coordinator: Coordinator, prefix: str) -> None:
        turn = 0
        while not self._stop.is_set():
            turn += 1
            key, value = f"{prefix}/{turn:06}", str(turn)
            try:
                if turn % 2:
                    coordinator.put(key, value)
                else:
                    assert coordinator.compare_and_set(key, value, expected=0)
            except CoordinatorError as error:
                self.uncertain[key] = value
                self.failures.append(str(error))
                continue
            self.acknowledged[key] = value

    def _watch(self) -> None:
        after = self._after
        while not self._stop_watching.is_set():
            try:
                events, after = self._watcher.watch("h/", after=after, timeout_s=1.0)
            except CoordinatorError:
                time.sleep(0.05)
                continue
            self.resets += any(event.kind is EventKind.RESET for event in events)
            self.events += events

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, where: object) -> None:
        self._stop.set()
        try:
            if error is None:
                self._end()
        finally:
            self._stop_watching.set()

    def goes_on(self, writes: int = 10) -> None:
        """Wait until every writer together has got ``writes`` more acknowledged."""
        target, deadline_s = len(self.acknowledged) + writes, time.monotonic() + PATIENCE_S
        while len(self.acknowledged) < target:
            assert time.monotonic() < deadline_s, f"no more writes: {self.failures[-3:]}"
            time.sleep(0.01)

    def catches_up(self) -> None:
        """Wait until the watch has brought everything acknowledged until now."""
        wanted, deadline_s = set(self.acknowledged), time.monotonic() + PATIENCE_S
        while not wanted <= {event.key for event in self.events}:
            assert time.monotonic() < deadline_s, "the watch is silent"
            time.sleep(0.01)

    def seen(self) -> int:
        """Wait until the watch has brought something; return the newest revision it brought."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not self.events:
            assert time.monotonic() < deadline_s, "the watch brings nothing"
            time.sleep(0.01)
        return self.events[-1].revision

    def _end(self) -> None:
        """Check that nothing was lost, missed, doubled or reordered."""
        for thread in self._threads:
            thread.join(PATIENCE_S)
        stored, revision = self._settled()
        deadline_s = time.monotonic() + PATIENCE_S
        while {event.key for event in self.events} < set(stored):
            assert time.monotonic() < deadline_s, "the watch has not come to the end"
            time.sleep(0.01)
        self._stop_watching.set()
        self._watching.join(PATIENCE_S)
        self._check(stored)
        assert all(event.revision <= revision for event in self.events)

    def _settled(self) -> tuple[dict[str, str], int]:
        entries, revision = self._reader.range("h/")
        return {entry.key: entry.value for entry in entries}, revision

    def _check(self, stored: dict[str, str]) -> None:
        written = self.acknowledged | self.uncertain
        lost = {key for key, value in self.acknowledged.items() if stored.get(key) != value}
        assert not lost, f"acknowledged and lost: {sorted(lost)}"
        assert all(written[key] == value for key, value in stored.items()), "never written"
        assert self.resets == 0
        revisions = [event.revision for event in self.events]
        assert revisions == sorted(set(revisions)), "doubled or reordered"
        seen = [event.key for event in self.events]
        assert len(seen) == len(set(seen)), "doubled"
        assert set(seen) == set(stored), "missed"
        assert all(stored[event.key] == event.value for event in self.events)
