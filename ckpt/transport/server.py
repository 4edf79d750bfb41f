"""The server side: the control socket and its thread; the bulk path from the first session on."""

from __future__ import annotations

import functools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq
from zmq.utils import z85

from holdfast.ckpt.errors import HoldfastError, InternalError, PeerError
from holdfast.ckpt.transport.bulk_server import BulkServer
from holdfast.ckpt.transport.door import Door
from holdfast.ckpt.transport.envelope import (
    ANSWER_BYTES,
    CONTROL_BYTES,
    EnvelopeError,
    MessageHeader,
    Reason,
    decode_header,
    encode_header,
)
from holdfast.ckpt.transport.keys import RunKey
from holdfast.ckpt.transport.limits import TransportLimits
from holdfast.ckpt.transport.ping import PING
from holdfast.ckpt.transport.request import Handler, Request
from holdfast.ckpt.transport.sessions import SESSION, Ask, Sessions
from holdfast.ckpt.transport.sockets import HANDSHAKE_MS, Outbox, OwnContext

_log = logging.getLogger(__name__)

QUEUED = 64
"""The most messages that wait for one peer, or from one; a client has one in progress."""

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_CLOSE_S = 5.0


class Server:
    """Serves a handler on a control socket and a bulk socket, each with a thread of its own.

    ``handler(request)`` replies or keeps the request for later; it is never called twice at once.
    A `HoldfastError` that it raises is sent back; anything else is logged, and sent back as an
    `InternalError`. ``tick`` is called every ``tick_s`` for work that must share the handler's
    state. ``refusals`` counts by reason what was not let in.
    """

    def __init__(
        self,
        handler: Handler,
        *,
        key: RunKey,
        bind: str = "tcp://127.0.0.1:*",
        tick: Callable[[], None] | None = None,
        tick_s: float = 0.05,
        limits: TransportLimits | None = None,
    ) -> None:
        self._handler, self._key = handler, key
        self._tick, self._tick_s = tick, tick_s
        self._limits = limits or TransportLimits()
        self._sessions = Sessions(self._limits)
        self._bulk: BulkServer | None = None
        self.refusals: Counter[str] = Counter()
        self._counting, self._handling = threading.Lock(), threading.Lock()
        self._closed = threading.Event()
        self._context = OwnContext()
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind(_ZAP_ENDPOINT)
        self._router = self._context.socket(zmq.ROUTER)
        self._door = Door(self._router)
        self._listen(self._router, bind)
        self.address: str = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._outbox = Outbox(self._context, "control")
        self._thread = threading.Thread(target=self._serve, name="transport-server", daemon=True)
        self._thread.start()

    def _listen(self, router: zmq.Socket[bytes], bind: str) -> None:
        router.curve_server = True
        router.curve_publickey = self._key.server_public.encode()
        router.curve_secretkey = self._key.server_secret.encode()
        router.setsockopt(zmq.ZAP_DOMAIN, b"control")
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.MAXMSGSIZE, CONTROL_BYTES)
        router.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        router.setsockopt(zmq.SNDHWM, QUEUED)
        router.setsockopt(zmq.RCVHWM, QUEUED)
        try:
            router.bind(bind)
        except zmq.ZMQError as error:
            self._door.close()
            self._context.destroy(linger=0)
            raise PeerError(
                f"cannot listen at {bind}: {error.strerror}; free the port or choose another"
            ) from error

    def close(self) -> None:
        """Stop serving; requests not yet answered stay unanswered."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._outbox.ring()
        if not self._is_own_thread():
            self._thread.join(timeout=_CLOSE_S)

    def _is_own_thread(self) -> bool:
        current = threading.current_thread()
        return current is self._thread or (self._bulk is not None and self._bulk.is_thread(current))

    def _refused(self, reason: Reason) -> None:
        with self._counting:
            self.refusals[reason.value] += 1

    # -- the control thread ----------------------------------------------------------------------

    def _serve(self) -> None:
        self._outbox.own()
        poller = zmq.Poller()
        for socket in (self._router, self._zap, self._outbox.socket, self._door.monitor):
            poller.register(socket, zmq.POLLIN)
        tick_ms = int(self._tick_s * 1000) if self._tick else None
        try:
            while not self._closed.is_set():
                ready = dict(poller.poll(tick_ms or self._door.pause_ms))
                if self._door.monitor in ready or self._door.shut:
                    self._door.look()
                if self._zap in ready:
                    self._authenticate()
                if self._router in ready:
                    self._receive()
                if self._tick:
                    with self._handling:
                        self._tick()
                self._outbox.send_all(self._router)
        finally:
            if self._bulk is None or self._bulk.close(timeout_s=_CLOSE_S):
                self._outbox.close()
                self._door.close()
                self._context.destroy(linger=0)

    def _authenticate(self) -> None:
        """Answer a ZAP request (ZeroMQ RFC 27).

        The control socket admits the run's client key. The bulk socket admits clients that name a
        session and its token; so strangers cannot fill our memory with messages that fail their
        seal.
        """
        parts = self._zap.recv_multipart()
        version, request_id, mechanism, credentials = parts[0], parts[1], parts[5], parts[6:]
        if mechanism == b"CURVE":
            admitted = z85.encode(credentials[0]) == self._key.client_public.encode()
        else:
            admitted = mechanism == b"PLAIN" and self._sessions.admits(*credentials)
        if not admitted:
            self._refused(Reason.UNAUTHENTICATED)
        status = (b"200", b"OK") if admitted else (b"400", b"not this run's key")
        self._zap.send_multipart([version, request_id, *status, b"", b""])

    def _receive(self) -> None:
        for peer, parts in self._door.received(most=QUEUED):
            try:
                self._take(peer, parts)
            except EnvelopeError as error:
                self._refused(error.reason)

    def _take(self, peer: bytes, parts: list[Any]) -> None:
        header = decode_header(parts[0] if parts else b"")
        answer = functools.partial(self._send, peer)
        request = Request(header, parts[1:], peer=peer, answer=answer)
        if (nbytes := sum(map(len, parts))) > CONTROL_BYTES:
            request.refuse(PeerError(_too_large(nbytes)))
            raise EnvelopeError(Reason.OVERSIZED, _too_large(nbytes))
        if header.op == SESSION:
            self._open_session(request)
        elif header.op == PING:
            request.reply()
        else:
            self.dispatch(request)

    def _send(self, peer: bytes, header: MessageHeader, frames: Sequence[Any]) -> None:
        text = encode_header(header)
        nbytes = len(text) + sum(memoryview(frame).nbytes for frame in frames)
        if nbytes > ANSWER_BYTES:
            raise EnvelopeError(Reason.OVERSIZED, _too_large(nbytes))
        self._outbox.put([peer, text, *frames])

    def _open_session(self, request: Request) -> None:
        """Give the client a session; the first one starts the bulk path."""
        try:
            ask = msgspec.convert(request.body, Ask)
            if self._bulk is None:
                host = self.address.rpartition(":")[0]
                self._bulk = BulkServer(
                    self._context,
                    bind=f"{host}:*",
                    sessions=self._sessions,
                    limits=self._limits,
                    dispatch=self.dispatch,
                    refused=self._refused,
                )
            grant = self._sessions.open(ask, port=self._bulk.port)
        except (msgspec.ValidationError, zmq.ZMQError) as error:
            request.refuse(PeerError(f"no session: {error}"))
        else:
            request.reply(msgspec.to_builtins(grant))

    # -- both threads ----------------------------------------------------------------------------

    def dispatch(self, request: Request) -> None:
        """Pass a request to the handler, one at a time."""
        try:
            with self._handling:
                self._handler(request)
        except Exception as error:  # noqa: BLE001 - one bad request must not end the server
            if isinstance(error, HoldfastError) and not isinstance(error, InternalError):
                request.refuse(error)
                return
            _log.exception("handler of %r failed", request.op)
            request.refuse(InternalError(f"{request.op} failed inside the server: {error!r}"))


def _too_large(nbytes: int) -> str:
    return f"{nbytes:,} bytes are more than a control message may have; ask with bulk=True"
