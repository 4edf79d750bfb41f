"""A coordinator for the threads of one process."""

from __future__ import annotations

import threading

from holdfast.elastic.coordinator.base import Entry, KeyEvent
from holdfast.elastic.coordinator.clock import Clock, SystemClock
from holdfast.elastic.coordinator.memory import KeyValueTable


class MemoryCoordinator:
    """A `Coordinator` for the threads of one process."""

    def __init__(self, table: KeyValueTable | None = None, *, clock: Clock | None = None) -> None:
        self._table = table or KeyValueTable()
        self._clock: Clock = clock or SystemClock()
        self._changed = threading.Condition()

    def grant(self, ttl_s: float) -> int:
        """See `Coordinator.grant`."""
        with self._changed:
            return self._table.grant(ttl_s, now_s=self._expire())

    def keep_alive(self, lease: int) -> None:
        """See `Coordinator.keep_alive`."""
        with self._changed:
            self._table.keep_alive(lease, now_s=self._expire())

    def revoke(self, lease: int) -> None:
        """See `Coordinator.revoke`."""
        with self._changed:
            self._table.revoke(lease)
            self._changed.notify_all()

    def get(self, key: str) -> Entry | None:
        """See `Coordinator.get`."""
        with self._changed:
            self._expire()
            return self._table.get(key)

    def range(self, prefix: str) -> tuple[list[Entry], int]:
        """See `Coordinator.range`."""
        with self._changed:
            self._expire()
            return self._table.range(prefix)

    def put(self, key: str, value: str, *, lease: int | None = None) -> int:
        """See `Coordinator.put`."""
        with self._changed:
            self._expire()
            revision = self._table.put(key, value, lease=lease)
            self._changed.notify_all()
            return revision

    def compare_and_set(
        self, key: str, value: str, *, expected: int, lease: int | None = None
    ) -> bool:
        """See `Coordinator.compare_and_set`."""
        with self._changed:
            self._expire()
            done = self._table.compare_and_set(key, value, expected=expected, lease=lease)
            self._changed.notify_all()
            return done

    def delete(self, key: str) -> bool:
        """See `Coordinator.delete`."""
        with self._changed:
            self._expire()
            done = self._table.delete(key)
            self._changed.notify_all()
            return done

    def watch(self, prefix: str, *, after: int, timeout_s: float) -> tuple[list[KeyEvent], int]:
        """See `Coordinator.watch`."""
        deadline_s = self._clock.now_s() + timeout_s
        with self._changed:
            while True:
                now_s = self._expire()
                found = self._table.events(prefix, after=after)
                if found or now_s >= deadline_s:
                    return found, self._table.revision
                expiry_s = self._table.next_expiry_s()
                until_s = deadline_s if expiry_s is None else min(deadline_s, expiry_s)
                self._changed.wait(until_s - now_s)

    def close(self) -> None:
        """See `Coordinator.close`."""

    def _expire(self) -> float:
        now_s = self._clock.now_s()
        if self._table.expire(now_s):
            self._changed.notify_all()
        return now_s
