"""The imports that the nodes of one launcher have in common."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from holdfast.ckpt.descriptors import readable
from holdfast.elastic.agent.config import AgentConfig
from holdfast.elastic.agent.workers import server_spec
from holdfast.elastic.preload.client import ForkServer, ServerState

_LOAD_S: Final = 600.0
_LOOK_S: Final = 0.5


class SharedImports:
    """A fork server of the launcher, from which those of its nodes begin.

    If it cannot import or fork, each node starts a server by itself, which names the reason.
    """

    def __init__(self, server: ForkServer | None = None) -> None:
        """Use ``server``, which stays when this is closed; None: `start` may start one."""
        self._server, self._is_own = server, False

    def start(self, config: AgentConfig, *, env: Mapping[str, str]) -> None:
        """Import what the job preloads, if it does; return when that is done or cannot be.

        ``config`` is a node's, ``env`` the environment of its agent.
        """
        if self._server is not None or not config.preload:
            return
        try:
            server = ForkServer.start(config.preload, server_spec(config, env))
        except OSError:
            return
        self._server, self._is_own = server, True
        until_s = time.monotonic() + _LOAD_S
        while server.state is ServerState.LOADING and time.monotonic() < until_s:
            readable([server.socket.fileno()], _LOOK_S)
            server.check()

    @property
    def ready(self) -> ForkServer | None:
        """The server if it can fork at this moment."""
        if self._server is None:
            return None
        self._server.check()
        return self._server if self._server.state is ServerState.READY else None

    def close(self) -> None:
        """End the server if it was started here."""
        if self._server is not None and self._is_own:
            self._server.close()
