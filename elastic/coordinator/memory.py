"""The coordinator's state: a key-value table with revisions, leases and a bounded history.

`KeyValueTable` is a state machine: the caller passes the time, and one thread at a time calls it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from holdfast.elastic.coordinator.base import Entry, EventKind, KeyEvent
from holdfast.elastic.coordinator.journal import ChangeKind, TableChange
from holdfast.elastic.errors import CoordinatorError, LeaseExpiredError

MAX_VALUE_BYTES = 64 << 20
MAX_HISTORY_EVENTS = 10_000
MAX_HISTORY_BYTES = 64 << 20


@dataclass(slots=True)
class _Lease:
    ttl_s: float
    ends_s: float = math.inf
    keys: set[str] = field(default_factory=set)


class KeyValueTable:
    """Entries, leases and the newest events; the caller gives the time.

    ``write_down`` is called with every change before it is made; its errors stop the change.
    """

    def __init__(
        self,
        *,
        max_history_events: int = MAX_HISTORY_EVENTS,
        max_history_bytes: int = MAX_HISTORY_BYTES,
    ) -> None:
        self._max_events, self._max_bytes = max_history_events, max_history_bytes
        self._entries: dict[str, Entry] = {}
        self._leases: dict[int, _Lease] = {}
        self._newest_lease = 0
        self._none_ends_before_s = math.inf
        self._history: list[KeyEvent] = []
        self._history_bytes = 0
        self._forgotten = 0
        self.revision = 0
        self.write_down: Callable[[TableChange], None] = _keep_in_mind

    def grant(self, ttl_s: float, *, now_s: float) -> int:
        """Return a new lease that ends at ``now_s + ttl_s``."""
        if not ttl_s > 0:
            raise CoordinatorError(f"lease of {ttl_s} s: the time to live must be positive")
        lease = self._newest_lease + 1
        self.write_down(TableChange(kind=ChangeKind.GRANT, lease=lease, ttl_s=ttl_s))
        self._newest_lease = lease
        self._leases[lease] = _Lease(ttl_s)
        self._begin(self._leases[lease], now_s=now_s)
        return lease

    def keep_alive(self, lease: int, *, now_s: float) -> None:
        """Restart the lease's time. Raises ``LeaseExpiredError``."""
        self._begin(self._live(lease), now_s=now_s)

    def postpone(self, seconds: float) -> None:
        """Extend every lease by ``seconds``, in which the store itself could not be reached."""
        for lease in self._leases.values():
            lease.ends_s += seconds

    def revoke(self, lease: int) -> None:
        """End a lease and delete its keys; does nothing if it has ended already."""
        if found := self._leases.get(lease):
            for key in sorted(found.keys):
                self.delete(key)
            self.write_down(TableChange(kind=ChangeKind.END, lease=lease))
            del self._leases[lease]

    def expire(self, now_s: float) -> list[int]:
        """End every lease whose time is up, and return them."""
        if now_s < self._none_ends_before_s:
            return []
        over = [lease for lease, state in self._leases.items() if state.ends_s <= now_s]
        for lease in over:
            self.revoke(lease)
        self._none_ends_before_s = min(self._ends_s(), default=math.inf)
        return over

    def next_expiry_s(self) -> float | None:
        """Return the time at which the next lease ends, None if there is none."""
        return min(self._ends_s(), default=None)

    def get(self, key: str) -> Entry | None:
        """Return the entry, or None."""
        return self._entries.get(key)

    def range(self, prefix: str) -> tuple[list[Entry], int]:
        """Return the entries whose keys start with ``prefix``, in key order, and the revision."""
        keys = sorted(key for key in self._entries if key.startswith(prefix))
        return [self._entries[key] for key in keys], self.revision

    def put(self, key: str, value: str, *, lease: int | None = None) -> int:
        """Write and return the revision. Raises ``LeaseExpiredError``."""
        if len(value) > MAX_VALUE_BYTES:
            raise CoordinatorError(
                f"{key}: value of {len(value)} bytes, at most {MAX_VALUE_BYTES} are accepted"
            )
        if lease is not None:
            self._live(lease)
        self.write_down(
            TableChange(
                kind=ChangeKind.PUT, key=key, value=value, revision=self.revision + 1, lease=lease
            )
        )
        self._detach(key)
        if lease is not None:
            self._leases[lease].keys.add(key)
        self._record(EventKind.PUT, key, value)
        self._entries[key] = Entry(key=key, value=value, revision=self.revision, lease=lease)
        return self.revision

    def compare_and_set(
        self, key: str, value: str, *, expected: int, lease: int | None = None
    ) -> bool:
        """Write if the entry's revision is ``expected`` (0: absent).

        Raises ``LeaseExpiredError``.
        """
        if lease is not None:
            self._live(lease)
        entry = self._entries.get(key)
        if (entry.revision if entry else 0) != expected:
            return False
        self.put(key, value, lease=lease)
        return True

    def delete(self, key: str) -> bool:
        """Delete, and return whether the key existed."""
        if key not in self._entries:
            return False
        self.write_down(TableChange(kind=ChangeKind.DELETE, key=key, revision=self.revision + 1))
        self._detach(key)
        del self._entries[key]
        self._record(EventKind.DELETE, key, "")
        return True

    def events(self, prefix: str, *, after: int) -> list[KeyEvent]:
        """Return the changes newer than ``after``, or one RESET if they have been dropped."""
        if after < self._forgotten or after > self.revision:
            return [KeyEvent(kind=EventKind.RESET, key=prefix, value="", revision=self.revision)]
        start = bisect_right(self._history, after, key=lambda event: event.revision)
        return [event for event in self._history[start:] if event.key.startswith(prefix)]

    def replay(self, changes: Iterable[TableChange], *, now_s: float) -> None:
        """Apply changes from a journal; every lease that had not ended restarts its time."""
        for change in changes:
            match change:
                case TableChange(kind=ChangeKind.GRANT, lease=int(lease)):
                    self._newest_lease = max(self._newest_lease, lease)
                    self._leases[lease] = _Lease(change.ttl_s)
                    self._begin(self._leases[lease], now_s=now_s)
                case TableChange(kind=ChangeKind.END, lease=int(lease)):
                    self.revoke(lease)
                case TableChange(kind=ChangeKind.PUT):
                    self.revision = change.revision - 1
                    self.put(change.key, change.value, lease=change.lease)
                case TableChange(kind=ChangeKind.DELETE):
                    self.delete(change.key)
                case TableChange(kind=ChangeKind.BASE):
                    self.revision = self._forgotten = change.revision
                    self._newest_lease = change.lease or 0
                    self._history, self._history_bytes = [], 0

    def changes(self) -> list[TableChange]:
        """Return the fewest changes that lead to this state; drops the older events."""
        leases = [
            TableChange(kind=ChangeKind.GRANT, lease=lease, ttl_s=state.ttl_s)
            for lease, state in self._leases.items()
        ]
        puts = [
            TableChange(
                kind=ChangeKind.PUT, key=e.key, value=e.value, revision=e.revision, lease=e.lease
            )
            for e in sorted(self._entries.values(), key=lambda entry: entry.revision)
        ]
        base = TableChange(kind=ChangeKind.BASE, revision=self.revision, lease=self._newest_lease)
        return [*leases, *puts, base]

    def _begin(self, lease: _Lease, *, now_s: float) -> None:
        lease.ends_s = now_s + lease.ttl_s
        self._none_ends_before_s = min(self._none_ends_before_s, lease.ends_s)

    def _ends_s(self) -> Iterator[float]:
        return (lease.ends_s for lease in self._leases.values())

    def _live(self, lease: int) -> _Lease:
        if (found := self._leases.get(lease)) is None:
            raise LeaseExpiredError(f"lease {lease} has ended: stop acting, then ask for a new one")
        return found

    def _detach(self, key: str) -> None:
        entry = self._entries.get(key)
        if entry and entry.lease is not None and (lease := self._leases.get(entry.lease)):
            lease.keys.discard(key)

    def _record(self, kind: EventKind, key: str, value: str) -> None:
        self.revision += 1
        self._history.append(KeyEvent(kind=kind, key=key, value=value, revision=self.revision))
        self._history_bytes += len(key) + len(value)
        if len(self._history) > self._max_events or self._history_bytes > self._max_bytes:
            self._forget()

    def _forget(self) -> None:
        """Drop the older half of the allowed history, so that dropping is rare."""
        drop = 0
        while drop < len(self._history) - 1 and (
            len(self._history) - drop > self._max_events // 2
            or self._history_bytes > self._max_bytes // 2
        ):
            event = self._history[drop]
            self._history_bytes -= len(event.key) + len(event.value)
            self._forgotten = event.revision
            drop += 1
        del self._history[:drop]


def _keep_in_mind(change: TableChange) -> None:
    """Write nothing: the table ends with its process."""
