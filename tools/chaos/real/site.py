"""The possible victims of a launched job: its nodes, and their agents, sidecars and workers."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

from holdfast.elastic.agent.reporting import NodeProcesses
from holdfast.elastic.launch.local import Launcher
from holdfast.tools.chaos.faults.environments import of_workers
from holdfast.tools.chaos.faults.injector import Victim
from holdfast.tools.chaos.real.jobs import alive
from holdfast.tools.chaos.real.launching.process import LauncherProcess
from holdfast.tools.chaos.scenarios.catalogue import Part

AnyLauncher: TypeAlias = Launcher | LauncherProcess
"""A launcher in this process, which cannot be hit, or in a process of its own."""


class LaunchedSite:
    """`JobAccess` to a launcher's job; ``folder`` is the run's own folder."""

    def __init__(self, launcher: AnyLauncher, folder: Path) -> None:
        self._launcher, self._folder = launcher, folder

    @property
    def folder(self) -> Path:
        """See `JobAccess`."""
        return self._folder

    @property
    def run(self) -> str:
        """See `JobAccess`."""
        return self._launcher.run

    @property
    def nodes(self) -> tuple[str, ...]:
        """See `JobAccess`."""
        return tuple(node.name for node in self._launcher.config.nodes)

    def lose(self, node: str, *, even_last: bool = False) -> bool:
        """See `JobAccess`."""
        if not even_last and set(self._processes()) <= {node}:
            return False
        return bool(self._launcher.lose_machine(node))

    def give_back(self, node: str) -> None:
        """See `JobAccess`."""
        if self._launcher.wait(0) is None:
            self._launcher.return_machine(node)

    def victims(self, part: Part) -> list[Victim]:
        """See `JobAccess`.

        A launcher and a coordinator have processes of their own only with ``return_s``; a store
        has none.
        """
        own = self._own()
        if part == "store" or (part == "coordinator" and not own):
            return [Victim(name=f"the {part}", part=part, pids=())]
        if part in ("launcher", "coordinator"):
            pids = tuple(alive([own.get(part, 0)]))
            return [Victim(name=f"the {part}", part=part, pids=pids)] if pids else []
        found = [
            each for node, there in self._processes().items() for each in of_node(node, there, part)
        ]
        if part == "job":
            pids = (*alive([*own.values()]), *(pid for each in found for pid in each.pids))
            return [Victim(name="the job", part="job", pids=pids)]
        return sorted(found, key=lambda each: each.name)

    def _own(self) -> dict[str, int]:
        """Return the processes of the job that are not a node's, if they are not in this one."""
        launcher = self._launcher
        if not isinstance(launcher, LauncherProcess):
            return {}
        return {"launcher": launcher.pid, "coordinator": launcher.coordinator_pid}

    def _processes(self) -> dict[str, NodeProcesses]:
        return self._launcher.processes()


def of_node(node: str, there: NodeProcesses, part: Part) -> list[Victim]:
    """Return the living victims of a part on a node."""

    def victim(name: str, *pids: int, seat: str = "") -> list[Victim]:
        left = tuple(alive(pids))
        return [Victim(name=name, part=part, pids=left, node=node, seat=seat)] if left else []

    if part == "worker":
        seats = there.workers.items()
        return [each for seat, pid in seats for each in victim(seat, pid, seat=seat)]
    if part == "environment":
        found = of_workers(there.workers)
        return [
            each for seat, pid in found for each in victim(f"environment {pid}", pid, seat=seat)
        ]
    if part == "sidecar":
        return victim(f"sidecar of {node}", there.sidecar)
    if part == "agent":
        return victim(f"agent of {node}", there.agent)
    return victim(f"node {node}", there.agent, there.sidecar, *there.workers.values())
