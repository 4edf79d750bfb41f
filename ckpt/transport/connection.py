"""A client's socket, and what happens to its connection."""

from __future__ import annotations

import math
from collections.abc import Callable
from time import monotonic
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from holdfast.ckpt.errors import InternalError

LOST, REFUSED = int(zmq.EVENT_DISCONNECTED), int(zmq.EVENT_CONNECT_RETRIED)
DENIED = int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)


QUEUED = 16
"""Messages that wait to be sent at most; one is under way at a time."""


class NoAnswerError(InternalError):
    """No answer came; says why. Inside the transport only."""


class Connection:
    """A DEALER socket that reconnects by itself, and with ``watch`` tells of it.

    ``configure`` sets the options that differ. One thread at a time.
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

    def send(self, parts: list[Any]) -> bool:
        """Send a message; False where the connection is over, and of no use any more."""
        try:
            self.socket.send_multipart(parts, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        return True

    def receive(self, deadline_s: float) -> list[memoryview] | None:
        """Return the next message, None when something has happened to the connection first.

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
        """Return what has happened to the connection since the last look."""
        events: list[int] = []
        while self._monitor is not None:
            try:
                events.append(int(recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]))
            except zmq.Again:
                break
        return events

    def close(self) -> None:
        """Close the socket; what was not sent is dropped."""
        if self._monitor is not None:
            self.socket.disable_monitor()
            self._monitor = None
        self.socket.close(0)
