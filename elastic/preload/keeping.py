"""The fork server of a node: when workers wait for it, and when they start without it."""

from __future__ import annotations

import logging
import selectors
import time
from collections.abc import Callable, Sequence
from typing import Final

from holdfast.elastic.decisions.restarting import Restarts, again
from holdfast.elastic.preload.client import ForkServer, ServerSpec, ServerState

_log = logging.getLogger(__name__)

_MOST_RESTARTS: Final = 3
_LOAD_S: Final = 600.0
"""Longest time for which a node's first workers wait for the imports."""


class Preloading:
    """Keeps a node's fork server running, if the job preloads modules.

    The first workers wait until it has imported. If it ends later, it is started again, and workers
    start without it meanwhile. ``failure`` is the reason why the job cannot go on.
    """

    def __init__(
        self,
        modules: Sequence[str],
        spec: ServerSpec,
        *,
        node: str,
        inherited: int,
        selector: selectors.BaseSelector,
    ) -> None:
        """Start the server, or use the one whose socket is ``inherited`` (-1: there is none)."""
        self._modules, self._spec, self._node = tuple(modules), spec, node
        self._selector = selector
        self._server: ForkServer | None = None
        self._restarts: Restarts | None = Restarts() if modules else None
        self._first_by_s = time.monotonic() + _LOAD_S
        self._waits = bool(modules)
        self.failure = ""
        if modules and inherited >= 0:
            self._begin(lambda: ForkServer.inherited(inherited))
        self.check()

    @property
    def holds(self) -> bool:
        """True while the node's first workers wait."""
        return self._waits

    @property
    def ready(self) -> ForkServer | None:
        """The server if it can fork a worker now."""
        server = self._server
        return server if server is not None and server.state is ServerState.READY else None

    @property
    def pid(self) -> int:
        """The server's process id, 0 while there is none."""
        return self._server.child.pid if self._server is not None else 0

    def check(self) -> None:
        """Start the server if there should be one; detect its end and its messages."""
        if self._restarts is None:
            return
        if self._server is None:
            if time.monotonic() >= self._restarts.due_s:
                self._begin(lambda: ForkServer.start(self._modules, self._spec))
            return
        self._server.check()
        match self._server.state:
            case ServerState.READY:
                self._waits = False
            case ServerState.REFUSED:
                self._refuse(self._server)
            case ServerState.ENDED:
                self._replace(self._server.why)
            case ServerState.LOADING if self._waits and time.monotonic() > self._first_by_s:
                self._server.close()
                self._replace(f"the import of {self._server.module} took over {_LOAD_S:g} s")

    def _begin(self, begin: Callable[[], ForkServer]) -> None:
        try:
            self._server = begin()
        except OSError as error:
            self._replace(str(error))
            return
        self._selector.register(
            self._server.socket, selectors.EVENT_READ, lambda mask: self._on_socket()
        )

    def _on_socket(self) -> None:
        """Wake the loop, which calls `check`; a socket without a server is read no more."""
        if self._server is not None:
            self._server.check()
            if self._server.state in (ServerState.ENDED, ServerState.REFUSED):
                self._forget_socket(self._server)

    def _forget_socket(self, server: ForkServer) -> None:
        if server.socket.fileno() >= 0 and server.socket in self._selector.get_map():
            self._selector.unregister(server.socket)

    def _refuse(self, server: ForkServer) -> None:
        self.failure = (
            f"node {self._node} cannot preload {server.module}: it {server.why}; install it "
            "for this Python, or leave it out of --preload"
        )
        self.close()

    def _replace(self, why: str) -> None:
        """Start another server soon, unless that was done too often; workers wait no more."""
        assert self._restarts is not None
        self._end_server()
        self._waits = False
        self._restarts = again(
            self._restarts, progress=-1, most=_MOST_RESTARTS, now_s=time.monotonic()
        )
        _log.warning(
            "the process that imported %s ended: %s; workers start without it%s",
            ", ".join(self._modules),
            why,
            ", until there is another" if self._restarts else "",
        )

    def _end_server(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            self._forget_socket(server)
            server.close()

    def close(self) -> None:
        """End the server, and start none any more."""
        self._restarts = None
        self._waits = False
        self._end_server()
