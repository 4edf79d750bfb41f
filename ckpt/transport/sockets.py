"""ZeroMQ sockets: a context that can be dropped, a client's connection, a server's outbox."""

from __future__ import annotations

import contextlib
import math
import struct
import threading
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any, Final

import zmq

from holdfast.ckpt.errors import InternalError

_EVENT: Final = struct.Struct("=hi")  # number and value, see zmq_socket_monitor(3)


def next_event(monitor: zmq.Socket[bytes]) -> tuple[int, int] | None:
    """Return the number and the value of a connection's next event, None if there is none yet.

    pyzmq has the same in ``zmq.utils.monitor``, which imports asyncio and ssl. No process of ours
    needs them to start.
    """
    try:
        event, _ = monitor.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
    number, value = _EVENT.unpack(event)
    return number, value


class OwnContext(zmq.Context[zmq.Socket[bytes]]):
    """A context that ends with its sockets, also when the garbage collector ends it.

    ``zmq.Context`` refers to its sockets weakly. When it is collected together with them, it finds
    none to close, and waits for ever for their closing, in whatever thread collects.
    """

    _own: list[zmq.Socket[bytes]]

    def socket(self, *args: Any, **kwargs: Any) -> zmq.Socket[bytes]:
        """Return a new socket."""
        made = super().socket(*args, **kwargs)
        if not self._shadow:
            self._own = [each for each in getattr(self, "_own", []) if not each.closed]
            self._own.append(made)
        return made

    def destroy(self, linger: int | None = None) -> None:
        """Close the sockets, then the context."""
        for each in getattr(self, "_own", []):
            if not each.closed:
                each.close(linger)
        super().destroy(linger)


LOST, REFUSED = int(zmq.EVENT_DISCONNECTED), int(zmq.EVENT_CONNECT_RETRIED)
DENIED = int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)


HANDSHAKE_MS = 15_000
"""Time in which a new connection to a server must have shown its key; ZeroMQ's default is 30 s.

A process that gets no processor for some seconds must not be taken for a stranger: a client that
watches its connection takes the end of a handshake for the end of the server.
"""

QUEUED = 16
"""The most messages that wait to be sent; one is in progress at a time."""


class NoAnswerError(InternalError):
    """No answer came; the message says why. Inside the transport only."""


class Connection:
    """A DEALER socket that reconnects by itself; ``watch`` records its connection events.

    ``configure`` sets the options that differ. Use it from one thread at a time.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        address: str,
        *,
        configure: Callable[[zmq.Socket[bytes]], None],
        watch: bool,
    ) -> None:
        self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        self.socket.setsockopt(zmq.SNDHWM, QUEUED)
        configure(self.socket)
        self._monitor: zmq.Socket[bytes] | None = None
        self._poller = zmq.Poller()
        self._poller.register(self.socket, zmq.POLLIN)
        if watch:
            self._monitor = self.socket.get_monitor_socket(LOST | REFUSED | DENIED)
            self._poller.register(self._monitor, zmq.POLLIN)
        self.socket.connect(address)

    @property
    def closed(self) -> bool:
        """True if `close` was called."""
        return bool(self.socket.closed)

    def send(self, parts: list[Any]) -> bool:
        """Send a message; False where the connection is over and useless."""
        try:
            self.socket.send_multipart(parts, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        return True

    def receive(self, deadline_s: float) -> list[memoryview] | None:
        """Return the next message, or None if a connection event comes first.

        Raises `NoAnswerError` once the deadline has passed.
        """
        left_s = deadline_s - monotonic()
        ready = dict(self._poller.poll(max(0, math.ceil(left_s * 1000))))
        if self.socket in ready:
            return [part.buffer for part in self.socket.recv_multipart(copy=False)]
        if not ready:
            raise NoAnswerError("")
        return None

    def events(self) -> list[int]:
        """Return the connection events since the last call."""
        events: list[int] = []
        while self._monitor is not None and (event := next_event(self._monitor)):
            events.append(event[0])
        return events

    def close(self) -> None:
        """Close the socket; unsent messages are dropped."""
        if self._monitor is not None:
            self.socket.disable_monitor()
            self._monitor = None
        self.socket.close(0)


class Outbox:
    """A queue that wakes the thread polling its ``socket``; that thread calls `own` first."""

    def __init__(self, context: zmq.Context[Any], name: str) -> None:
        self._messages: deque[list[Any]] = deque()
        self._lock = threading.Lock()
        self._owner: int | None = None
        self.socket = context.socket(zmq.PAIR)
        self.socket.bind(f"inproc://{name}")
        self._bell = context.socket(zmq.PAIR)
        self._bell.connect(f"inproc://{name}")

    def own(self) -> None:
        """Declare the calling thread the polling one; its own messages need no wake-up."""
        self._owner = threading.get_ident()

    def put(self, parts: list[Any]) -> None:
        """Queue a message."""
        self._messages.append(parts)
        if threading.get_ident() != self._owner:
            self.ring()

    def ring(self) -> None:
        """Wake the polling thread."""
        with self._lock, contextlib.suppress(zmq.Again):  # full: the thread will wake anyway
            if not self._bell.closed:
                self._bell.send(b"", zmq.NOBLOCK)

    def send_all(self, socket: zmq.Socket[bytes]) -> None:
        """Send the queued messages and clear the wake-ups; for the polling thread only."""
        with contextlib.suppress(zmq.Again):
            while True:
                self.socket.recv(zmq.NOBLOCK)
        while self._messages:
            socket.send_multipart(self._messages.popleft(), copy=False)

    def close(self) -> None:
        """Close both ends; for the polling thread only."""
        with self._lock:
            self._bell.close(0)
        self.socket.close(0)
        self._messages.clear()
