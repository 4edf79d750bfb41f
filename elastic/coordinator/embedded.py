"""The coordinator that needs no installation: a `KeyValueTable` behind an authenticated socket.

It lives in the launcher or in the agent of the first node; the death of any worker, sidecar or
other agent does not touch it. While its process is away no agents can agree, and a node whose agent
cannot renew its lease for ``self_fence_s`` ends its workers. The effect of its death depends on its
process:

- in the launcher (without a run directory to keep): the job ends with the launcher, and the table
  with both;
- in a process of its own (`holdfast.elastic.coordinator.service`) or in an agent, with a journal:
  it is started again, and serves the same table at the same address. No
  revision is used twice, the chain of generations continues, and every lease starts again, because
  no agent could have renewed it. For the same reason a pause of the process ends no lease: all
  leases are extended by its length;
- the loss of the journal's machine ends the run. A new run begins from checkpoints. If that is not
  acceptable, use etcd (`holdfast.elastic.coordinator.etcd.coordinator`).

It can bind any address; clients on any machine need the run's key.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar, cast

import msgspec

from holdfast.ckpt.errors import PeerError
from holdfast.ckpt.transport import Client, ClientPool, Request, RunKey, Server
from holdfast.ckpt.types import Json
from holdfast.elastic.coordinator.base import Entry, KeyEvent
from holdfast.elastic.coordinator.clock import Clock, SystemClock
from holdfast.elastic.coordinator.journal import Journal, TableChange
from holdfast.elastic.coordinator.memory import KeyValueTable
from holdfast.elastic.coordinator.waiting import ServedWatch, WaitingWatches
from holdfast.elastic.errors import CoordinatorError, LeaseExpiredError

TICK_S = 0.02
PAUSE_S = 0.3
MAX_WATCH_S = 60.0
_WATCH_SLICE_S = 1.0
_JOURNAL_BYTES = 32 << 20
_CATCH_UP_S = 1.0
_log = logging.getLogger(__name__)

_T = TypeVar("_T")


class _Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The arguments of every request; each operation uses its own."""

    key: str = ""
    value: str = ""
    lease: int | None = None
    expected: int = 0
    after: int = 0
    seconds: float = 0.0


