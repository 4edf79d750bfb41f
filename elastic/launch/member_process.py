"""The launcher's side of an etcd member that is a process of its own: start, find, watch, end."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from pathlib import Path
from typing import Final

from holdfast.ckpt.descriptors import readable
from holdfast.elastic.errors import CoordinatorError
from holdfast.elastic.launch.member_service import (
    MemberServiceConfig,
    own_member,
    read_member_pid,
)
from holdfast.elastic.processes.children import Child, end_processes
from holdfast.elastic.processes.configured import await_ready, start_configured

_MODULE: Final = "holdfast.elastic.launch.member_service"
_START_S = 60.0
_END_S = 8.0


class MemberProcess:
    """A running member of the cluster ``token``, whose data is in ``folder``."""

    def __init__(self, folder: Path, pid: int, *, token: str) -> None:
        """Raises ``ProcessLookupError`` if it has ended."""
        self._folder, self._pid = folder, pid
        self._mark = f"{_MODULE}\0--name\0{token}"
        self._pidfd = os.pidfd_open(pid)
        self._child: Child | None = None

    @classmethod
    def start(cls, config: MemberServiceConfig, *, token: str) -> MemberProcess:
        """Start it. Raises ``CoordinatorError`` if that fails."""
        folder, log = Path(config.folder), Path(config.log)
        own_member(folder, os.getpid())
        try:
            child = start_configured(_MODULE, config, name=token, tied=False, output=log)
        except OSError as error:
            raise CoordinatorError(f"an etcd member cannot be started: {error}") from error
        await_ready(
            child,
            lambda: read_member_pid(folder) == child.pid,
            what="an etcd member",
            log=log,
            within_s=_START_S,
        )
        started = cls(folder, child.pid, token=token)
        started._child = child
        return started

    @classmethod
    def found(cls, folder: Path, *, token: str) -> MemberProcess | None:
        """Take up the member that a killed launcher has left, None if there is none."""
        pid = read_member_pid(folder)
        try:
            found = cls(folder, pid, token=token) if pid > 0 else None
        except OSError:
            return None
        if found is None:
            return None
        own_member(folder, os.getpid())
        with contextlib.suppress(OSError):
            if found.alive and found._mark.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                return found
        os.close(found._pidfd)
        return None

    @property
    def alive(self) -> bool:
        """True until it exits."""
        if self._child is not None:
            self._child.poll()  # reaps it
        return not readable([self._pidfd], 0)

    def close(self) -> None:
        """End it, and remove its folder."""
        self.kill(orderly=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self, *, orderly: bool = False) -> None:
        """End it; its data stays, unless it is told to end in order."""
        if orderly:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)
            readable([self._pidfd], _END_S)
        if not readable([self._pidfd], 0):
            end_processes([self._pid], mark=self._mark)
        if self._child is not None:
            self._child.wait(_END_S)
        os.close(self._pidfd)
