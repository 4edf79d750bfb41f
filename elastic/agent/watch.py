"""The watch of the run's keys at the coordinator, on a thread with its own connection."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from holdfast.elastic.coordinator.base import Coordinator, Entry, EventKind, KeyEvent
from holdfast.elastic.errors import CoordinatorError
from holdfast.elastic.membership.divided import lacking

_POLL_S = 5.0
_RETRY_S = 0.1
_GATHER_FROM, _GATHER_EACH_S, _GATHER_MOST_S = 64, 20e-6, 0.1


class WatchedKeys:
    """The entries under a prefix, as received by the watch."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}

    def reset(self, entries: Sequence[Entry]) -> None:
        """Replace all entries by a whole range."""
        self.entries = {entry.key: entry for entry in entries}

    def apply(self, events: Sequence[KeyEvent]) -> None:
        """Apply changes in order; ignore a change older than the known entry."""
        for event in events:
            known = self.entries.get(event.key)
            if known and known.revision > event.revision:
                continue
            if event.kind == EventKind.PUT:
                self.entries[event.key] = Entry(
                    key=event.key, value=event.value, revision=event.revision
                )
            else:
                self.entries.pop(event.key, None)


class KeyWatch:
    """Reads everything under ``prefix`` once, then hands over every change in order.

    ``start(entries)`` and ``change(events)`` are called on the watch's thread; ``start`` is called
    again if changes were missed. If a divided record is among them, so are the parts that whoever
    took everything before needs for it, whatever the prefix.

    If there are many keys it waits after a change, longer the more there are, and then hands over
    all that has come at once: else each of a thousand changes has someone look at all nodes.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        prefix: str,
        *,
        start: Callable[[Sequence[Entry]], None],
        change: Callable[[Sequence[KeyEvent]], None],
    ) -> None:
        self._coordinator, self._prefix = coordinator, prefix
        self._start, self._change = start, change
        self._keys: set[str] = set()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="watch", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        after: int | None = None
        while not self._closed.is_set():
            try:
                after = self._once(after)
            except CoordinatorError:
                self._closed.wait(_RETRY_S)

    def _once(self, after: int | None) -> int | None:
        if after is None:
            entries, after = self._coordinator.range(self._prefix)
            parts = self._parts(entries, follows=False)
            if parts is None:
                self._closed.wait(_RETRY_S)
                return None
            self._keys = {entry.key for entry in entries}
            self._start([*entries, *parts])
            return after
        events, after = self._coordinator.watch(self._prefix, after=after, timeout_s=_POLL_S)
        if any(event.kind == EventKind.RESET for event in events):
            return None
        if events:
            parts = self._parts(events, follows=True)
            if parts is None:
                return None
            self._change([*map(_put, parts), *events])
            self._gather(events)
        return after

    def _gather(self, events: Sequence[KeyEvent]) -> None:
        for event in events:
            (self._keys.add if event.kind == EventKind.PUT else self._keys.discard)(event.key)
        if len(self._keys) >= _GATHER_FROM:
            self._closed.wait(min(_GATHER_EACH_S * len(self._keys), _GATHER_MOST_S))

    def _parts(
        self, found: Sequence[Entry] | Sequence[KeyEvent], *, follows: bool
    ) -> list[Entry] | None:
        """Return the parts that are needed besides; None if a newer record has replaced them."""
        parts = []
        for key in lacking(((each.key, each.value) for each in found), follows=follows):
            part = self._coordinator.get(key)
            if part is None:
                return None
            parts.append(part)
        return parts

    def close(self) -> None:
        """Stop following; does not wait for a pending poll."""
        self._closed.set()


def _put(entry: Entry) -> KeyEvent:
    return KeyEvent(kind=EventKind.PUT, key=entry.key, value=entry.value, revision=entry.revision)