class EmbeddedServer:
    """Serves a table until closed; everything runs on the transport's one I/O thread.

    With a ``journal`` the table is loaded from it, and every change is written there before the
    answer. A change that cannot be written, as on a full disk, is refused; with ``goes_on`` it is
    made, and the journal, of no use until then, is written anew once there is room. Raises
    ``CoordinatorError`` if the address cannot be bound or the journal cannot be used.
    """

    def __init__(
        self,
        key: RunKey,
        *,
        bind: str = "tcp://127.0.0.1:*",
        journal: Path | None = None,
        goes_on: bool = False,
        clock: Clock | None = None,
    ) -> None:
        self._clock: Clock = clock or SystemClock()
        self._table = KeyValueTable()
        self._journal = Journal(journal) if journal else None
        self._journal_limit_bytes = _JOURNAL_BYTES
        self._goes_on = goes_on
        self._retry_s: float | None = None  # since a change could not be written
        self._waiting = WaitingWatches()
        self._answered = 0
        self._ticked_s = self._clock.now_s()
        try:
            if self._journal:
                self._table.replay(self._journal.load(), now_s=self._ticked_s)
                self._table.write_down = self._write_down
        except CoordinatorError:
            self._close_journal()
            raise
        try:
            self._server = Server(self._handle, key=key, bind=bind, tick=self._tick, tick_s=TICK_S)
        except PeerError as error:
            self._close_journal()
            raise CoordinatorError(f"the coordinator {error}") from error
        self.address = self._server.address

    def value(self, key: str) -> str | None:
        """Return a key's value without a call; callable from any thread."""
        entry = self._table.get(key)
        return entry.value if entry else None

    def close(self) -> None:
        """Stop serving; without a journal the table is lost."""
        self._server.close()
        self._close_journal()

    def _close_journal(self) -> None:
        if self._journal:
            self._journal.close()

    def _handle(self, request: Request) -> None:
        now_s = self._advance()
        try:
            body = msgspec.convert(request.body or {}, _Body)
        except msgspec.ValidationError as error:
            raise CoordinatorError(f"{request.op}: malformed request: {error}") from error
        if request.op == "watch":
            wait_s = min(body.seconds, MAX_WATCH_S)
            watch = ServedWatch(request, body.key, body.after, now_s + wait_s)
            self._waiting.drop(request.peer)  # the socket's older watch was abandoned
            found = self._table.events(watch.prefix, after=watch.after)
            if found or wait_s <= 0:
                self._answer([watch], found)
            else:
                self._waiting.add(watch)
        else:
            request.reply(msgspec.to_builtins(self._apply(request.op, body, now_s=now_s)))

    def _apply(self, op: str, body: _Body, *, now_s: float) -> Json:
        table = self._table
        match op:
            case "grant":
                return table.grant(body.seconds, now_s=now_s)
            case "keep_alive":
                return table.keep_alive(_lease(op, body), now_s=now_s)
            case "revoke":
                return table.revoke(_lease(op, body))
            case "get":
                return table.get(body.key)
            case "range":
                return table.range(body.key)
            case "put":
                return table.put(body.key, body.value, lease=body.lease)
            case "compare_and_set":
                return table.compare_and_set(
                    body.key, body.value, expected=body.expected, lease=body.lease
                )
            case "delete":
                return table.delete(body.key)
        raise CoordinatorError(f"the coordinator knows no operation {op!r}")

    def _advance(self) -> float:
        now_s = self._clock.now_s()
        if (pause_s := now_s - self._ticked_s) > PAUSE_S:
            self._table.postpone(pause_s)
        self._ticked_s = now_s
        self._table.expire(now_s)
        return now_s

    def _tick(self) -> None:
        with contextlib.suppress(CoordinatorError):  # a full disk: the next request reports it
            self._advance()
            self._catch_up()
            self._shorten_journal()
        self._answer_watches()

    def _write_down(self, change: TableChange) -> None:
        if self._journal is None or self._retry_s is not None:
            return
        try:
            self._journal.append(change)
        except CoordinatorError as error:
            if not self._goes_on:
                raise
            _log.warning("%s; until then this process must not end", error)
            self._journal.spoil()
            self._retry_s = self._clock.now_s() + _CATCH_UP_S

    def _catch_up(self) -> None:
        """Write the journal anew, a while after a change could not be written."""
        if self._journal and self._retry_s is not None and self._ticked_s >= self._retry_s:
            self._retry_s = self._ticked_s + _CATCH_UP_S
            self._journal.rewrite(self._table.changes())
            self._retry_s = None

    def _shorten_journal(self) -> None:
        if self._journal and self._journal.size_bytes > self._journal_limit_bytes:
            self._journal.rewrite(self._table.changes())
            self._journal_limit_bytes = max(_JOURNAL_BYTES, 2 * self._journal.size_bytes)

    def _answer_watches(self) -> None:
        """Answer the watches that have events, and those whose time is over."""
        if (revision := self._table.revision) != self._answered:
            answers, complete = self._waiting.changed(
                self._events, revision=revision, now_s=self._ticked_s
            )
            for events, watches in answers:
                self._answer(watches, events)
            if complete:
                self._answered = revision
        for watch in self._waiting.over(self._ticked_s):
            self._answer([watch], self._events(watch.prefix, watch.after))

    def _events(self, prefix: str, after: int) -> list[KeyEvent]:
        return self._table.events(prefix, after=after)

    def _answer(self, watches: Sequence[ServedWatch], events: Sequence[KeyEvent]) -> None:
        body = msgspec.Raw(msgspec.json.encode((events, self._table.revision)))  # once for all
        for watch in watches:
            watch.request.reply(cast("Json", body))


