"""Faults of environment processes: garbage on their connection, and no more memory."""

from __future__ import annotations

import contextlib
import resource
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from holdfast.tools.chaos.faults.injector import JobAccess, MissedError, Undo, Victim
from holdfast.tools.chaos.faults.network.sockets import borrow, sockets_of
from holdfast.tools.chaos.scenarios.strikes import Strike

KINDS: Final = frozenset({"environment-garbage", "environment-memory"})

_MODULE: Final = b"holdfast.adapters.rl.environments.processes"
_GARBAGE: Final = b"neither head nor tail"
_PARENT, _GROUP, _SESSION = 1, 2, 3  # fields of /proc/PID/stat behind the name
_DEEPEST: Final = 8


class EnvironmentInjector:
    """The injector of the kinds in `KINDS`; nothing of the processes' code is changed."""

    def prepare(self, site: JobAccess, strikes: tuple[Strike, ...]) -> Mapping[str, str]:
        """Do nothing: no preparation is needed."""
        return {}

    def strike(self, strike: Strike, victim: Victim, site: JobAccess) -> Undo | None:
        """See `Injector`."""
        (pid,) = victim.pids
        hit = _garble if strike.kind == "environment-garbage" else _starve
        if not hit(pid):
            raise MissedError(f"{victim.name} has ended")
        return None

    def close(self) -> None:
        """Do nothing: there is nothing to clean up."""


def of_workers(workers: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return (seat of the worker, process) of the environment processes of these workers."""
    seats = {pid: seat for seat, pid in workers.items()}
    stats = dict(_stats())
    found = []
    for pid, (_, group, session) in stats.items():
        if group != pid or session == pid:
            continue  # each is the first of a process group, and none of a session
        at = pid
        for _ in range(_DEEPEST):
            at = stats[at][0] if at in stats else 0
            if at in seats:
                found.append((seats[at], pid))
                break
    return sorted((seat, pid) for seat, pid in found if _MODULE in _command(pid))


def _stats() -> Iterator[tuple[int, tuple[int, int, int]]]:
    """Yield (process, (its parent, group, session)) of all processes."""
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            with contextlib.suppress(OSError):  # it has ended
                fields = (path / "stat").read_text().rpartition(")")[2].split()
                parent, group, session = map(int, fields[_PARENT : _SESSION + 1])
                yield int(path.name), (parent, group, session)


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _garble(pid: int) -> bool:
    """Write garbage into the sockets of a process, as if it did so itself."""
    is_hit = False
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for fd in sockets_of(pid):
            if (own := borrow(pid, fd)) is None:
                continue
            with socket.socket(fileno=own) as found, contextlib.suppress(OSError):
                found.send(_GARBAGE, socket.MSG_DONTWAIT)
                is_hit = True
    return is_hit


def _starve(pid: int) -> bool:
    """Limit a process's memory to what it has now."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
        limit = pages * resource.getpagesize()
        resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))
    except (FileNotFoundError, ProcessLookupError):
        return False
    return True
