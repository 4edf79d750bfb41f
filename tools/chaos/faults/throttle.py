"""Limits of processors and memory: a victim moves into a control group with a small quota."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import ClassVar, Final

from holdfast.tools.chaos.faults.cgroups import (
    ENABLED,
    LEAST,
    PROCESSES,
    Controller,
    Hierarchy,
    hierarchies,
)
from holdfast.tools.chaos.faults.injector import JobAccess, MissedError, Undo, Victim
from holdfast.tools.chaos.scenarios.scenario import ScenarioError
from holdfast.tools.chaos.scenarios.strikes import Strike

KINDS: Final = frozenset({"cpu-throttle"})
MEMORY_KINDS: Final = frozenset({"memory-limit"})

_LEAVES_S: Final = 5.0
_TICK_S: Final = 0.01

_REMEDY: Final = (
    "run it as root, or where systemd lends a cgroup: systemd-run --user --scope holdfast chaos "
    "run ...; in a container, mount /sys/fs/cgroup writable"
)


class LimitInjector:
    """An injector that moves victims into groups with a limit."""

    controller: ClassVar[Controller]
    usual: ClassVar[float]
    least: ClassVar[float]
    unit: ClassVar[str]

    def __init__(self, found: Callable[[], list[Hierarchy]] | None = None) -> None:
        """Create it; ``found`` returns the trees of groups, those of this machine by default."""
        self._found = found or self._of_this_machine
        self._groups: dict[Path, Path] = {}
        self._numbers = itertools.count()

    @property
    def groups(self) -> tuple[Path, ...]:
        """The groups that exist now because of this injector."""
        return tuple(self._groups)

    def prepare(self, site: JobAccess, strikes: tuple[Strike, ...]) -> Mapping[str, str]:
        """Find a place where groups can be made. Raises ``ScenarioError`` if there is none."""
        for strike in strikes:
            if self._amount(strike) < self.least:
                raise ScenarioError(
                    f"strike {strike.number} ({strike.kind}): amount is "
                    f"{self._amount(strike):g} {self.unit}; give {self.least:g} or more"
                )
        self._hierarchy, self._parent = self._place()
        return {}

    def strike(self, strike: Strike, victim: Victim, site: JobAccess) -> Undo | None:
        """Move the victim's processes, which share the quota, into a new group."""
        limits = self._hierarchy.limits(self._amount(strike))
        group = self._made(self._parent, limits, home=self._home(victim))
        moved = [_moved(pid, group) for pid in victim.pids]
        if not any(moved):
            self._removed(group)
            raise MissedError(f"{victim.name} has no process")
        return lambda: self._removed(group)

    def close(self) -> None:
        """Remove all groups."""
        for group in list(self._groups):
            self._removed(group)

    def _place(self) -> tuple[Hierarchy, Path]:
        """Return the first place where a group can be made, limited, and entered."""
        refused = [f"no cgroup with the {self.controller} controller is mounted"]
        for hierarchy in self._found():
            for parent in hierarchy.parents(_membership(os.getpid())):
                if why := self._refusal(hierarchy, parent):
                    refused.append(f"{parent}: {why}")
                else:
                    return hierarchy, parent
        kind = "cpu-throttle" if self.controller == "cpu" else "memory-limit"
        raise ScenarioError(f"{kind}: a cgroup cannot be made ({refused[-1]}): {_REMEDY}")

    def _refusal(self, hierarchy: Hierarchy, parent: Path) -> str:
        """Return the reason why no process can be limited below ``parent``, "" if one can."""
        try:
            enabled = (parent / ENABLED).read_text() if hierarchy.version == 2 else self.controller
            if self.controller not in enabled.split():
                return f"{self.controller} is not in its {ENABLED}"
            group = self._made(parent, hierarchy.limits(self.usual), home=parent)
            try:
                with subprocess.Popen(["sleep", "60"]) as tried:
                    try:
                        _moved(tried.pid, group)
                    finally:
                        tried.kill()
            finally:
                self._removed(group)
        except OSError as error:
            return str(error.strerror)
        return ""

    def _made(self, parent: Path, limits: Mapping[str, str], *, home: Path) -> Path:
        """Make a limited group; its processes return to the group ``home`` later."""
        group = parent / f"holdfast-{os.getpid()}-{next(self._numbers)}"
        group.mkdir()
        try:
            for name, text in limits.items():
                (group / name).write_text(text)
        except OSError:
            group.rmdir()
            raise
        self._groups[group] = home
        return group

    def _home(self, victim: Victim) -> Path:
        """Return the group of a victim."""
        for pid in victim.pids:
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                return self._hierarchy.group_of(_membership(pid)) or self._parent
        return self._parent

    def _removed(self, group: Path) -> None:
        """Move all processes of a group back, including those started in it, and remove it."""
        home = self._groups.pop(group, None)
        if home is None:
            return
        until_s = time.monotonic() + _LEAVES_S
        while True:
            for pid in _processes(group):
                _moved(pid, home)
            try:
                group.rmdir()
            except OSError:  # busy until the last process in it has ended
                if time.monotonic() > until_s:
                    raise
                time.sleep(_TICK_S)
            else:
                return

    def _amount(self, strike: Strike) -> float:
        return self.usual if strike.amount is None else strike.amount

    def _of_this_machine(self) -> list[Hierarchy]:
        return hierarchies(Path("/proc/self/mountinfo").read_text(), self.controller)


class ThrottleInjector(LimitInjector):
    """The injector of ``cpu-throttle``."""

    controller = "cpu"
    usual = 0.1
    least = LEAST
    unit = "processors"


class MemoryLimitInjector(LimitInjector):
    """The injector of ``memory-limit``."""

    controller = "memory"
    usual = 64.0
    least = 1.0
    unit = "MiB"


def _membership(pid: int) -> str:
    return Path(f"/proc/{pid}/cgroup").read_text()


def _processes(group: Path) -> Iterable[int]:
    return [int(line) for line in (group / PROCESSES).read_text().split()]


def _moved(pid: int, group: Path) -> bool:
    """Move a process with all its threads into a group; False if it is gone."""
    try:
        with (group / PROCESSES).open("a") as processes:
            processes.write(f"{pid}\n")
    except ProcessLookupError:
        return False
    return True
