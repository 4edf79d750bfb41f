"""Authenticated request and reply between the processes of a run: ZeroMQ with CURVE.

A `Server` answers requests on one socket; a `Client` asks with a deadline. Only holders of the
run's key get through: the server's CURVE handshake admits one client key (ZAP), and that key is
in the key file. A handler runs on the server's only I/O thread and must not block: what takes
long keeps the `Request` and calls `Request.reply` later, from any thread.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from ckpt.errors import CkptError, FencedError, PeerError
from ckpt.types import Json

_log = logging.getLogger(__name__)

MAX_FRAME_BYTES = 1 << 30
"""Larger frames are refused by the socket: a bound on what a peer can make us allocate."""

_LOST, _REFUSED = int(zmq.EVENT_DISCONNECTED), int(zmq.EVENT_CONNECT_RETRIED)
_REFUSALS = 3

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"


class RunKey(msgspec.Struct, frozen=True, kw_only=True):
    """The secret of a run: one CURVE pair for its servers, one for its clients (Z85 text)."""

    server_public: str
    server_secret: str
    client_public: str
    client_secret: str

    @classmethod
    def new(cls) -> RunKey:
        """Make a fresh random key."""
        server_public, server_secret = zmq.curve_keypair()
        client_public, client_secret = zmq.curve_keypair()
        return cls(
            server_public=server_public.decode(),
            server_secret=server_secret.decode(),
            client_public=client_public.decode(),
            client_secret=client_secret.decode(),
        )

    def save(self, path: Path) -> None:
        """Write the key to a new file that only its owner can read."""
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(msgspec.json.encode(self))

    @classmethod
    def load(cls, path: Path) -> RunKey:
        """Read a key file. Raises ``PeerError`` naming the file when it is no key."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError) as error:
            raise PeerError(f"{path}: no usable run key: {error}") from error


class _Header(msgspec.Struct, kw_only=True):
    id: int
    op: str = ""
    body: Json = None
    error: str | None = None
    error_kind: str | None = None


_decode_header = msgspec.json.Decoder(_Header).decode
_encode = msgspec.json.encode


class Request:
    """One request: ``op``, ``body`` (JSON) and binary ``frames``; answered at most once."""

    def __init__(
        self, server: Server, peer: bytes, number: int, op: str, body: Json, frames: list[Any]
    ) -> None:
        self._server, self._peer, self._number = server, peer, number
        self.op, self.body, self.frames = op, body, frames

    @property
    def peer(self) -> bytes:
        """Identity of the asking socket, stable over its requests."""
        return self._peer

    def reply(self, body: Json = None, frames: Sequence[Any] = ()) -> None:
        """Answer; callable from any thread. Frames are sent without a copy."""
        self._server._send(self._peer, _Header(id=self._number, body=body), frames)

    def refuse(self, error: Exception) -> None:
        """Answer with an error; it is raised at the client as its kind (see `Client.call`)."""
        kind = "fenced" if isinstance(error, FencedError) else type(error).__name__
        header = _Header(id=self._number, error=str(error) or type(error).__name__, error_kind=kind)
        self._server._send(self._peer, header, ())


Handler = Callable[[Request], None]


class Server:
    """Serves a handler on one ROUTER socket from one I/O thread.

    ``handler(request)`` replies or keeps the request for later. Errors of the package's own tree
    that it raises are sent back; anything else is logged and sent back as an internal error.
    ``tick`` is called on the I/O thread every ``tick_s`` for work that must share its state.
    """

    def __init__(
        self,
        handler: Handler,
        *,
        key: RunKey,
        bind: str = "tcp://127.0.0.1:*",
        tick: Callable[[], None] | None = None,
        tick_s: float = 0.05,
        errors: tuple[type[Exception], ...] = (CkptError,),
    ) -> None:
        self._handler, self._key, self._errors = handler, key, errors
        self._tick, self._tick_s = tick, tick_s
        self._context = zmq.Context()
        self._outbox: deque[tuple[bytes, _Header, Sequence[Any]]] = deque()
        self._wake_lock = threading.Lock()
        self._closed = threading.Event()
        self.refused = 0
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind(_ZAP_ENDPOINT)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.curve_server = True
        self._router.curve_publickey = key.server_public.encode()
        self._router.curve_secretkey = key.server_secret.encode()
        self._router.setsockopt(zmq.ZAP_DOMAIN, b"holdfast")
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._router.setsockopt(zmq.SNDHWM, 0)
        try:
            self._router.bind(bind)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise PeerError(
                f"cannot listen at {bind}: {error.strerror}; free the port or choose another"
            ) from error
        self.address: str = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._wake_in = self._context.socket(zmq.PAIR)
        self._wake_in.bind("inproc://wake")
        self._wake_out = self._context.socket(zmq.PAIR)
        self._wake_out.connect("inproc://wake")
        self._thread = threading.Thread(target=self._serve, name="transport-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving; requests not yet answered stay unanswered."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)

    def _wake(self) -> None:
        with self._wake_lock:
            if not self._wake_out.closed:
                self._wake_out.send(b"")

    def _send(self, peer: bytes, header: _Header, frames: Sequence[Any]) -> None:
        self._outbox.append((peer, header, frames))
        if threading.current_thread() is not self._thread:
            self._wake()

    def _serve(self) -> None:
        poller = zmq.Poller()
        for socket in (self._router, self._zap, self._wake_in):
            poller.register(socket, zmq.POLLIN)
        try:
            while not self._closed.is_set():
                ready = dict(poller.poll(int(self._tick_s * 1000) if self._tick else None))
                if self._zap in ready:
                    self._authenticate()
                if self._wake_in in ready:
                    self._wake_in.recv()
                if self._router in ready:
                    self._receive()
                if self._tick:
                    self._tick()
                self._flush()
        finally:
            with self._wake_lock:
                self._context.destroy(linger=0)

    def _authenticate(self) -> None:
        """Answer a ZAP request (ZeroMQ RFC 27): only the run's client key may enter."""
        parts = self._zap.recv_multipart()
        version, request_id, credentials = parts[0], parts[1], parts[6:]
        admitted = (
            len(credentials) == 1 and z85.encode(credentials[0]) == self._key.client_public.encode()
        )
        self.refused += not admitted
        status = (b"200", b"OK") if admitted else (b"400", b"not this run's key")
        self._zap.send_multipart([version, request_id, *status, b"", b""])

    def _receive(self) -> None:
        for _ in range(64):  # stay fair to replies
            try:
                parts = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            peer = parts[0].bytes
            try:
                header = _decode_header(parts[1].buffer)
            except (IndexError, msgspec.DecodeError):
                self.refused += 1
                continue
            frames = [part.buffer for part in parts[2:]]
            self._dispatch(Request(self, peer, header.id, header.op, header.body, frames))

    def _dispatch(self, request: Request) -> None:
        try:
            self._handler(request)
        except self._errors as error:
            request.refuse(error)
        except Exception as error:  # noqa: BLE001 - one bad request must not end the server
            _log.exception("handler of %r failed", request.op)
            request.refuse(PeerError(f"{request.op} failed inside the server: {error!r}"))

    def _flush(self) -> None:
        while self._outbox:
            peer, header, frames = self._outbox.popleft()
            self._router.send_multipart([peer, _encode(header), *frames], copy=False)


