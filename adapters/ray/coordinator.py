"""The coordinator of a job on Ray, served beside the process that launches it.

With that process the job ends in any case, because Ray ends its actors. So no node is special:
whichever is lost, the others go on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from holdfast.adapters.ray.job import RayJob
from holdfast.ckpt.transport import RunKey
from holdfast.elastic.coordinator.base import Coordinator
from holdfast.elastic.coordinator.connecting import connect
from holdfast.elastic.coordinator.service import LauncherRecord, ServiceConfig, launcher_key
from holdfast.elastic.decisions.restarting import Restarts, again
from holdfast.elastic.errors import CoordinatorError, JobFailedError
from holdfast.elastic.launch.coordinator_process import CoordinatorProcess
from holdfast.elastic.launch.joint import JointConfig, SharedJobRecord
from holdfast.elastic.launch.run_folder import KEY, lock_run_dir
from holdfast.elastic.membership.view import encode, run_prefix
from holdfast.elastic.processes import run_dirs
from holdfast.elastic.rendezvous.link import CoordinatorPlace

RETURN_S: Final = 20.0
"""Time for which the coordinator's process outlives one that was killed; then it ends by itself."""

PATIENCE_S: Final = 120.0
"""Time for which nodes wait for a coordinator that does not answer, as while it is started again on
a busy machine. If the process that launched them is gone, Ray ends them before."""

_CALL_S: Final = 10.0
_MOST_RESTARTS: Final = 5
_log = logging.getLogger(__name__)


class RayCoordinator:
    """The coordinator of one job: its ``address``, ``key`` and ``job`` name.

    Use `opened`.
    """

    def __init__(self, job: RayJob, *, folder: Path, host: str) -> None:
        self.key = RunKey.new()
        self._run = f"{os.getpid():x}-{uuid.uuid4().hex[:6]}"
        self.job = f"ray-{self._run}"
        self._folder, self._host = folder, host
        self._server: CoordinatorProcess | None = None
        self._restarts = Restarts()
        self.address = job.options.coordinator
        url = self.address
        if not url:
            self.key.save(folder / KEY)
            self._server = CoordinatorProcess.start(self._service(f"tcp://{host}:*"))
            url = self._server.address
            self.address = url.removeprefix("tcp://")
        try:
            self._coordinator: Coordinator = connect(url, self.key, timeout_s=_CALL_S)
            self._begin(job)
        except BaseException:
            if self._server is not None:
                self._server.close()
            raise

    @classmethod
    @contextmanager
    def opened(cls, job: RayJob, *, host: str) -> Iterator[RayCoordinator]:
        """Serve or reach the coordinator, and write the job's record there, until the block ends.

        Raises ``ConfigError`` and ``CoordinatorError``.
        """
        folder = run_dirs.make()
        lock = lock_run_dir(folder, temporary=True)
        try:
            served = cls(job, folder=folder, host=host)
            try:
                yield served
            finally:
                served._close()
        finally:
            lock.close()
            shutil.rmtree(folder, ignore_errors=True)

    def check(self) -> None:
        """Start a coordinator that was killed again; it continues with its journal.

        Raises ``JobFailedError`` if it ends again and again.
        """
        server = self._server
        if server is None or server.alive or time.monotonic() < self._restarts.due_s:
            return
        now_s = time.monotonic()
        following = again(self._restarts, progress=-1, most=_MOST_RESTARTS, now_s=now_s)
        if following is None:
            raise JobFailedError("the coordinator of the job on Ray ended again and again")
        self._restarts = following
        try:
            self._server = CoordinatorProcess.start(self._service(server.address))
        except CoordinatorError as error:
            _log.warning("%s", error)

    def _service(self, bind: str) -> ServiceConfig:
        return ServiceConfig(
            run=self._run,
            job=self.job,
            run_dir=str(self._folder),
            key_file=str(self._folder / KEY),
            bind=bind,
            return_s=RETURN_S,
        )

    def _begin(self, job: RayJob) -> None:
        """Write what the launcher that begins a job writes; all nodes then join it."""
        record = SharedJobRecord(
            run=self._run,
            machines=job.most,
            wanted=job.wanted,
            settings=dict(job.options.settings),
            return_s=PATIENCE_S,
        )
        self._coordinator.put(shared_record_key(self.job), encode(record))
        if self._server is not None:
            owner = LauncherRecord(pid=os.getpid())
            self._coordinator.put(launcher_key(self._run), encode(owner))

    def _close(self) -> None:
        with contextlib.suppress(CoordinatorError):
            if self._server is None:  # an etcd of the user's: leave nothing there
                for prefix in (run_prefix(self._run), f"jobs/{self.job}/"):
                    for entry in self._coordinator.range(prefix)[0]:
                        self._coordinator.delete(entry.key)
        self._coordinator.close()
        if self._server is not None:
            self._server.close()


def shared_record_key(job: str) -> str:
    """Return the key at the coordinator of the record that all nodes of the job read."""
    place = CoordinatorPlace(address="", may_host=False)
    return JointConfig(place=place, key_file=Path(), job=job).key
