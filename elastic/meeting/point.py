"""The server of a worker's store, at which a generation meets if the worker is its rank 0.

torch's own ``TCPStore`` listens on all addresses, and whoever reaches it may read and write. So the
keys are served by the authenticated transport, at the node's address alone.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, Final

import msgspec

from holdfast.ckpt.errors import PeerError
from holdfast.ckpt.transport import Request, RunKey, Server
from holdfast.ckpt.types import Json
from holdfast.elastic.meeting.requests import MeetingAsk, MeetingOp

LOOPBACK: Final = "127.0.0.1"

_TICK_S: Final = 0.1


_OF_GENERATION: Final = re.compile(r"g(\d+)/")


def keys_of(generation: int) -> str:
    """Return the prefix of a generation's keys."""
    return f"g{generation}"


@dataclass(slots=True, kw_only=True)
class _Waiting:
    """A request that waits for keys; ``missing`` are those that are not there yet."""

    request: Request
    ask: MeetingAsk
    missing: set[str]
    until_s: float


class MeetingPoint:
    """A store of keys and bytes, served until closed; safe to share between threads.

    It lives as long as its worker; each generation uses a prefix of its own. ``address`` is
    ``host:port``. Raises ``PeerError`` if the address cannot be bound.
    """

    def __init__(self, key: RunKey, *, host: str = LOOPBACK, port: int | None = None) -> None:
        self.host = host
        self._values: dict[str, bytes] = {}
        self._waiting: list[_Waiting] = []
        self._lock = threading.Lock()
        self._requests = self._read_bytes = 0
        self._server = Server(
            self._handle,
            key=key,
            bind=f"tcp://{host}:{'*' if port is None else port}",
            tick=self._end_late,
            tick_s=_TICK_S,
        )
        self.address = f"{host}:{self._server.address.rpartition(':')[2]}"

    def set(self, key: str, value: bytes) -> None:
        """Set a key, as a client could."""
        with self._lock:
            self._put(key, value)

    def forget_before(self, generation: int) -> None:
        """Drop the keys of all generations before this one."""
        with self._lock:
            for key in list(self._values):
                if (found := _OF_GENERATION.match(key)) and int(found[1]) < generation:
                    del self._values[key]

    @property
    def waiting(self) -> int:
        """The number of requests that wait for keys."""
        with self._lock:
            return len(self._waiting)

    @property
    def requests(self) -> int:
        """The number of requests that came so far."""
        with self._lock:
            return self._requests

    @property
    def read_bytes(self) -> int:
        """The bytes of values that were read so far."""
        with self._lock:
            return self._read_bytes

    def close(self) -> None:
        """Stop serving; the keys are lost."""
        self._server.close()

    def _handle(self, request: Request) -> None:
        try:
            ask = msgspec.convert(request.body, MeetingAsk)
            op = MeetingOp(request.op)
            values = [bytes(frame) for frame in request.frames]
            with self._lock:
                self._requests += 1
                if op is MeetingOp.AWAIT:
                    self._await(request, ask)
                else:
                    body, frames = self._apply(op, ask, values)
                    request.reply(body, frames)
        except (ValueError, IndexError) as error:  # msgspec's are ValueErrors too
            raise PeerError(f"{request.op}: malformed request: {error}") from error

    def _apply(
        self, op: MeetingOp, ask: MeetingAsk, values: Sequence[bytes]
    ) -> tuple[Json, Sequence[Any]]:
        key = ask.keys[0]
        now = self._values.get(key)
        match op:
            case MeetingOp.SET:
                for each, value in zip(ask.keys, values, strict=True):
                    self._put(each, value)
            case MeetingOp.APPEND:
                self._put(key, (now or b"") + values[0])
            case MeetingOp.ADD:
                total = int(now or b"0") + ask.amount
                self._put(key, str(total).encode())
                return total, ()
            case MeetingOp.COMPARE_SET:
                expected, wanted = values
                if (now or b"") == expected:
                    self._put(key, wanted)
                    return None, (wanted,)
                return None, (expected if now is None else now,)
            case MeetingOp.DELETE:
                return self._values.pop(key, None) is not None, ()
            case MeetingOp.CHECK:
                return all(each in self._values for each in ask.keys), ()
        return None, ()

    def _put(self, key: str, value: bytes) -> None:
        self._values[key] = value
        ready = []
        for waiting in self._waiting:
            waiting.missing.discard(key)
            if not waiting.missing:
                ready.append(waiting)
        for waiting in ready:
            self._waiting.remove(waiting)
            self._answer(waiting.request, waiting.ask)

    def _await(self, request: Request, ask: MeetingAsk) -> None:
        if missing := {key for key in ask.keys if key not in self._values}:
            until_s = monotonic() + ask.seconds
            self._waiting.append(
                _Waiting(request=request, ask=ask, missing=missing, until_s=until_s)
            )
        else:
            self._answer(request, ask)

    def _answer(self, request: Request, ask: MeetingAsk) -> None:
        found = [self._values[key] for key in ask.keys] if ask.wants else []
        self._read_bytes += sum(map(len, found))
        request.reply(True, found)

    def _end_late(self) -> None:
        now_s = monotonic()
        with self._lock:
            late = [each for each in self._waiting if each.until_s <= now_s]
            for each in late:
                self._waiting.remove(each)
                each.request.reply(False)
