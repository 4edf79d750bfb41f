"""Execution of the drawn faults on a launched job, and the end of temporary ones."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Final

from holdfast.ckpt.memory.arena import ARENA_ROOT
from holdfast.tools.chaos.faults.bits import BitsInjector
from holdfast.tools.chaos.faults.environment import together
from holdfast.tools.chaos.faults.injector import Injector, MissedError, Undo, Victim
from holdfast.tools.chaos.faults.preloaded.clock import ClockInjector
from holdfast.tools.chaos.faults.preloaded.disk import DiskInjector
from holdfast.tools.chaos.faults.processes import Processes
from holdfast.tools.chaos.real.launching.process import LauncherProcess
from holdfast.tools.chaos.real.site import LaunchedSite
from holdfast.tools.chaos.scenarios.catalogue import Part
from holdfast.tools.chaos.scenarios.scenario import StrikeTarget, When
from holdfast.tools.chaos.scenarios.strikes import Strike
from holdfast.tools.chaos.soak.strokes import (
    KILLED_OF_JOB,
    OF_CLOCKS,
    OF_DISKS,
    SoakFault,
    SoakFaultKind,
)

_OF_PROCESSES: Final[dict[SoakFaultKind, tuple[str, Part]]] = {
    SoakFaultKind.KILL_WORKER: ("kill", "worker"),
    SoakFaultKind.KILL_SIDECAR: ("kill", "sidecar"),
    SoakFaultKind.KILL_AGENT: ("kill", "agent"),
    SoakFaultKind.KILL_NODE: ("kill", "node"),
    SoakFaultKind.LOSE_MACHINE: ("lose", "node"),
    SoakFaultKind.STOP_WORKER: ("stop", "worker"),
    SoakFaultKind.STOP_SIDECAR: ("stop", "sidecar"),
    SoakFaultKind.STOP_AGENT: ("stop", "agent"),
    SoakFaultKind.SLOW_SIDECAR: ("slow", "sidecar"),
    SoakFaultKind.KILL_LAUNCHER: ("kill", "launcher"),
    SoakFaultKind.KILL_COORDINATOR: ("kill", "coordinator"),
}
"""Fault of a soak → kind and part of a scenario's fault."""

_OF_BITS: Final[dict[SoakFaultKind, str]] = {
    SoakFaultKind.FLIP_SLOT: "flip-slot",
    SoakFaultKind.FLIP_PARITY: "flip-parity",
}
"""Fault of a soak → kind of a scenario's fault, which hits a node's memory even if it is dead."""

_FILL_EVERY_S: Final = 0.05


