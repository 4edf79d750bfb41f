"""The run's coordinator inside an agent, and its removal at the end."""

from __future__ import annotations

import time
from pathlib import Path

from holdfast.ckpt.transport import RunKey
from holdfast.elastic.agent.config import AgentConfig
from holdfast.elastic.coordinator.base import Coordinator
from holdfast.elastic.coordinator.embedded import EmbeddedServer
from holdfast.elastic.errors import CoordinatorError
from holdfast.elastic.membership.view import node_key

JOURNAL = "coordinator.journal"
_FAREWELL_S = 5.0
_POLL_S = 0.02


class Hosting:
    """Serves the coordinator at ``config.coordinator_bind``, with its journal in the run directory.

    An agent that is restarted there continues with the same table. Raises ``CoordinatorError``.
    """

    def __init__(self, config: AgentConfig, key: RunKey) -> None:
        self._run = config.run
        self._journal = Path(config.run_dir) / JOURNAL
        self._server = EmbeddedServer(key, bind=config.coordinator_bind, journal=self._journal)

    def end_with(self, coordinator: Coordinator) -> None:
        """Wait until the other agents have seen the job's end and left, then delete the journal."""
        deadline_s = time.monotonic() + _FAREWELL_S
        try:
            while coordinator.range(node_key(self._run, ""))[0] and time.monotonic() < deadline_s:
                time.sleep(_POLL_S)
        except CoordinatorError:
            pass  # it is unreachable: nothing to wait for
        self._journal.unlink(missing_ok=True)

    def close(self) -> None:
        """Stop serving; the journal stays."""
        self._server.close()
