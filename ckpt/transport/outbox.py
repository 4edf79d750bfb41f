"""Messages from any thread for the one thread that owns a socket."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from typing import Any

import zmq


class Outbox:
    """A queue that wakes the thread polling its ``socket``; that one says who it is first."""

    def __init__(self, context: zmq.Context[Any], name: str) -> None:
        self._messages: deque[list[Any]] = deque()
        self._lock = threading.Lock()
        self._owner: int | None = None
        self.socket = context.socket(zmq.PAIR)
        self.socket.bind(f"inproc://{name}")
        self._bell = context.socket(zmq.PAIR)
        self._bell.connect(f"inproc://{name}")

    def own(self) -> None:
        """Say that the calling thread polls here, and looks after everything it does itself."""
        self._owner = threading.get_ident()

    def put(self, parts: list[Any]) -> None:
        """Queue a message."""
        self._messages.append(parts)
        if threading.get_ident() != self._owner:
            self.ring()

    def ring(self) -> None:
        """Wake the polling thread."""
        with self._lock, contextlib.suppress(zmq.Again):  # full of rings: it will wake anyway
            if not self._bell.closed:
                self._bell.send(b"", zmq.NOBLOCK)

    def send_all(self, socket: zmq.Socket[bytes]) -> None:
        """Send what is queued and quiet the bell; for the polling thread only."""
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
