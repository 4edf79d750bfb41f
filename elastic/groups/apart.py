"""The keys of a large world's groups, each at the meeting point of the rank that sets it.

At one point, N ranks that each read N keys would be N² answers of one process. Here a rank sets its
key at its own point, and only ranks that connect read each other's.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from time import monotonic
from typing import Final
from weakref import WeakSet

from holdfast.ckpt import torch_private
from holdfast.ckpt.errors import PeerError
from holdfast.ckpt.transport import RunKey
from holdfast.elastic.groups.waits import end_worker
from holdfast.elastic.meeting.store import MeetingStore

_EXIT_WAIT_S: Final = 2.5
"""Longer than a single wait at a server that lives."""

_views: WeakSet[KeysApart] = WeakSet()


class PointsOf:
    """The meeting points of a world's ranks: ``addresses`` in the order of the ranks.

    ``prefix`` is that of the generation's keys.
    """

    def __init__(self, addresses: Sequence[str], key: RunKey, *, prefix: str) -> None:
        self._addresses, self._key, self._prefix = tuple(addresses), key, prefix
        self._kept: dict[int, MeetingStore] = {}

    def kept(self, rank: int, name: str) -> torch_private.Store:
        """Return the keys ``name`` at a rank's point; the connection ends with `close`."""
        store = self._kept.setdefault(rank, MeetingStore(self._addresses[rank], self._key))
        return torch_private.PrefixStore(f"{self._prefix}/{name}", store)

    def close(self) -> None:
        """End the connections that are kept."""
        for store in self._kept.values():
            store.close()

    def keys(self, name: str, *, ranks: Sequence[int], index: int) -> KeysApart:
        """Return the keys of the group ``name`` among ``ranks``, of which this is ``index``."""
        addresses = [self._addresses[rank] for rank in ranks]
        return KeysApart(f"{self._prefix}/{name}", addresses, self._key, index=index)

    @contextmanager
    def at(self, rank: int, name: str) -> Iterator[torch_private.Store]:
        """Lend the keys ``name`` at a rank's point; the connection ends with the context."""
        store = MeetingStore(self._addresses[rank], self._key)
        try:
            yield torch_private.PrefixStore(f"{self._prefix}/{name}", store)
        finally:
            store.close()


class KeysApart(torch_private.PythonStore):
    """The keys of one group, for gloo: the key that ends in ``i`` is at ``addresses[i]``.

    gloo asks in threads of its own, when it connects two ranks. `leave` ends those calls and
    refuses others.
    """

    def __init__(self, prefix: str, addresses: Sequence[str], key: RunKey, *, index: int) -> None:
        super().__init__()
        self._prefix, self._addresses, self._key = prefix, tuple(addresses), key
        self._index = index
        self._read: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._open: list[MeetingStore] = []
        self._inside = 0
        self._left = False
        _views.add(self)

    def set(self, key: str, value: str | bytes) -> None:
        """Set this rank's key, at its own point."""
        with self._connected(self._index) as store:
            store.set(self._name(key), value)

    def get(self, key: str) -> bytes:
        """Return the value of a key; waits for it. Raises ``PeerError`` as `MeetingStore` does."""
        self.wait([key])
        return self._read[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there, and keep their values."""
        for key in keys:
            if key not in self._read:
                with self._connected(self._member(key)) as store:
                    if timeout is not None:
                        store.set_timeout(timeout)
                    self._read[key] = store.get(self._name(key))

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are there."""
        return all(key in self._read or self._there(key) for key in keys)

    def leave(self) -> None:
        """Refuse further calls, and end those that wait."""
        with self._changed:
            self._left = True
            waiting = list(self._open)
        for store in waiting:
            store.close()

    def is_quiet(self, *, timeout_s: float = 0.0) -> bool:
        """Return whether no call is in progress, waiting for that a while."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._inside, timeout_s)

    def _there(self, key: str) -> bool:
        with self._connected(self._member(key)) as store:
            return store.check([self._name(key)])

    def _member(self, key: str) -> int:
        """Return whose key it is."""
        last = key.rpartition("/")[2]
        if not last.isdigit() or int(last) >= len(self._addresses):
            raise PeerError(f"{self._prefix}: the key {key} is of none of its ranks")
        return int(last)

    def _name(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    @contextmanager
    def _connected(self, member: int) -> Iterator[MeetingStore]:
        with self._changed:
            if self._left:
                raise PeerError(f"{self._prefix}: the generation of this group is over")
            store = MeetingStore(self._addresses[member], self._key)
            self._open.append(store)
            self._inside += 1
        try:
            yield store
        finally:
            store.close()
            with self._changed:
                self._open.remove(store)
                self._inside -= 1
                self._changed.notify_all()


@atexit.register
def _end_without_calls() -> None:
    """End a worker at once if a thread of gloo's is still in a call of Python.

    It could not come back to an interpreter that shuts down, see `end_worker`.
    """
    until_s = monotonic() + _EXIT_WAIT_S
    views = list(_views)
    for view in views:
        view.leave()
    quiet = [view.is_quiet(timeout_s=max(0.0, until_s - monotonic())) for view in views]
    if not all(quiet):
        end_worker()
