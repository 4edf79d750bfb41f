"""The launcher's part as the host of the coordinator: serve it, find it, start it again."""

from __future__ import annotations

import contextlib
import logging
import os
import time
import uuid

from holdfast.ckpt.errors import PeerError
from holdfast.ckpt.memory.arena import arenas_of
from holdfast.ckpt.transport import RunKey
from holdfast.elastic.agent.reporting import read_processes
from holdfast.elastic.coordinator.base import Coordinator
from holdfast.elastic.coordinator.embedded import EmbeddedServer
from holdfast.elastic.coordinator.service import (
    LauncherRecord,
    ServiceConfig,
    drop_memory,
    launcher_key,
)
from holdfast.elastic.decisions.restarting import Restarts, again
from holdfast.elastic.errors import CoordinatorError
from holdfast.elastic.launch.config import EMBEDDED, LaunchConfig
from holdfast.elastic.launch.coordinator_process import CoordinatorProcess, read_record
from holdfast.elastic.launch.run_folder import KEY
from holdfast.elastic.membership.view import encode, run_prefix
from holdfast.elastic.processes import run_dirs

_REVIVALS = 3
_log = logging.getLogger(__name__)


class CoordinatorHost:
    """The run of a launcher, and the coordinator that it serves, here or in a process of its own.

    A process of its own outlives this launcher; the next launcher of the same job takes it up.
    """

    key: RunKey
    _coordinator: Coordinator

    def __init__(self, config: LaunchConfig) -> None:
        self.config = config
        self.run = f"{os.getpid():x}-{uuid.uuid4().hex[:6]}"
        self._identity = config.job
        self._temporary = config.run_dir is None
        self.run_dir = config.run_dir or run_dirs.make()
        self._stop_reason: str | None = None
        self._server: EmbeddedServer | CoordinatorProcess | None = None
        self._coordinator_restarts = Restarts()

    def _predecessor(self) -> CoordinatorProcess | None:
        """Take up the coordinator of a killed launcher of the same job; end that of another."""
        if not self._bind() or (record := read_record(self.run_dir)) is None:
            return None
        try:
            self.key = RunKey.load(self.run_dir / KEY)
        except PeerError:
            return None
        found = CoordinatorProcess.found(self.run_dir, self.key)
        if record.job != self._identity:
            _log.warning(
                "%s: the job that ran here (%s) had another command or other options; it is not "
                "continued",
                self.run_dir,
                record.run,
            )
            if found:
                found.close()
        else:
            found = found or self._revive(record.run)
            if found:
                self.run, self._server = found.run, found
                return found
        drop_memory(record.run)
        return None

    def _revive(self, run: str) -> CoordinatorProcess | None:
        """Start a killed coordinator again, if its job can go on; None if it cannot."""
        if not self.config.return_s or not self._can_go_on(run):
            return None
        for _ in range(_REVIVALS):
            try:
                return CoordinatorProcess.start(self._service(self._bind(), run=run))
            except CoordinatorError as error:
                # the killed launcher may have just started one
                if found := CoordinatorProcess.found(self.run_dir, self.key):
                    return found
                _log.warning("%s: run %s cannot be continued: %s", self.run_dir, run, error)
        return None

    def _can_go_on(self, run: str) -> bool:
        """Return whether there is memory from which the run can continue."""
        return bool(arenas_of(run))

    def _sign(self, *, number: int = -1) -> None:
        """Write this launcher's record at the coordinator's process."""
        names = tuple(node.name for node in self.config.nodes)
        record = LauncherRecord(pid=os.getpid(), nodes=names, number=number)
        self._coordinator.put(launcher_key(self.run), encode(record))

    def _bind(self) -> str:
        """Return the address at which this launcher serves the coordinator, empty if it does not.

        It ends in ``*`` for any free port.
        """
        if self.config.coordinator != EMBEDDED:
            return ""
        return f"tcp://127.0.0.1:{self.config.port or '*'}"

    def _serve(self) -> EmbeddedServer | CoordinatorProcess:
        """Serve the coordinator here or, if it is to outlive this launcher, in its own process."""
        if self._temporary or not self.config.return_s:
            return EmbeddedServer(self.key, bind=self._bind())
        return CoordinatorProcess.start(self._service(self._bind(), run=self.run))

    def _service(self, bind: str, *, run: str) -> ServiceConfig:
        return ServiceConfig(
            run=run,
            job=self._identity,
            run_dir=str(self.run_dir.absolute()),
            key_file=str((self.run_dir / KEY).absolute()),
            bind=bind,
            return_s=self.config.return_s,
        )

    def _check_coordinator(self) -> None:
        """Start the coordinator's process again if it has ended; it continues with its journal."""
        server, restarts = self._server, self._coordinator_restarts
        if not isinstance(server, CoordinatorProcess) or server.alive:
            return
        if time.monotonic() < restarts.due_s:
            return
        listed = [read_processes(self.run_dir, node.name) for node in self.config.nodes]
        following = again(
            restarts,
            progress=max((found.progress for found in listed if found), default=-1),
            most=self.config.node_restarts,
            now_s=time.monotonic(),
        )
        if following is None:
            self._stop_reason = self._stop_reason or "the coordinator ended again and again"
            return
        self._coordinator_restarts = following
        try:
            self._server = CoordinatorProcess.start(self._service(server.address, run=self.run))
        except (CoordinatorError, OSError) as error:
            _log.warning("%s", error)

    def _forget_run(self) -> None:
        """Remove the run's keys from a coordinator that outlives it."""
        with contextlib.suppress(CoordinatorError):
            for entry in self._coordinator.range(run_prefix(self.run))[0]:
                self._coordinator.delete(entry.key)