class Client:
    """Asks one server; safe to share between threads, one request at a time.

    Reconnects by itself. A reply that comes after its deadline is dropped. With ``watch`` a call
    also ends as soon as the connection is lost or refused: for a server that, once gone, does not
    come back at this address.
    """

    def __init__(
        self, address: str, key: RunKey, *, timeout_s: float = 10.0, watch: bool = False
    ) -> None:
        self.address, self._key, self._timeout_s = address, key, timeout_s
        self._watch = watch
        self._monitor: zmq.Socket[bytes] | None = None
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._context = zmq.Context()
        self._socket = self._connect()

    def _connect(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.curve_serverkey = self._key.server_public.encode()
        socket.curve_publickey = self._key.client_public.encode()
        socket.curve_secretkey = self._key.client_secret.encode()
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL, 20)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        if self._watch:
            self._monitor = socket.get_monitor_socket(_LOST | _REFUSED)
        socket.connect(self.address)
        return socket

    def call(
        self,
        op: str,
        body: Json = None,
        frames: Sequence[Any] = (),
        *,
        timeout_s: float | None = None,
    ) -> tuple[Json, list[memoryview]]:
        """Send a request and return the reply's body and frames.

        Raises ``FencedError`` when the server says the caller is of an older generation, and
        ``PeerError`` for any other refusal, a deadline passed, or a closed client.
        """
        wait_s = self._timeout_s if timeout_s is None else timeout_s
        with self._lock:
            number = next(self._numbers)
            try:
                header = _encode(_Header(id=number, op=op, body=body))
                self._connection_events()  # of before this call
                self._socket.send_multipart([header, *frames], copy=False)
                return self._await(number, op, wait_s)
            except zmq.ZMQError as error:
                raise PeerError(f"{self.address}: {op}: {error}") from error

    def _await(self, number: int, op: str, wait_s: float) -> tuple[Json, list[memoryview]]:
        deadline = time.monotonic() + wait_s
        lost = f"no answer to {op} within {wait_s:g} s"
        refusals = 0
        while ready := self._poll(deadline - time.monotonic()):
            if self._socket not in ready:
                events = self._connection_events()
                refusals += events.count(_REFUSED)
                if _LOST in events or refusals >= _REFUSALS:
                    lost = f"nobody serves there any more: no answer to {op}"
                    break
                continue
            parts = self._socket.recv_multipart(copy=False)
            header = _decode_header(parts[0].buffer)
            if header.id != number:
                continue  # the late answer to a request given up before
            if header.error is None:
                return header.body, [part.buffer for part in parts[1:]]
            if header.error_kind == "fenced":
                raise FencedError(header.error)
            raise PeerError(header.error, kind=header.error_kind or "")
        # A server that comes back must not work off what its clients gave up long ago.
        self._disconnect()
        self._socket = self._connect()
        raise PeerError(f"{self.address}: {lost}")

    def _poll(self, left_s: float) -> list[Any]:
        """Wait for an answer or an event of the connection; return the sockets that have one."""
        poller = zmq.Poller()
        for socket in (self._socket, self._monitor):
            if socket is not None:
                poller.register(socket, zmq.POLLIN)
        return [socket for socket, _ in poller.poll(max(0, math.ceil(left_s * 1000)))]

    def _connection_events(self) -> list[int]:
        """Return what has happened to the connection since the last look."""
        events = []
        while self._monitor is not None and self._monitor.poll(0):
            events.append(int(recv_monitor_message(self._monitor)["event"]))
        return events

    def _disconnect(self) -> None:
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor = None
        self._socket.close(0)

    def close(self) -> None:
        """Close the socket; a call under way in another thread ends first."""
        with self._lock:
            self._disconnect()
            self._context.destroy(linger=0)