class SoakStriker:
    """Strikes one job; ``fills`` says whether its shared memory is private and may be filled.

    Faults of disks reach the files below ``folder``, except events and logs.
    """

    def __init__(self, launcher: LauncherProcess, folder: Path, *, fills: bool) -> None:
        self._launcher, self._fills = launcher, fills
        self._site = LaunchedSite(launcher, folder)
        self._processes, self._bits = Processes(), BitsInjector()
        self._preloaded: dict[SoakFaultKind, Injector] = {}
        self._away: dict[str, int] = {}
        self._passing: list[threading.Thread] = []
        self._over = threading.Event()
        self.count: Counter[str] = Counter()

    def prepare(self, kinds: Collection[SoakFaultKind]) -> Mapping[str, str]:
        """Prepare the kinds of disks and clocks; return the environment that the job needs.

        Raises ``ScenarioError`` if they are impossible on this machine: then they hit nothing.
        """
        families: tuple[tuple[Collection[SoakFaultKind], Injector], ...] = (
            (OF_CLOCKS, ClockInjector()),
            (OF_DISKS, DiskInjector()),
        )
        environment: dict[str, str] = {}
        for family, injector in families:
            if found := {kind: injector for kind in kinds if kind in family}:
                environment = together(environment, injector.prepare(self._site, ()))
                self._preloaded |= found
        return environment

    def strike(self, fault: SoakFault) -> bool:
        """Strike now; return whether there was something to hit."""
        ways: dict[SoakFaultKind, Callable[[SoakFault], bool]] = {
            SoakFaultKind.FLIP_SLOT: self._flip,
            SoakFaultKind.FLIP_PARITY: self._flip,
            SoakFaultKind.FILL_MEMORY: self._fill,
            SoakFaultKind.KILL_LAUNCHER: self._hit_job,
            SoakFaultKind.KILL_COORDINATOR: self._hit_job,
            **dict.fromkeys({*OF_CLOCKS, *OF_DISKS}, self._mislead),
        }
        with contextlib.suppress(MissedError, ProcessLookupError):
            if ways.get(fault.kind, self._hit)(fault):
                self.count[fault.kind] += 1
                return True
        return False

    def return_machines(self) -> list[str]:
        """Count a stroke; give back the machines that are due, and return their names."""
        back = [node for node, strokes in self._away.items() if strokes <= 1]
        self._away = {node: left - 1 for node, left in self._away.items() if left > 1}
        for node in back:
            self.count["a machine returns"] += 1
            self._site.give_back(node)
        return back

    def settle(self) -> None:
        """End all temporary faults now, and return every machine to the job."""
        self._over.set()
        for thread in self._passing:
            thread.join()
        self._processes.close()
        for node in self._away:
            self._site.give_back(node)

    def _hit(self, fault: SoakFault) -> bool:
        """Strike a process with the injector of scenarios."""
        kind, part = _OF_PROCESSES[fault.kind]
        victims = [each for each in self._site.victims(part) if each.node == fault.node]
        if not victims:
            return False
        strike = _strike(kind, part, fault)
        victim = victims[min(int(fault.pick * len(victims)), len(victims) - 1)]
        undo = self._processes.strike(strike, victim, self._site)
        if fault.kind is SoakFaultKind.LOSE_MACHINE:
            self._away[fault.node] = fault.strokes
        elif undo is not None:
            self._later(undo, fault.seconds)
        return True

    def _hit_job(self, fault: SoakFault) -> bool:
        """Kill the launcher or the coordinator, one at a time: neither while the other is down."""
        found = {part: self._site.victims(part) for part in KILLED_OF_JOB.values()}
        if not all(found.values()):
            return False
        kind, part = _OF_PROCESSES[fault.kind]
        self._processes.strike(_strike(kind, part, fault), found[part][0], self._site)
        if part == "launcher":
            self._launcher.returns(after_s=fault.seconds)
        return True

    def _mislead(self, fault: SoakFault) -> bool:
        """Change the disk or the wall clock that a node's processes, or all of the job, see."""
        part: Part = "job" if fault.kind is SoakFaultKind.JUMP_CLOCKS else "node"
        found = [each for each in self._site.victims(part) if each.node in ("", fault.node)]
        if fault.kind not in self._preloaded or not found:
            return False
        strike = _strike((OF_CLOCKS | OF_DISKS)[fault.kind], part, fault)
        undo = self._preloaded[fault.kind].strike(strike, found[0], self._site)
        if undo is not None:
            self._later(undo, fault.seconds)
        return True

    def _later(self, undo: Undo, seconds: float) -> None:
        def end() -> None:
            self._over.wait(seconds)
            undo()

        self._start(end)

    def _fill(self, fault: SoakFault) -> bool:
        if not self._fills:
            return False

        def fill() -> None:
            try:
                while not ended.is_set() and not self._over.is_set():
                    BALLAST.fill()
                    self._over.wait(_FILL_EVERY_S)
            finally:
                BALLAST.remove()

        ended = threading.Event()
        self._start(fill)
        self._later(ended.set, fault.seconds)
        return True

    def _start(self, work: Callable[[], None]) -> None:
        self._passing = [thread for thread in self._passing if thread.is_alive()]
        self._passing.append(threading.Thread(target=work, daemon=True))
        self._passing[-1].start()

    def _flip(self, fault: SoakFault) -> bool:
        """Flip a bit of a node's memory with the injector of scenarios."""
        holder = Victim(name=f"node {fault.node}", part="node", pids=(), node=fault.node)
        self._bits.strike(_strike(_OF_BITS[fault.kind], "node", fault), holder, self._site)
        return True


def _strike(kind: str, part: Part, fault: SoakFault) -> Strike:
    return Strike(
        number=0,
        kind=kind,
        target=StrikeTarget(part=part),
        when=When(s=0.0),
        pick=fault.pick,
        lasts_s=fault.seconds,
        amount=fault.amount,
    )


class Ballast:
    """A file that takes up the free space in shared memory."""

    def __init__(self) -> None:
        self._path, self._lock = ARENA_ROOT / "ballast", threading.Lock()

    def fill(self) -> None:
        """Take all space that is free now."""
        with self._lock, self._path.open("ab") as file, contextlib.suppress(OSError):
            if free := shutil.disk_usage(ARENA_ROOT).free:
                os.posix_fallocate(file.fileno(), file.tell(), free)

    def remove(self) -> None:
        """Release the space."""
        with self._lock:
            self._path.unlink(missing_ok=True)

    def others_bytes(self) -> int:
        """Return the bytes used by everything else."""
        with self._lock:
            own = self._path.stat().st_blocks * 512 if self._path.exists() else 0
            return shutil.disk_usage(ARENA_ROOT).used - own


BALLAST = Ballast()
