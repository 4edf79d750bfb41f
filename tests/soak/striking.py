"""Does the harm that was drawn to a launched job, and undoes what passes."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from faults import Fault, Kind

from ckpt.arena import ARENA_ROOT, arena_path
from elastic.agent.reporting import NodeProcesses
from elastic.launch import Launcher

_STOPPED_S, _RUNS_S = 0.08, 0.02
"""A slowed process runs a fifth of the time."""

_FILL_EVERY_S = 0.05


class Striker:
    """Strikes one job; ``fills`` says whether its shared memory is its own, to be filled."""

    def __init__(self, launcher: Launcher, *, fills: bool) -> None:
        self._launcher, self._fills = launcher, fills
        self._away: dict[str, int] = {}
        self._passing: list[threading.Thread] = []
        self._over = threading.Event()
        self.count: Counter[str] = Counter()
        self._ways: dict[Kind, Callable[[Fault, NodeProcesses], bool]] = {
            Kind.KILL_WORKER: lambda fault, found: self._kill(one_of(found.workers, fault)),
            Kind.KILL_SIDECAR: lambda _, found: self._kill([found.sidecar]),
            Kind.KILL_AGENT: lambda _, found: self._kill([found.agent]),
            Kind.KILL_NODE: lambda _, found: self._kill(
                [found.agent, found.sidecar, *found.workers.values()]
            ),
            Kind.LOSE_MACHINE: self._lose_machine,
            Kind.STOP_WORKER: lambda fault, found: self._stop(one_of(found.workers, fault), fault),
            Kind.STOP_SIDECAR: lambda fault, found: self._stop([found.sidecar], fault),
            Kind.STOP_AGENT: lambda fault, found: self._stop([found.agent], fault),
            Kind.SLOW_SIDECAR: self._slow,
            Kind.FLIP_SLOT: lambda fault, _: self._flip("*.slot", fault),
            Kind.FLIP_PARITY: lambda fault, _: self._flip("*.row", fault),
            Kind.FILL_MEMORY: self._fill,
        }

    def strike(self, fault: Fault) -> bool:
        """Do it; return whether there was something to hit."""
        found = self._launcher.processes().get(fault.node)
        if found is None:
            return False
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            if self._ways[fault.kind](fault, found):
                self.count[fault.kind] += 1
                return True
        return False

    def return_machines(self) -> list[str]:
        """Count a stroke; have the machines return whose time has come, and return their names."""
        back = [node for node, strokes in self._away.items() if strokes <= 1]
        self._away = {node: left - 1 for node, left in self._away.items() if left > 1}
        for node in back:
            self.count["a machine returns"] += 1
            self._launcher.return_machine(node)
        return back

    def settle(self) -> None:
        """Undo what passes now, and have every machine return."""
        self._over.set()
        for thread in self._passing:
            thread.join()
        for node in self._away:
            self._launcher.return_machine(node)

    def _kill(self, pids: Iterable[int]) -> bool:
        hit = False
        for pid in filter(None, pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                hit = True
        return hit

    def _lose_machine(self, fault: Fault, found: NodeProcesses) -> bool:
        if len(self._launcher.processes()) < 2:
            return False  # somebody must be there to go on
        lost = bool(self._launcher.lose_machine(fault.node))
        if lost:
            self._away[fault.node] = fault.strokes
        return lost

    def _stop(self, pids: Iterable[int], fault: Fault) -> bool:
        return self._pause(pids, fault, runs_s=0.0, stopped_s=fault.seconds)

    def _slow(self, fault: Fault, found: NodeProcesses) -> bool:
        return self._pause([found.sidecar], fault, runs_s=_RUNS_S, stopped_s=_STOPPED_S)

    def _pause(self, pids: Iterable[int], fault: Fault, *, runs_s: float, stopped_s: float) -> bool:
        """Stop processes again and again until the fault has passed or they are gone."""
        fds = [os.pidfd_open(pid) for pid in filter(None, pids)]
        end_s = time.monotonic() + fault.seconds

        def pause() -> None:
            with contextlib.suppress(ProcessLookupError):  # its agent put it down
                while time.monotonic() < end_s and not self._over.is_set():
                    send(fds, signal.SIGSTOP)
                    try:
                        self._over.wait(stopped_s)
                    finally:
                        send(fds, signal.SIGCONT)
                    self._over.wait(runs_s)
            for fd in fds:
                os.close(fd)

        self._start(pause)
        return bool(fds)

    def _fill(self, fault: Fault, found: NodeProcesses) -> bool:
        if not self._fills:
            return False
        end_s = time.monotonic() + fault.seconds

        def fill() -> None:
            try:
                while time.monotonic() < end_s and not self._over.is_set():
                    BALLAST.fill()
                    self._over.wait(_FILL_EVERY_S)
            finally:
                BALLAST.remove()

        self._start(fill)
        return True

    def _start(self, work: Callable[[], None]) -> None:
        self._passing = [thread for thread in self._passing if thread.is_alive()]
        self._passing.append(threading.Thread(target=work, daemon=True))
        self._passing[-1].start()

    def _flip(self, pattern: str, fault: Fault) -> bool:
        paths = sorted(arena_path(self._launcher.run, fault.node).glob(pattern))
        if not paths:
            return False
        flip(paths[int(fault.pick * len(paths))], at=fault.pick * len(paths) % 1)
        return True


class Ballast:
    """A file that takes what is free in shared memory."""

    def __init__(self) -> None:
        self._path, self._lock = ARENA_ROOT / "ballast", threading.Lock()

    def fill(self) -> None:
        """Take all that is free now."""
        with self._lock, self._path.open("ab") as file, contextlib.suppress(OSError):
            if free := shutil.disk_usage(ARENA_ROOT).free:
                os.posix_fallocate(file.fileno(), file.tell(), free)

    def remove(self) -> None:
        """Give it back."""
        with self._lock:
            self._path.unlink(missing_ok=True)

    def others_bytes(self) -> int:
        """Return what is taken by everything else."""
        with self._lock:
            own = self._path.stat().st_blocks * 512 if self._path.exists() else 0
            return shutil.disk_usage(ARENA_ROOT).used - own


BALLAST = Ballast()


def one_of(workers: dict[str, int], fault: Fault) -> list[int]:
    """Return the worker that was picked, if there is any."""
    seats = sorted(workers)
    return [workers[seats[int(fault.pick * len(seats))]]] if seats else []


def send(fds: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to processes that may have ended, none to whoever took their numbers."""
    for fd in fds:
        signal.pidfd_send_signal(fd, number)


def flip(path: Path, *, at: float) -> None:
    """Flip one bit of a file at a share ``at`` of its length."""
    with path.open("r+b") as file:
        place = int(at * path.stat().st_size)
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1 << int(at * 10**6) % 8]))
