"""The embedded coordinator as a process of its own, which outlives the launcher that started it.

It also holds the memory of the launcher's nodes, which the launcher can take away from it by a
removal. A launcher that is started again with the same run directory finds its record, takes it up,
and the job continues from the memory. If none comes within ``return_s``, the service ends, and the
memory goes with it. If the service is killed as well, its journal and the memory stay for that
time, and the next launcher starts the service again.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path

import msgspec

from holdfast.ckpt.errors import UnsafePathError
from holdfast.ckpt.memory import kept
from holdfast.ckpt.memory.arena import arena_path, arenas_of, hold_existing, is_held, sweep
from holdfast.ckpt.owner import OwnerWatch
from holdfast.ckpt.transport import RunKey
from holdfast.ckpt.types import learn
from holdfast.elastic.coordinator.embedded import EmbeddedServer

JOURNAL = "coordinator.journal"
"""File of the served table, in the run directory."""

RECORD = "coordinator.json"
"""File by which a launcher finds the service, in the run directory."""

_LOOK_S = 0.1
_KEEP_EVERY_S = 1.0
_log = logging.getLogger(__name__)


class ServiceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of the service of one run on this machine.

    ``job`` identifies the launcher's command and options.
    """

    run: str
    job: str
    run_dir: str
    key_file: str
    bind: str
    return_s: float


class ServiceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The file `RECORD`: the running service, and the job that it serves."""

    run: str
    job: str
    pid: int
    address: str


class LauncherRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The process id of a run's launcher, which it writes at the service, and its nodes.

    ``number`` is its number among several launchers of the job, -1 before it has one.
    """

    pid: int
    nodes: tuple[str, ...] = ()
    number: int = -1


def launcher_key(run: str) -> str:
    """Return the key under which a run's launcher writes its `LauncherRecord`."""
    return f"launchers/{run}"


def drop_memory(run: str) -> None:
    """Remove the memory of the run's nodes on this machine, unless a process holds it."""
    for directory in arenas_of(run):
        kept.give_up(directory)
        sweep(exactly=directory.name)


class Service:
    """Serves a run's coordinator until told to stop, or until no launcher comes back.

    Raises ``CoordinatorError`` if the address or the journal cannot be used.
    """

    def __init__(self, config: ServiceConfig) -> None:
        self._config = config
        self.stopped = threading.Event()
        self._arenas: dict[str, int] = {}
        self._launcher, self._owner = LauncherRecord(pid=0), OwnerWatch()
        self._written = ""
        self._kept_s = 0.0
        run_dir = Path(config.run_dir)
        key = RunKey.load(Path(config.key_file))
        self._server = EmbeddedServer(
            key, bind=config.bind, journal=run_dir / JOURNAL, goes_on=True
        )
        self._write_record(run_dir)

    def _write_record(self, run_dir: Path) -> None:
        record = ServiceRecord(
            run=self._config.run,
            job=self._config.job,
            pid=os.getpid(),
            address=self._server.address,
        )
        fresh = run_dir / f"{RECORD}.new"
        fresh.touch(mode=0o600)
        fresh.write_bytes(msgspec.json.encode(record))
        fresh.replace(run_dir / RECORD)

    def serve(self) -> None:
        """Serve; on return the memory that was held is removed unless others hold it."""
        missed_s = time.monotonic()
        while not self.stopped.is_set():
            self._hold()
            if self._launcher_lives():
                missed_s = time.monotonic()
                self._keep()
                continue
            if time.monotonic() - missed_s > self._config.return_s:
                _log.warning("no launcher came back within %g s", self._config.return_s)
                break
            self.stopped.wait(_LOOK_S)
        self._forget()

    def _launcher_lives(self) -> bool:
        """Wait a moment; return whether the launcher that wrote its number last is alive."""
        written = self._server.value(launcher_key(self._config.run)) or ""
        if written != self._written:
            self._written, self._launcher = written, self._read(written)
            self._owner.follow(self._launcher.pid)
        return self._owner.lives(_LOOK_S)

    def _read(self, written: str) -> LauncherRecord:
        try:
            found = msgspec.json.decode(written, type=LauncherRecord)
            for node in found.nodes:
                arena_path(self._config.run, node)
        except (ValueError, RecursionError, UnsafePathError) as error:
            _log.warning("no launcher's record is at %s: %s", launcher_key(self._config.run), error)
            return LauncherRecord(pid=0)
        return found

    def _hold(self) -> None:
        """Hold the memory that is there now."""
        for node in self._launcher.nodes:
            directory = arena_path(self._config.run, node)
            if not is_held(directory, self._arenas.get(node, -1)):
                self._let_go(node)
                self._arenas[node] = hold_existing(directory)
                self._kept_s = 0.0

    def _keep(self) -> None:
        """Let the memory stay for the time of a return even if this process is killed too."""
        if time.monotonic() - self._kept_s < _KEEP_EVERY_S:
            return
        self._kept_s = time.monotonic()
        for node, fd in self._arenas.items():
            if fd >= 0:
                kept.keep(arena_path(self._config.run, node), seconds=self._config.return_s)

    def _forget(self) -> None:
        """Stop, and give up what a later launcher would take up: the record and the memory."""
        (Path(self._config.run_dir) / RECORD).unlink(missing_ok=True)
        self._server.close()
        for node in [*self._arenas]:
            self._let_go(node)
        drop_memory(self._config.run)

    def _let_go(self, node: str) -> None:
        if (fd := self._arenas.pop(node, -1)) >= 0:
            os.close(fd)


learn(globals())
