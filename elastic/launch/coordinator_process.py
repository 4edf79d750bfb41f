"""The launcher's side of a coordinator that is a process of its own: start, find, watch, end."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from pathlib import Path

import msgspec

from holdfast.ckpt.descriptors import readable
from holdfast.ckpt.transport import RunKey
from holdfast.ckpt.types import learn
from holdfast.elastic.coordinator.connecting import connect
from holdfast.elastic.coordinator.service import (
    JOURNAL,
    RECORD,
    ServiceConfig,
    ServiceRecord,
    launcher_key,
)
from holdfast.elastic.errors import CoordinatorError
from holdfast.elastic.processes.children import Child, end_processes
from holdfast.elastic.processes.configured import await_ready, start_configured

_MODULE = "holdfast.elastic.coordinator"
_START_S = 120.0
_ANSWER_S = 5.0
_END_S = 5.0
_log = logging.getLogger(__name__)


class CoordinatorProcess:
    """A running service; ``run`` is the run that it serves, ``address`` that of its clients."""

    def __init__(self, record: ServiceRecord, *, run_dir: Path) -> None:
        """Raises ``ProcessLookupError`` if it has ended."""
        self._record, self._run_dir = record, run_dir
        self.run, self.address = record.run, record.address
        self._pidfd = os.pidfd_open(record.pid)
        self._child: Child | None = None

    @classmethod
    def start(cls, config: ServiceConfig) -> CoordinatorProcess:
        """Start it, continuing with its journal if there is one.

        Raises ``CoordinatorError`` if it does not serve. The record of one that was killed stays
        until this one writes its own: if this process is killed too, the next one finds it.
        """
        run_dir = Path(config.run_dir)
        log = run_dir / "logs" / "coordinator.log"
        try:
            child = start_configured(_MODULE, config, name=config.run, tied=False, output=log)
        except OSError as error:
            raise CoordinatorError(f"the coordinator cannot be started: {error}") from error
        records: list[ServiceRecord] = []

        def serves() -> bool:
            record = read_record(run_dir)
            records[:] = [record] if record is not None and record.pid == child.pid else []
            return bool(records)

        await_ready(child, serves, what="the coordinator", log=log, within_s=_START_S)
        started = cls(records[0], run_dir=run_dir)
        started._child = child
        return started

    @classmethod
    def found(cls, run_dir: Path, key: RunKey) -> CoordinatorProcess | None:
        """Return the one that serves in ``run_dir`` and knows ``key``, None if there is none.

        One that does not answer is ended.
        """
        if (record := read_record(run_dir)) is None:
            return None
        try:
            found = cls(record, run_dir=run_dir)
        except ProcessLookupError:
            return None
        if not found.alive:  # a zombie: whoever started it is gone or does not look
            os.close(found._pidfd)
            return None
        try:
            with contextlib.closing(
                connect(found.address, key, timeout_s=_ANSWER_S)
            ) as coordinator:
                coordinator.get(launcher_key(found.run))
        except CoordinatorError as error:
            _log.warning("%s: the coordinator of run %s: %s", run_dir, found.run, error)
            end_processes([record.pid], mark=found.mark)  # unless the number is another's by now
            os.close(found._pidfd)
            return None
        return found

    @property
    def mark(self) -> str:
        """A part of its command line."""
        return "\0".join((_MODULE, "--name", self.run))

    @property
    def job(self) -> str:
        """The identity of its job's command and options."""
        return self._record.job

    @property
    def alive(self) -> bool:
        """True until it exits."""
        return not readable([self._pidfd], 0)

    def close(self) -> None:
        """End it, and remove its files."""
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)
        if not readable([self._pidfd], _END_S):
            end_processes([self._record.pid], mark=self.mark)
        if self._child is not None:
            self._child.wait(_END_S)
        os.close(self._pidfd)
        for name in (RECORD, JOURNAL):
            (self._run_dir / name).unlink(missing_ok=True)


def read_record(run_dir: Path) -> ServiceRecord | None:
    """Return the record in ``run_dir``, None if there is no readable one."""
    try:
        return msgspec.json.decode((run_dir / RECORD).read_bytes(), type=ServiceRecord)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


learn(globals())
