"""The bulk socket of a server; a separate thread opens the sealed messages."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from holdfast.ckpt.errors import BusyError
from holdfast.ckpt.transport.buffers import Buffers
from holdfast.ckpt.transport.door import Door
from holdfast.ckpt.transport.envelope import (
    PART_BYTES,
    Envelope,
    EnvelopeError,
    MessageHeader,
    MessageKind,
    Reason,
    parse_sealed,
)
from holdfast.ckpt.transport.limits import TransportLimits
from holdfast.ckpt.transport.request import Request
from holdfast.ckpt.transport.sessions import BulkSession, Sessions
from holdfast.ckpt.transport.sockets import HANDSHAKE_MS, Outbox

_log = logging.getLogger(__name__)

KEEP_BYTES = 32 << 20
"""The bytes of buffers kept warm."""

RECEIVED, QUEUED = 4, 16
"""The most messages that wait from one peer, and for one peer.

A client has one in progress. More are dropped; ZeroMQ learns a little late which messages a peer
has fetched, so there is some slack.
"""


class BulkServer:
    """Takes sealed requests and sends sealed answers; a `Server` makes it for its first session.

    An answer that a peer does not fetch is dropped with its connection. If requests and answers
    in progress hold more memory than allowed (`TransportLimits`), further requests are refused as
    busy, before any work is done for them; clients repeat those by themselves until their deadline.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        *,
        bind: str,
        sessions: Sessions,
        limits: TransportLimits,
        dispatch: Callable[[Request], None],
        refused: Callable[[Reason], None],
    ) -> None:
        self._sessions, self._limits = sessions, limits
        self._dispatch, self._refused = dispatch, refused
        self._buffers = Buffers(keep_bytes=KEEP_BYTES, limit_bytes=limits.unanswered_bytes)
        self._closed = threading.Event()
        self._router: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self._door = Door(self._router)
        try:
            _listen(self._router, bind)
        except zmq.ZMQError:
            self._door.close()
            self._router.close(0)
            raise
        self.port = int(self._router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._outbox = Outbox(context, "bulk")
        self._thread = threading.Thread(target=self._serve, name="transport-bulk", daemon=True)
        self._thread.start()

    def is_thread(self, thread: threading.Thread) -> bool:
        """Return whether ``thread`` is the one that serves here."""
        return thread is self._thread

    def close(self, *, timeout_s: float) -> bool:
        """Stop serving; return whether the thread has ended."""
        self._closed.set()
        self._outbox.ring()
        self._thread.join(timeout=timeout_s)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        self._outbox.own()
        poller = zmq.Poller()
        for socket in (self._router, self._outbox.socket, self._door.monitor):
            poller.register(socket, zmq.POLLIN)
        try:
            while not self._closed.is_set():
                ready = dict(poller.poll(self._door.pause_ms))
                if self._door.monitor in ready or self._door.shut:
                    self._door.look()
                if self._router in ready:
                    self._receive()
                self._outbox.send_all(self._router)
        finally:
            self._outbox.close()
            self._door.close()
            self._router.disable_monitor()
            self._router.close(0)

    def _receive(self) -> None:
        for peer, parts in self._door.received(most=RECEIVED):
            try:
                request = self._open(peer, parts)
            except EnvelopeError as error:
                _log.debug("a bulk message is refused: %s", error)
                self._refused(error.reason)
            else:
                self._dispatch(request)

    def _open(self, peer: bytes, parts: list[Any]) -> Request:
        """Return the request of a message.

        Its counter is used up, unless the message is refused.
        """
        envelope = parse_sealed(parts, limit_bytes=self._limits.message_bytes)
        if envelope.kind is not MessageKind.REQUEST:
            raise EnvelopeError(Reason.MALFORMED, "not a request")
        session, counter = self._session(peer, envelope), envelope.counter
        if counter <= session.counter:  # checked again when it is taken
            raise EnvelopeError(Reason.REPLAYED, f"counter {counter} was there already")
        header = session.sealer.open_header(envelope, parts)
        answer = functools.partial(self._send, peer, session, counter)
        take = functools.partial(self._buffers.take, owner=envelope.session)
        try:
            self._buffers.check(sum(header.lengths), owner=envelope.session)
        except BusyError as error:
            self._sessions.take(envelope.session, counter)  # before the refusal: answered once
            Request(header, [], peer=envelope.session, answer=answer).refuse(error)
            raise EnvelopeError(Reason.BUSY, str(error)) from None
        frames = session.sealer.open_frames(envelope, parts, header, take=take)
        self._sessions.take(envelope.session, counter)
        return Request(header, frames, peer=envelope.session, answer=answer, seals_at_once=True)

    def _session(self, peer: bytes, envelope: Envelope) -> BulkSession:
        try:
            return self._sessions.find(envelope.session)
        except EnvelopeError:
            hint = Envelope(
                kind=MessageKind.UNKNOWN, session=envelope.session, counter=envelope.counter
            )
            self._router.send_multipart([peer, hint.encode()])
            raise

    def _send(
        self,
        peer: bytes,
        session: BulkSession,
        counter: int,
        header: MessageHeader,
        frames: Sequence[Any],
    ) -> None:
        """Seal an answer on the calling thread and queue it."""
        take = functools.partial(self._buffers.take, owner=session.sealer.session)
        parts = session.sealer.seal(MessageKind.REPLY, counter, header, frames, take=take)
        self._outbox.put([peer, *parts])


def _listen(router: zmq.Socket[bytes], bind: str) -> None:
    router.plain_server = True
    router.setsockopt(zmq.ZAP_DOMAIN, b"bulk")
    router.setsockopt(zmq.LINGER, 0)
    router.setsockopt(zmq.MAXMSGSIZE, PART_BYTES)
    router.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    router.setsockopt(zmq.SNDHWM, QUEUED)
    router.setsockopt(zmq.RCVHWM, RECEIVED)
    router.bind(bind)
