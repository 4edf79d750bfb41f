"""One watch of etcd: a stream of changes that detects when it is broken."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from typing import Any

from holdfast.ckpt.errors import InternalError
from holdfast.elastic.coordinator.etcd import reading
from holdfast.elastic.coordinator.etcd.failures import Meaning, RequestFailure, judge
from holdfast.elastic.coordinator.etcd.link import Line, Metadata
from holdfast.elastic.coordinator.etcd.stubs import grpc, rpc

_ASK_AFTER_S = 1.0
_MOST_WAITING = 64
_PROGRESS = rpc.WatchRequest(progress_request=rpc.WatchProgressRequest())


class StreamBrokenError(InternalError):
    """The stream ended; what it had not delivered comes again on the next one."""

    def __init__(self, failure: RequestFailure) -> None:
        super().__init__(failure.text)
        self.failure = failure


class CompactedError(InternalError):
    """The store no longer remembers the revision that was asked for."""


class WatchStream:
    """The changes of the keys that start with ``prefix``, newer than revision ``after``.

    ``after`` advances with the changes that `take` returns. The thread of `reading` reads ahead, up
    to a bounded number of messages. A silent stream gets a probe; if it does not answer within
    ``patience_s``, it is broken.
    """

    def __init__(
        self, line: Line, metadata: Metadata, *, prefix: bytes, after: int, patience_s: float
    ) -> None:
        self.line, self.said, self.prefix, self.after = line, metadata, prefix, after
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._waiting: deque[Any] = deque()
        self._room = asyncio.Event()
        self._failure: RequestFailure | None = None
        self._closed = False
        self._heard_s = time.monotonic()
        self._asked_s: float | None = None
        self._taken_at: int | None = None
        self.proven = False
        """True if the store has been seen to be as new as ``after``; the user's to set."""
        self._call: Any = None
        self._asking: asyncio.Future[None] | None = None
        self._cancel = reading.start(self._read())

    def await_start(self, deadline_s: float) -> int:
        """Wait for the member to accept the watch; return its store's revision at that time.

        Raises ``StreamBrokenError``.
        """
        with self._changed:
            while self._taken_at is None:
                self._check()
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise StreamBrokenError(_silent("it did not take a watch in time"))
                self._changed.wait(left_s)
            return self._taken_at

    def take(self, deadline_s: float) -> list[Any]:
        """Return all changes that have come, in order; none if the time is up before one comes.

        Raises ``CompactedError`` and ``StreamBrokenError``.
        """
        while responses := self._next(deadline_s):
            if responses[0].compact_revision:
                raise CompactedError
            after = self.after
            found = [
                event
                for response in responses
                for event in response.events
                if event.kv.mod_revision > after
            ]
            if found:
                self.after = found[-1].kv.mod_revision
                return found
        return []

    def _next(self, deadline_s: float) -> list[Any]:
        """Wait for a message; return all that wait, those of a compaction apart."""
        with self._changed:
            while not self._waiting:
                self._check()
                now_s = time.monotonic()
                if now_s >= deadline_s:
                    return []
                self._changed.wait(min(deadline_s, self._probe(now_s)) - now_s)
            found = [self._waiting.popleft()]
            while self._waiting and not self._waiting[0].compact_revision:
                found.append(self._waiting.popleft())
            reading.soon(self._room.set)
            return found

    def _probe(self, now_s: float) -> float:
        """Request a sign of life if it is due; return the time of the next look.

        The answer's revision is not used: it can run ahead of changes.
        """
        if self._asked_s is None or self._asked_s <= self._heard_s:
            if now_s < self._heard_s + 0.9 * _ASK_AFTER_S:
                return self._heard_s + _ASK_AFTER_S
            self._asked_s = now_s
            reading.soon(self._ask)
        elif now_s - self._asked_s >= self._patience_s:
            raise StreamBrokenError(_silent(f"a watch is silent for {self._patience_s:g} s"))
        return min(now_s + _ASK_AFTER_S, self._asked_s + self._patience_s)

    def _check(self) -> None:
        if self._failure is not None and not self._waiting:
            raise StreamBrokenError(self._failure)

    async def _read(self) -> None:
        create = rpc.WatchCreateRequest(
            key=self.prefix, range_end=prefix_end(self.prefix), start_revision=self.after + 1
        )
        try:
            self._call = self.line.watch(self.said)
            await self._write(rpc.WatchRequest(create_request=create))
            while (response := await self._call.read()) is not grpc.aio.EOF:
                if not self._receive(response):
                    return
                while len(self._waiting) >= _MOST_WAITING:
                    self._room.clear()
                    await self._room.wait()
            failure = judge("UNAVAILABLE", "the member ended a watch")
        except grpc.RpcError as error:
            failure = judge(error.code().name, error.details() or "")
        except asyncio.CancelledError:  # of this task, or of a call whose connection is closed
            failure = judge("CANCELLED", "this connection is closed")
        finally:
            if self._call is not None:
                self._call.cancel()
        self._fail(failure)

    def _ask(self) -> None:
        self._asking = asyncio.ensure_future(self._write(_PROGRESS))

    async def _write(self, request: Any) -> None:
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):  # the reader sees it
            await self._call.write(request)

    def _receive(self, response: Any) -> bool:
        """Receive one message; return whether more may come."""
        with self._changed:
            self._heard_s = time.monotonic()
            if response.created and not response.canceled:
                self._taken_at = response.header.revision
            elif response.canceled and not response.compact_revision:
                self._failure = _refusal(response.cancel_reason)
            elif self._closed or not (response.events or response.compact_revision):
                return not self._closed  # a sign of life wakes nobody
            else:
                self._waiting.append(response)
            self._changed.notify_all()
            return self._failure is None and not self._closed

    def _fail(self, failure: RequestFailure) -> None:
        with self._changed:
            self._failure = self._failure or failure
            self._changed.notify_all()

    def close(self) -> None:
        """End it; a pending `take` in another thread raises ``StreamBrokenError``."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._failure = self._failure or _silent("this connection is closed")
            self._changed.notify_all()
        self._cancel()


def prefix_end(prefix: bytes) -> bytes:
    """Return the first key after all that start with ``prefix``; the end of an etcd range."""
    for index in reversed(range(len(prefix))):
        if prefix[index] < 0xFF:
            return prefix[:index] + bytes([prefix[index] + 1])
    return b"\0"


def _silent(text: str) -> RequestFailure:
    return judge("DEADLINE_EXCEEDED", text)


def _refusal(reason: str) -> RequestFailure:
    """Return a refused watch's failure; older members report a stale token as denied permission."""
    if "no leader" in reason:
        return judge("UNAVAILABLE", "etcdserver: no leader")
    meaning = Meaning.TOKEN if "permission denied" in reason or "token" in reason else None
    found = judge("PERMISSION_DENIED", reason)
    return RequestFailure(code=found.code, text=found.text, meaning=meaning or found.meaning)
