"""Connections to one server that the threads of a process share."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.ckpt.errors import PeerError
from holdfast.ckpt.transport.client import Client
from holdfast.ckpt.transport.keys import RunKey


class ClientPool:
    """Connections to the server at ``address``, each lent to one call at a time.

    There are as many as calls were ever in progress at once, so no call waits for another.
    ``timeout_s`` and ``watch`` are as for `Client`.
    """

    def __init__(self, address: str, key: RunKey, *, timeout_s: float, watch: bool = False) -> None:
        self.address, self._key = address, key
        self._timeout_s, self._watch = timeout_s, watch
        self._lock = threading.Lock()
        self._idle: list[Client] = []
        self.closed = False

    @contextmanager
    def lend(self) -> Iterator[Client]:
        """Lend a connection, a new one if none is idle. Raises ``PeerError`` when closed."""
        with self._lock:
            if self.closed:
                raise PeerError(f"{self.address}: this client is closed")
            client = self._idle.pop() if self._idle else None
        if client is None:
            client = Client(self.address, self._key, timeout_s=self._timeout_s, watch=self._watch)
        try:
            yield client
        finally:
            with self._lock:
                if kept := not self.closed:
                    self._idle.append(client)
            if not kept:
                client.close()

    def close(self) -> None:
        """Close the idle connections now, and each lent one after its call."""
        with self._lock:
            self.closed = True
            idle, self._idle = self._idle, []
        for client in idle:
            client.close()