def _lease(op: str, body: _Body) -> int:
    if body.lease is None:
        raise CoordinatorError(f"{op}: no lease was named")
    return body.lease


class EmbeddedCoordinator:
    """A `Coordinator` whose calls go to an `EmbeddedServer`; safe to share between threads.

    Watches have connections of their own, so no other call waits for one. The other calls run one
    after another; each waits at most ``timeout_s`` for its answer.
    """

    def __init__(self, address: str, key: RunKey, *, timeout_s: float = 5.0) -> None:
        self.address, self._timeout_s = address, timeout_s
        self._client = Client(address, key, timeout_s=timeout_s)
        self._watches = ClientPool(address, key, timeout_s=timeout_s)

    def grant(self, ttl_s: float) -> int:
        """See `Coordinator.grant`."""
        return _as(int, self._call("grant", seconds=ttl_s))

    def keep_alive(self, lease: int) -> None:
        """See `Coordinator.keep_alive`."""
        self._call("keep_alive", lease=lease)

    def revoke(self, lease: int) -> None:
        """See `Coordinator.revoke`."""
        self._call("revoke", lease=lease)

    def get(self, key: str) -> Entry | None:
        """See `Coordinator.get`."""
        found = self._call("get", key=key)
        return None if found is None else _as(Entry, found)

    def range(self, prefix: str) -> tuple[list[Entry], int]:
        """See `Coordinator.range`."""
        return _as(tuple[list[Entry], int], self._call("range", key=prefix))

    def put(self, key: str, value: str, *, lease: int | None = None) -> int:
        """See `Coordinator.put`."""
        return _as(int, self._call("put", key=key, value=value, lease=lease))

    def compare_and_set(
        self, key: str, value: str, *, expected: int, lease: int | None = None
    ) -> bool:
        """See `Coordinator.compare_and_set`."""
        done = self._call("compare_and_set", key=key, value=value, expected=expected, lease=lease)
        return _as(bool, done)

    def delete(self, key: str) -> bool:
        """See `Coordinator.delete`."""
        return _as(bool, self._call("delete", key=key))

    def watch(self, prefix: str, *, after: int, timeout_s: float) -> tuple[list[KeyEvent], int]:
        """See `Coordinator.watch`."""
        deadline_s = time.monotonic() + timeout_s
        with _as_ours(), self._watches.lend() as client:
            while True:  # in slices, to notice `close` and a dead server
                slice_s = max(0.0, min(_WATCH_SLICE_S, deadline_s - time.monotonic()))
                body = {"key": prefix, "after": after, "seconds": slice_s}
                reply = client.call("watch", body, timeout_s=slice_s + self._timeout_s)[0]
                events, after = _as(tuple[list[KeyEvent], int], reply)
                if events or self._watches.closed or time.monotonic() >= deadline_s:
                    return events, after

    def close(self) -> None:
        """See `Coordinator.close`; a pending watch in another thread returns soon."""
        self._watches.close()
        self._client.close()

    def _call(self, op: str, **body: Json) -> Json:
        with _as_ours():
            return self._client.call(op, body, timeout_s=self._timeout_s)[0]


@contextmanager
def _as_ours() -> Iterator[None]:
    """Raise the errors of the transport as those of a coordinator."""
    try:
        yield
    except PeerError as error:
        if error.peer_code == LeaseExpiredError.code:
            raise LeaseExpiredError(str(error)) from None
        if error.peer_code:
            raise CoordinatorError(str(error)) from None
        raise CoordinatorError(f"the coordinator does not answer: {error}") from error


def _as(kind: type[_T], reply: Json) -> _T:
    try:
        return msgspec.convert(reply, kind)
    except msgspec.ValidationError as error:
        raise CoordinatorError(f"the coordinator's answer is malformed: {error}") from error
