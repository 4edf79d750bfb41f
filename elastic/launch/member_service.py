"""A member of a managed etcd as a process of its own, which outlives the launcher.

The process runs the etcd program as its child and watches the launcher. A launcher that is started
again in the run directory finds it and takes it up. If none comes within ``return_s``, it ends the
member and removes its data: by then the other machines have replaced it. If the program or this
process is killed, the data stays, and the launcher starts the member with it again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Final

import msgspec

from holdfast.ckpt.descriptors import read_configuration
from holdfast.ckpt.owner import OwnerWatch
from holdfast.ckpt.types import learn
from holdfast.elastic.processes.children import Child, ChildChange, describe_exit
from holdfast.elastic.processes.log_files import bound

_RECORD: Final = "member.json"
_PID: Final = "pid"
_OWNER: Final = "owner"
_LOOK_S = 0.2
_END_S = 5.0
_log = logging.getLogger(__name__)


class MemberRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The member whose data is in the folder: its job, the name of its authority, its cluster.

    ``id`` is 0 while it is not known; ``endpoint`` is its own address for clients, ``endpoints``
    are those of all members when they changed last.
    """

    job: str
    authority: str
    token: str
    id: int = 0
    endpoint: str
    endpoints: tuple[str, ...] = ()


class MemberServiceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of a member's process: its folder, the command of etcd, and its log."""

    folder: str
    argv: tuple[str, ...]
    log: str
    return_s: float


def read_member(folder: Path) -> MemberRecord | None:
    """Return the record in a member's folder, None if there is no readable one."""
    try:
        return msgspec.json.decode((folder / _RECORD).read_bytes(), type=MemberRecord)
    except (OSError, msgspec.DecodeError):
        return None


def write_member(folder: Path, record: MemberRecord) -> None:
    """Write the record; it is whole whenever it can be seen."""
    _write(folder / _RECORD, msgspec.json.encode(record))


def read_member_pid(folder: Path) -> int:
    """Return the number of the process in a member's folder, 0 if there is none."""
    return _number(folder / _PID)


def own_member(folder: Path, pid: int) -> None:
    """Name the launcher for which the member runs."""
    _write(folder / _OWNER, str(pid).encode())


class MemberService:
    """Runs a member until told to stop, or until no launcher comes back."""

    def __init__(self, config: MemberServiceConfig) -> None:
        self._config, self._folder = config, Path(config.folder)
        self.stopped = threading.Event()
        self._owner, self._named = OwnerWatch(), -1
        env = {name: text for name, text in os.environ.items() if not name.startswith("ETCD_")}
        self._etcd = Child.start(config.argv, env=env, tied=True, output=Path(config.log))
        _write(self._folder / _PID, str(os.getpid()).encode())

    def serve(self) -> int:
        """Return the exit status: not 0 if etcd ended by itself, and then its data stays."""
        missed_s = time.monotonic()
        while not self.stopped.is_set():
            status = self._etcd.poll()
            if status and status.change is ChildChange.EXITED:
                how = describe_exit(status.code)
                _log.warning("%s has ended: %s", self._config.argv[0], how)
                return 1
            bound(Path(self._config.log))
            if self._owner_lives():
                missed_s = time.monotonic()
                continue
            if time.monotonic() - missed_s > self._config.return_s:
                break
            self.stopped.wait(_LOOK_S)
        self._end()
        return 0

    def _owner_lives(self) -> bool:
        if (named := _number(self._folder / _OWNER)) != self._named:
            self._named = named
            self._owner.follow(named)
        return self._owner.lives(_LOOK_S)

    def _end(self) -> None:
        self._etcd.signal(signal.SIGTERM)
        if self._etcd.wait(_END_S) is None:
            self._etcd.kill()
            self._etcd.wait(_END_S)
        shutil.rmtree(self._folder, ignore_errors=True)


def _write(path: Path, content: bytes) -> None:
    fresh = path.with_name(f"{path.name}.new")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(content)
    fresh.replace(path)


def _number(path: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text())
    return 0


def main() -> int:
    """Run an etcd member: ``--config-fd FD``."""
    config = read_configuration(
        MemberServiceConfig,
        prog="holdfast.elastic.launch.member_service",
        description=main.__doc__,
    )
    logging.basicConfig(format="%(asctime)s holdfast etcd member: %(message)s")
    try:
        service = MemberService(config)
    except OSError as error:
        sys.stderr.write(f"{config.argv[0]}: {error.strerror}\n")
        return 1
    signal.signal(signal.SIGTERM, lambda *_: service.stopped.set())
    return service.serve()


learn(globals())

if __name__ == "__main__":
    sys.exit(main())
