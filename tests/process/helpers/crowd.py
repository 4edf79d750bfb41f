"""A crowd of strangers at a port: idle, half-open and garbage connections, again and again."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from typing import Final, Self

from holdfast.ckpt.closing import Closing

_KINDS: Final = ("idle", "half-open", "garbage")
_GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
_GARBAGE_BYTES: Final = 1 << 16
_LOOK_MS: Final = 50


class Crowd(Closing):
    """So many connections to a port of this machine, on a thread of its own.

    A third says nothing, a third begins a handshake and goes no further, a third sends garbage. A
    connection that is closed is made again. ``made`` counts the connections that were accepted.
    """

    def __init__(self, port: int, *, size: int, host: str = "127.0.0.1") -> None:
        self._place, self._size = (host, port), size
        self._poll = select.poll()
        self._peers: dict[int, tuple[socket.socket, str]] = {}
        self._open: set[int] = set()
        self.made = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="crowd", daemon=True)

    @property
    def open(self) -> int:
        """The number of connections that are open now."""
        return len(self._open)

    def __enter__(self) -> Self:
        for number in range(self._size):
            self._connect(_KINDS[number % len(_KINDS)])
        self._thread.start()
        return self

    def close(self) -> None:
        """End all connections."""
        self._over.set()
        self._thread.join()
        for peer, _ in self._peers.values():
            peer.close()

    def _connect(self, kind: str) -> None:
        peer = socket.socket()
        peer.setblocking(False)
        peer.connect_ex(self._place)
        self._peers[peer.fileno()] = peer, kind
        self._poll.register(peer, select.POLLOUT)

    def _run(self) -> None:
        while not self._over.is_set():
            for fd, event in self._poll.poll(_LOOK_MS):
                peer, kind = self._peers[fd]
                if event & (select.POLLHUP | select.POLLERR) or self._ended(fd, peer, event):
                    self._poll.unregister(fd)
                    self._open.discard(fd)
                    del self._peers[fd]
                    peer.close()
                    self._connect(kind)
                elif event & select.POLLOUT:
                    self._enter(fd, peer, kind)

    def _ended(self, fd: int, peer: socket.socket, event: int) -> bool:
        """Return whether the server has ended the connection; throw away what it says."""
        if not event & select.POLLIN:
            return False
        try:
            return not peer.recv(1 << 16)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _enter(self, fd: int, peer: socket.socket, kind: str) -> None:
        self.made += 1
        self._open.add(fd)
        self._poll.modify(fd, select.POLLIN)
        with contextlib.suppress(OSError):
            if kind == "half-open":
                peer.send(_GREETING)
            elif kind == "garbage":
                peer.send(os.urandom(_GARBAGE_BYTES))
