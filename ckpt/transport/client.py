"""The client side of the transport."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from time import monotonic
from typing import Any

import msgspec
import zmq

from holdfast.ckpt.descriptors import are_free
from holdfast.ckpt.errors import BusyError, FencedError, PeerError
from holdfast.ckpt.transport.bulk_client import BulkClient
from holdfast.ckpt.transport.envelope import (
    ANSWER_BYTES,
    CONTROL_BYTES,
    MAX_FRAMES,
    EnvelopeError,
    MessageHeader,
    decode_header,
    encode_header,
)
from holdfast.ckpt.transport.keys import RunKey
from holdfast.ckpt.transport.sessions import SESSION, Ask, SessionGrant
from holdfast.ckpt.transport.sockets import LOST, REFUSED, Connection, NoAnswerError, OwnContext
from holdfast.ckpt.types import Json

_REFUSALS = 3

DESCRIPTORS = 24
"""Those of a client and some to spare: ZeroMQ ends the process if it gets some and not all."""


class Client:
    """Sends requests to one server; safe to share between threads, one request at a time.

    It reconnects by itself. A reply after its deadline is dropped. With ``watch`` a call also ends
    as soon as the connection is lost or refused: for a server that, once gone, does not come back
    at this address. Raises ``PeerError`` for an address that cannot be one, and if no descriptors
    are left.
    """

    def __init__(
        self, address: str, key: RunKey, *, timeout_s: float = 10.0, watch: bool = False
    ) -> None:
        self.address, self._key, self._timeout_s = address, key, timeout_s
        self._watch = watch
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        if not are_free(DESCRIPTORS):
            raise PeerError(
                f"{address}: too few descriptors are left to connect (ulimit -n): retry"
            )
        self._context = OwnContext()
        try:
            self._control = self._connect()
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise PeerError(f"{address}: no server can be reached there: {error}") from error
        host = address.rpartition(":")[0]
        self._bulk = BulkClient(self._context, host, ask=self._ask_session)

    def _connect(self) -> Connection:
        return Connection(self._context, self.address, configure=self._configure, watch=self._watch)

    def _configure(self, socket: zmq.Socket[bytes]) -> None:
        socket.curve_serverkey = self._key.server_public.encode()
        socket.curve_publickey = self._key.client_public.encode()
        socket.curve_secretkey = self._key.client_secret.encode()
        socket.setsockopt(zmq.MAXMSGSIZE, ANSWER_BYTES)

    def call(
        self,
        op: str,
        body: Json = None,
        frames: Sequence[Any] = (),
        *,
        timeout_s: float | None = None,
        bulk: bool | None = None,
    ) -> tuple[Json, list[memoryview]]:
        """Send a request and return the reply's body and frames.

        The answer takes the path of its request: callers that expect a large answer pass
        ``bulk=True``; otherwise the size of the request decides: below `CONTROL_BYTES` libsodium
        takes less time than the second path costs. Raises ``FencedError`` when the
        server says the caller is of an older generation, and ``PeerError`` for any other refusal, a
        deadline passed, or a closed client.
        """
        wait_s = self._timeout_s if timeout_s is None else timeout_s
        number = next(self._numbers)
        text = b"" if bulk else encode_header(MessageHeader(id=number, op=op, body=body))
        nbytes = len(text) + sum(memoryview(frame).nbytes for frame in frames)
        if bulk is None:
            bulk = nbytes > CONTROL_BYTES and len(frames) <= MAX_FRAMES
        if not bulk and nbytes > CONTROL_BYTES:
            raise PeerError(
                f"{op}: {nbytes:,} bytes are more than the {CONTROL_BYTES:,} of a control message; "
                "send fewer at once or with bulk=True"
            )
        with self._lock:
            deadline_s = monotonic() + wait_s
            try:
                if bulk:
                    header, answer = self._bulk.call(op, body, frames, deadline_s=deadline_s)
                else:
                    parts = [text, *frames]
                    header, answer = self._call_control(number, op, parts, deadline_s=deadline_s)
            except NoAnswerError as lost:
                self._bulk.disconnect()
                why = str(lost) or f"no answer to {op} within {wait_s:g} s"
                raise PeerError(f"{self.address}: {why}") from None
            except zmq.ZMQError as error:
                raise PeerError(f"{self.address}: {op}: {error}") from error
        return _body(header), answer

    def _ask_session(self, ask: Ask, deadline_s: float) -> SessionGrant:
        number = next(self._numbers)
        text = encode_header(MessageHeader(id=number, op=SESSION, body=msgspec.to_builtins(ask)))
        header, _ = self._call_control(number, SESSION, [text], deadline_s=deadline_s)
        try:
            return msgspec.convert(_body(header), SessionGrant)
        except msgspec.ValidationError as error:
            raise PeerError(f"{self.address}: malformed session: {error}") from error

    def _call_control(
        self, number: int, op: str, parts: list[Any], *, deadline_s: float
    ) -> tuple[MessageHeader, list[memoryview]]:
        if self._control.closed:
            self._control = self._connect()
        self._control.events()  # events from before this call
        try:
            if not self._control.send(parts):
                raise NoAnswerError(
                    f"the connection is refused: {op} was not sent; check the run's key"
                )
            return self._await(number, op, deadline_s)
        except NoAnswerError:
            # A restarted server must not process requests that its clients gave up long ago.
            self._control.close()
            raise

    def _await(
        self, number: int, op: str, deadline_s: float
    ) -> tuple[MessageHeader, list[memoryview]]:
        refusals = 0
        while True:
            if (parts := self._control.receive(deadline_s)) is None:
                events = self._control.events()
                refusals += events.count(REFUSED)
                if LOST in events or refusals >= _REFUSALS:
                    raise NoAnswerError(f"the server has ended: no answer to {op}")
                continue
            try:
                header = decode_header(parts[0])
            except EnvelopeError as error:
                raise PeerError(f"{self.address}: {op}: malformed answer: {error}") from None
            if header.id == number:  # else it is the late answer to an earlier request
                return header, parts[1:]

    def close(self) -> None:
        """Close the sockets; a call in progress in another thread ends first."""
        with self._lock:
            self._bulk.disconnect()
            self._control.close()
            self._context.destroy(linger=0)


def _body(header: MessageHeader) -> Json:
    """Return the body of an answer, or raise its error."""
    if header.error is None:
        return header.body
    if header.code == FencedError.code:
        raise FencedError(header.error)
    busy = header.code == BusyError.code
    raise PeerError(header.error, peer_code="" if busy else header.code)  # as no answer: it passes
