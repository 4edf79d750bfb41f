"""The coordinator on etcd v3.

The death of a minority of etcd's members loses nothing that etcd acknowledged. Leases are whole
seconds and no shorter than etcd allows (1.5 times its election timeout), so a lease may last longer
than requested, never shorter.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any, TypeAlias

from holdfast.elastic.coordinator.base import Entry, EventKind, KeyEvent
from holdfast.elastic.coordinator.etcd.address import EtcdAddress
from holdfast.elastic.coordinator.etcd.failures import Meaning, RequestFailure
from holdfast.elastic.coordinator.etcd.link import (
    ClientIdentity,
    EtcdLink,
    Line,
    Metadata,
    RequestFailedError,
)
from holdfast.elastic.coordinator.etcd.stream import (
    CompactedError,
    StreamBrokenError,
    WatchStream,
    prefix_end,
)
from holdfast.elastic.coordinator.etcd.stubs import rpc
from holdfast.elastic.errors import CoordinatorError, LeaseExpiredError

_PAUSE_S = 0.05
_LEAST_WATCH_S = 0.1
_MOST_IDLE_STREAMS = 4
_TOKEN_TRIES = 2

Pick: TypeAlias = Callable[[Line], Any]
"""Selects the member's method to call."""


class EtcdCoordinator:
    """A `Coordinator` on etcd; safe to share between threads, whose calls run concurrently.

    Every call ends within ``timeout_s``; a watch within its own timeout plus ``timeout_s``. Raises
    ``ConfigError`` if a file named by ``address`` cannot be read.
    """

    def __init__(
        self,
        address: EtcdAddress,
        *,
        timeout_s: float = 5.0,
        identity: ClientIdentity | None = None,
    ) -> None:
        self.address, self._timeout_s = address, timeout_s
        self._link = EtcdLink(address, timeout_s=timeout_s, identity=identity)
        self._prefix = address.prefix.encode()
        self._lock = threading.Lock()
        self._streams: list[WatchStream] = []
        self._busy: set[WatchStream] = set()
        self._closed = False

    def grant(self, ttl_s: float) -> int:
        """See `Coordinator.grant`."""
        if not ttl_s > 0:
            raise CoordinatorError(f"lease of {ttl_s} s: the time to live must be positive")
        request = rpc.LeaseGrantRequest(TTL=math.ceil(ttl_s))
        answer = self._ask(lambda line: line.lease.LeaseGrant, request, repeatable=True)
        return int(answer.ID)  # a lease whose answer was lost ends by itself

    def keep_alive(self, lease: int) -> None:
        """See `Coordinator.keep_alive`."""
        if not self._renewed(lease):
            self._revision()  # returns once the member has seen every earlier grant
            if not self._renewed(lease):
                raise LeaseExpiredError(
                    f"lease {lease} has ended: stop acting, then ask for a new one"
                )

    def _renewed(self, lease: int) -> bool:
        def ask(line: Line, timeout_s: float, metadata: Metadata) -> Any:
            return line.renewals.renew(lease, timeout_s=timeout_s, metadata=metadata)

        return bool(self._link.call(ask, repeatable=True).TTL > 0)

    def revoke(self, lease: int) -> None:
        """See `Coordinator.revoke`."""
        request = rpc.LeaseRevokeRequest(ID=lease)
        try:
            self._ask(lambda line: line.lease.LeaseRevoke, request, repeatable=True)
        except RequestFailedError as error:
            if not error.failure.lease_gone:
                raise

    def get(self, key: str) -> Entry | None:
        """See `Coordinator.get`."""
        found = self._read(self._full(key)).kvs
        return self._entry(found[0]) if found else None

    def range(self, prefix: str) -> tuple[list[Entry], int]:
        """See `Coordinator.range`."""
        full = self._full(prefix)
        answer = self._read(full, prefix_end(full))
        return [self._entry(pair) for pair in answer.kvs], answer.header.revision

    def put(self, key: str, value: str, *, lease: int | None = None) -> int:
        """See `Coordinator.put`."""
        request = rpc.PutRequest(key=self._full(key), value=value.encode(), lease=lease or 0)
        return int(self._write(lambda line: line.kv.Put, request, lease).header.revision)

    def compare_and_set(
        self, key: str, value: str, *, expected: int, lease: int | None = None
    ) -> bool:
        """See `Coordinator.compare_and_set`."""
        full = self._full(key)
        same = rpc.Compare(
            result=rpc.Compare.EQUAL, target=rpc.Compare.MOD, key=full, mod_revision=expected
        )
        put = rpc.PutRequest(key=full, value=value.encode(), lease=lease or 0)
        request = rpc.TxnRequest(compare=[same], success=[rpc.RequestOp(request_put=put)])
        return bool(self._write(lambda line: line.kv.Txn, request, lease).succeeded)

    def delete(self, key: str) -> bool:
        """See `Coordinator.delete`."""
        request = rpc.DeleteRangeRequest(key=self._full(key))
        return bool(self._write(lambda line: line.kv.DeleteRange, request, None).deleted)

    def watch(self, prefix: str, *, after: int, timeout_s: float) -> tuple[list[KeyEvent], int]:
        """See `Coordinator.watch`."""
        until_s = time.monotonic() + max(timeout_s, _LEAST_WATCH_S)
        full, tokens = self._full(prefix), 0
        failing_s: float | None = None
        while True:
            start_by_s = (failing_s or time.monotonic()) + self._timeout_s
            try:
                return self._follow(full, after, until_s=until_s, start_by_s=start_by_s)
            except CompactedError:
                return self._reset(prefix)
            except StreamBrokenError as broken:
                failure = broken.failure
            if self._closed:
                raise CoordinatorError(f"{self.address}: this connection is closed")
            tokens += failure.meaning is Meaning.TOKEN
            failing_s = failing_s or time.monotonic()
            if self._is_final(failure, tokens) or time.monotonic() > failing_s + self._timeout_s:
                raise self._link.error(failure)
            time.sleep(_PAUSE_S)

    def close(self) -> None:
        """See `Coordinator.close`; a pending watch in another thread ends at once."""
        with self._lock:
            self._closed = True
            streams, self._streams = [*self._streams, *self._busy], []
        for stream in streams:
            stream.close()
        self._link.close()

    # -- watching -------------------------------------------------------------------------------

    def _follow(
        self, full: bytes, after: int, *, until_s: float, start_by_s: float
    ) -> tuple[list[KeyEvent], int]:
        stream = self._borrow(full, after)
        try:
            taken_at = stream.await_start(start_by_s)
            if not stream.proven and taken_at < after and self._revision() < after:
                raise CompactedError  # the store was replaced by an older one
            stream.proven = True
            events = [self._event(event) for event in stream.take(until_s)]
        except StreamBrokenError as broken:
            self._link.note(stream.line, broken.failure, stream.said)
            self._give_up(stream)
            raise
        except BaseException:
            self._give_up(stream)
            raise
        self._link.look(stream.line)
        self._give_back(stream)
        return events, stream.after

    def _borrow(self, prefix: bytes, after: int) -> WatchStream:
        """Return an idle stream at exactly this position, or a new one."""
        with self._lock:
            for stream in self._streams:
                if (stream.prefix, stream.after) == (prefix, after):
                    self._streams.remove(stream)
                    self._busy.add(stream)
                    return stream
        metadata = self._link.metadata()
        line = self._link.enter()
        try:
            stream = WatchStream(
                line, metadata, prefix=prefix, after=after, patience_s=self._timeout_s
            )
        finally:
            line.leave()
        with self._lock:
            self._busy.add(stream)
            closed = self._closed
        if closed:
            stream.close()
        return stream

    def _give_back(self, stream: WatchStream) -> None:
        with self._lock:
            self._busy.discard(stream)
            self._streams.append(stream)
            keep = 0 if self._closed else _MOST_IDLE_STREAMS
            surplus = self._streams[:-keep] if keep else self._streams
            self._streams = self._streams[len(surplus) :]
        for old in surplus:
            old.close()

    def _give_up(self, stream: WatchStream) -> None:
        with self._lock:
            self._busy.discard(stream)
        stream.close()

    def _is_final(self, failure: RequestFailure, tokens: int) -> bool:
        if failure.meaning is Meaning.TOKEN:
            return not self.address.user or tokens >= _TOKEN_TRIES
        return failure.meaning is Meaning.REFUSED

    def _reset(self, prefix: str) -> tuple[list[KeyEvent], int]:
        revision = self._revision()
        event = KeyEvent(kind=EventKind.RESET, key=prefix, value="", revision=revision)
        return [event], revision

    def _revision(self) -> int:
        return int(self._read(self._prefix, count_only=True).header.revision)

    # -- requests -------------------------------------------------------------------------------

    def _ask(self, pick: Pick, request: Any, *, repeatable: bool) -> Any:
        def ask(line: Line, timeout_s: float, metadata: Metadata) -> Any:
            return pick(line)(request, timeout=timeout_s, metadata=metadata)

        return self._link.call(ask, repeatable=repeatable)

    def _read(self, key: bytes, end: bytes = b"", *, count_only: bool = False) -> Any:
        request = rpc.RangeRequest(key=key, range_end=end, count_only=count_only)
        return self._ask(lambda line: line.kv.Range, request, repeatable=True)

    def _write(self, pick: Pick, request: Any, lease: int | None) -> Any:
        """Write once; if the answer is lost, only a read tells whether the write took effect."""
        try:
            return self._ask(pick, request, repeatable=False)
        except RequestFailedError as error:
            if error.failure.lease_gone:
                raise LeaseExpiredError(
                    f"lease {lease} has ended: stop acting, then ask for a new one"
                ) from None
            raise

    # -- conversion of etcd's messages ----------------------------------------------------------

    def _full(self, key: str) -> bytes:
        return self._prefix + key.encode()

    def _short(self, key: bytes) -> str:
        return _text(key, key[len(self._prefix) :])

    def _entry(self, pair: Any) -> Entry:
        return Entry(
            key=self._short(pair.key),
            value=_text(pair.key, pair.value),
            revision=pair.mod_revision,
            lease=pair.lease or None,
        )

    def _event(self, event: Any) -> KeyEvent:
        put = event.type == event.PUT
        return KeyEvent(
            kind=EventKind.PUT if put else EventKind.DELETE,
            key=self._short(event.kv.key),
            value=_text(event.kv.key, event.kv.value) if put else "",
            revision=event.kv.mod_revision,
        )


def _text(key: bytes, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise CoordinatorError(
            f"key {key!r} of etcd contains no text: another program writes there; choose a "
            "prefix of Holdfast's own, as in etcd://HOST:PORT/PREFIX"
        ) from error
