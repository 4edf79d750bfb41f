"""The interface of the store through which agents agree: leases, compare-and-set, watches."""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

import msgspec

from holdfast.ckpt.types import learn


class EventKind(StrEnum):
    """The kind of a key's change; RESET: the requested history is gone, read the range again."""

    PUT = "put"
    DELETE = "delete"
    RESET = "reset"


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A key's value and the store revision that wrote it; the end of ``lease`` deletes it."""

    key: str
    value: str
    revision: int
    lease: int | None = None


class KeyEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A change with the store revision it made; ``value`` is empty unless it was a put."""

    kind: EventKind
    key: str
    value: str
    revision: int


class Coordinator(Protocol):
    """A linearizable key-value store; safe to share between threads.

    Every change makes a new *revision* of the whole store (the keys that one lease deletes at its
    end may share one). Every method raises ``CoordinatorError`` if the store cannot be reached or
    refuses; such a call may or may not have taken effect.
    """

    def grant(self, ttl_s: float) -> int:
        """Return a new lease that ends ``ttl_s`` after its last `keep_alive`, never sooner.

        It may end later: etcd counts whole seconds and allows no lease shorter than an election.
        """

    def keep_alive(self, lease: int) -> None:
        """Restart the lease's time. Raises ``LeaseExpiredError`` if it has ended."""

    def revoke(self, lease: int) -> None:
        """End a lease now and delete its keys; does nothing if it has ended already."""

    def get(self, key: str) -> Entry | None:
        """Return the entry, or None if the key is absent."""

    def range(self, prefix: str) -> tuple[list[Entry], int]:
        """Return the entries of keys with this prefix, in key order, and the store's revision."""

    def put(self, key: str, value: str, *, lease: int | None = None) -> int:
        """Write and return the revision. Raises ``LeaseExpiredError`` if the lease has ended."""

    def compare_and_set(
        self, key: str, value: str, *, expected: int, lease: int | None = None
    ) -> bool:
        """Write if the entry's revision is ``expected`` (0: the key is absent).

        Return whether it was. Raises ``LeaseExpiredError`` if the lease has ended.
        """

    def delete(self, key: str) -> bool:
        """Delete, and return whether the key existed."""

    def watch(self, prefix: str, *, after: int, timeout_s: float) -> tuple[list[KeyEvent], int]:
        """Return the changes under ``prefix`` newer than revision ``after``, in order.

        Blocks up to ``timeout_s`` while there are none, and then returns an empty list. The integer
        is the ``after`` for the next call. With the ``after`` of a `range` or of the last `watch`,
        no change is missed: one `EventKind.RESET` comes instead if the store has dropped that part
        of its history.
        """

    def close(self) -> None:
        """Release the connection; leases end by themselves."""


learn(globals())
