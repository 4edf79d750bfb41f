"""A TCP connection that can be cut as a network cuts it: bytes stop, without any notice."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

_CHUNK = 1 << 16


class Wire:
    """Forwards what comes to ``endpoint`` to ``target`` (both ``host:port``) while it is whole.

    ``delay_s`` is how long everything takes on its way, ``taken`` the number of connections so far.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._forth, self._back, self._new = (threading.Event() for _ in range(3))
        self._closed = False
        self._sockets: list[socket.socket] = [self._listener]
        self._joined: list[socket.socket] = []
        self.delay_s = 0.0
        self.taken = 0
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.mend()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, *, forth: bool = True, back: bool = True) -> None:
        """Hold back every byte until `mend`, of new connections too.

        Only those to the target (``forth``) or from it (``back``) where that is wanted.
        """
        if forth:
            self._forth.clear()
        if back:
            self._back.clear()

    def half_open(self) -> None:
        """End all connections; new ones are taken, and lead nowhere until `mend`."""
        self._new.clear()
        for one in list(self._joined):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        """Let bytes through again, those held back first."""
        for event in (self._forth, self._back, self._new):
            event.set()

    def close(self) -> None:
        """Close every connection."""
        self._closed = True
        self.mend()
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                near, _ = self._listener.accept()
            except OSError:
                continue
            self._sockets.append(near)
            self.taken += 1
            threading.Thread(target=self._join, args=(near,), daemon=True).start()

    def _join(self, near: socket.socket) -> None:
        self._new.wait()
        try:
            far = socket.create_connection(self._target)
        except OSError:
            near.close()
            return
        self._sockets.append(far)
        self._joined += [near, far]
        for source, sink, whole in ((near, far, self._forth), (far, near, self._back)):
            threading.Thread(target=self._pump, args=(source, sink, whole), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, whole: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK):
                whole.wait()
                time.sleep(self.delay_s)
                sink.sendall(data)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
