"""The client side of the bulk path: a session, its counters, and its socket."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from time import monotonic, sleep
from typing import Any, Final

import zmq

from holdfast.ckpt.errors import BusyError, PeerError
from holdfast.ckpt.transport.buffers import Buffers
from holdfast.ckpt.transport.envelope import (
    PART_BYTES,
    EnvelopeError,
    MessageHeader,
    MessageKind,
    Reason,
    parse_sealed,
)
from holdfast.ckpt.transport.sealing import Sealer
from holdfast.ckpt.transport.sessions import Ask, SessionGrant
from holdfast.ckpt.transport.sockets import Connection

_ATTEMPTS = 3
_BACKOFF_S = (0.01, 0.2)
_buffers: Final = Buffers(keep_bytes=32 << 20)
"""Shared by all clients of this process; each has one call in progress."""

_refused_lock: Final = threading.Lock()
_refused: Final = Counter[str]()


def answers_refused() -> Counter[str]:
    """Return how many sealed answers were refused so far, by reason, in all of this process.

    Servers count their own refusals (`Server.refusals`).
    """
    with _refused_lock:
        return Counter(_refused)


def _count_refused(reason: Reason) -> None:
    with _refused_lock:
        _refused[reason.value] += 1


class BulkClient:
    """Sends sealed requests one after another and returns their answers.

    ``ask(wanted, deadline_s)`` gets a session over the control path: the first one, or one that
    replaces an old session or one that the server has lost. A request that the server has taken is
    never sent twice.
    """

    def __init__(
        self, context: zmq.Context[Any], host: str, *, ask: Callable[[Ask, float], SessionGrant]
    ) -> None:
        self._context, self._host, self._ask = context, host, ask
        self._grant: SessionGrant | None = None
        self._renew_s = 0.0
        self._counter = 0
        self._connection: Connection | None = None

    def call(
        self, op: str, body: Any, frames: Sequence[Any], *, deadline_s: float
    ) -> tuple[MessageHeader, list[memoryview]]:
        """Return the answer to a request. Raises ``NoAnswerError`` without one, ``PeerError``."""
        pause_s, longest_s = _BACKOFF_S
        while True:
            header, answer = self._call(op, body, frames, deadline_s=deadline_s)
            if header.code != BusyError.code or monotonic() + pause_s >= deadline_s:
                return header, answer
            sleep(pause_s)  # the server did not start it: retry
            pause_s = min(2 * pause_s, longest_s)

    def _call(
        self, op: str, body: Any, frames: Sequence[Any], *, deadline_s: float
    ) -> tuple[MessageHeader, list[memoryview]]:
        for _ in range(_ATTEMPTS):
            sealer, connection = self._ready(deadline_s)
            self._counter += 1
            header = MessageHeader(id=self._counter, op=op, body=body)
            try:
                parts = sealer.seal(
                    MessageKind.REQUEST, self._counter, header, frames, take=_buffers.take
                )
            except EnvelopeError as error:
                raise PeerError(f"{op}: {error}; send less at once") from None
            connection.events()  # events from before this call
            sent = connection.send(parts)
            del parts
            if sent and (answer := self._await(sealer, connection, deadline_s)) is not None:
                return answer
            self._renew(op, deadline_s)
        raise PeerError(f"{op}: the session was lost {_ATTEMPTS} times; the network is unsound")

    def disconnect(self) -> None:
        """Close the socket and drop the request in progress; the session stays."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _ready(self, deadline_s: float) -> tuple[Sealer, Connection]:
        if self._grant is None or monotonic() >= self._renew_s:
            self._open(deadline_s)
        assert self._grant is not None
        if self._connection is None:
            self._connection = Connection(
                self._context,
                f"{self._host}:{self._grant.port}",
                configure=self._configure,
                watch=True,
            )
        return self._sealer, self._connection

    def _open(self, deadline_s: float) -> SessionGrant:
        """Get a session in place of the present one, if any."""
        self.disconnect()
        instead = self._grant.session if self._grant else b""
        grant = self._ask(Ask(instead=instead), deadline_s)
        self._renew_s = monotonic() + grant.life_s / 2
        self._grant, self._counter = grant, 0
        self._sealer = Sealer(grant.session, grant.key)
        return grant

    def _renew(self, op: str, deadline_s: float) -> None:
        """Replace a lost session; raise if the old one has taken the request in progress."""
        sent = self._counter
        if self._open(deadline_s).seen >= sent:
            raise PeerError(f"{op} was accepted, but its answer was lost; retry")

    def _configure(self, socket: zmq.Socket[bytes]) -> None:
        assert self._grant is not None
        socket.plain_username = self._grant.session.hex().encode()
        socket.plain_password = self._grant.token.encode()
        socket.setsockopt(zmq.MAXMSGSIZE, PART_BYTES)

    def _await(
        self, sealer: Sealer, connection: Connection, deadline_s: float
    ) -> tuple[MessageHeader, list[memoryview]] | None:
        """Return the answer, None when connection or session are lost.

        Messages that are not the answer to the request in progress are ignored: late ones,
        strangers', and ones changed in transfer. Messages that are not genuine are counted.
        """
        while (parts := connection.receive(deadline_s)) is not None:
            try:
                envelope = parse_sealed(parts)
                if (envelope.session, envelope.counter) != (sealer.session, self._counter):
                    continue
                if envelope.kind is MessageKind.UNKNOWN:
                    return None
                if envelope.kind is MessageKind.REPLY:
                    header = sealer.open_header(envelope, parts)
                    take = _buffers.take
                    return header, sealer.open_frames(envelope, parts, header, take=take)
            except EnvelopeError as error:
                _count_refused(error.reason)
        return None
