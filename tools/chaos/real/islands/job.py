"""A job of several runs of Holdfast: islands, or policies. They meet in one folder."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.elastic.launch.config import APART_TIMING
from holdfast.tools.chaos.faults.injector import Victim
from holdfast.tools.chaos.judging.record import Told, time_of
from holdfast.tools.chaos.real.jobs import Ending, JobFolders, new_mark
from holdfast.tools.chaos.real.launched import HoldfastJob
from holdfast.tools.chaos.scenarios.scenario import CAST, SEA

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.tools.chaos.scenarios.catalogue import Part
    from holdfast.tools.chaos.scenarios.scenario import Workload

_WHOLE: Final = ("island", "policy")
"""Parts that stand for all nodes of a run."""


class ChaosIsland:
    """One island, or policy: its run, and after a loss the next run of the same command.

    Each run has a folder of the history of its own, by its number; the folder that it works in
    stays, with its checkpoints.
    """

    def __init__(
        self, name: str, workload: Workload, place: JobFolders, *, source: Path, mark: str
    ) -> None:
        self.name = name
        self._workload, self._source, self._mark = workload, source, mark
        self._history, self._folder = place.history / name, place.folder
        self._work = place.work / name
        self._runs = 0
        self._told: list[Told] = []
        self.job: HoldfastJob | None = None
        self.nodes = tuple(f"{name}/{node}" for node in workload.nodes)

    def start(self, env: Mapping[str, str]) -> None:
        """Begin the next run."""
        self._runs += 1
        history = self._history / str(self._runs)
        for path in (history, self._work):
            path.mkdir(parents=True, exist_ok=True)
        place = JobFolders(folder=self._folder, history=history, work=self._work)
        # many processes make a machine busy: leases are long; launchers see ends at once
        job = HoldfastJob(self._workload, place, source=self._source, timing=APART_TIMING)
        job.mark = self._mark
        job.start(env)
        self.job = job

    def events(self) -> list[Told]:
        """Return the reports since the last call."""
        told, self._told = self._told, []
        return [*told, *(self.job.events() if self.job else ())]

    def lose(self) -> bool:
        """End the run at one blow, with all its memory; False if there is none."""
        job = self.job
        if job is None or job.ending() is not None:
            return False
        for each in job.victims("node"):
            for pid in each.pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._told += job.events()
        job.end()
        self.job = None
        return True

    def victims(self, part: Part) -> list[Victim]:
        """Return the living victims; their names and nodes begin with the island's."""
        if self.job is None or self.job.ending() is not None:
            return []
        if part in _WHOLE:
            pids = tuple(pid for each in self.job.victims("node") for pid in each.pids)
            here = Victim(name=f"{part} {self.name}", part=part, pids=pids, node=self.name)
            return [here] if pids else []
        return [
            msgspec.structs.replace(
                each, name=f"{self.name}: {each.name}", node=f"{self.name}/{each.node}"
            )
            for each in self.job.victims(part)
        ]


class IslandsJob:
    """A `RealJob` of several runs. A node has the name of its run before its own, as in oslo/a.

    All calls but `give_back` are for the thread that started it.
    """

    run = coordinator = ""

    def __init__(self, workload: Workload, place: JobFolders, *, source: Path) -> None:
        self.mark, self._place = new_mark(), place
        self._env: Mapping[str, str] = {}
        self._one = "island" if workload.islands else "policy"
        self._due = [name for name in workload.runs if name not in workload.absent]
        self._islands = {
            name: ChaosIsland(
                name,
                workload_of(workload, name, work=place.work.absolute()),
                place,
                source=source,
                mark=self.mark,
            )
            for name in workload.runs
        }

    @property
    def folder(self) -> Path:
        """See `JobAccess`."""
        return self._place.folder

    @property
    def nodes(self) -> tuple[str, ...]:
        """See `JobAccess`."""
        return tuple(node for each in self._islands.values() for node in each.nodes)

    def start(self, env: Mapping[str, str]) -> None:
        """See `RealJob`."""
        self._env = env
        self._begin()

    def _begin(self) -> None:
        """Start the islands that are due."""
        while self._due:
            island = self._islands[self._due.pop(0)]
            if island.job is None:
                island.start(self._env)

    def events(self) -> list[Told]:
        """See `RealJob`."""
        return sorted((e for each in self._islands.values() for e in each.events()), key=time_of)

    def ending(self) -> Ending | None:
        """See `RealJob`; the first island that fails ends all."""
        self._begin()
        running = {name: each.job for name, each in self._islands.items() if each.job is not None}
        found = {name: job.ending() for name, job in running.items()}
        for name, ending in found.items():
            if ending is not None and not ending.ok:
                self.end()  # else the others wait for it
                return Ending(ok=False, message=f"{self._one} {name}: {ending.message}")
        if None in found.values():
            return None
        return Ending(ok=True, message="all runs have ended")

    def struck(self, part: str) -> None:
        """Do nothing: the launchers are in this process, which no strike hits."""

    def workers(self) -> list[int]:
        """See `RealJob`."""
        return [pid for job in self._jobs() for pid in job.workers()]

    def output(self) -> str:
        """See `RealJob`."""
        return "".join(job.output() for job in self._jobs())

    def end(self) -> None:
        """See `RealJob`."""
        for job in self._jobs():
            job.end()

    def _jobs(self) -> Iterator[HoldfastJob]:
        return (each.job for each in self._islands.values() if each.job is not None)

    def lose(self, node: str, *, even_last: bool = False) -> bool:
        """See `JobAccess`; ``node`` may be an island: all its machines vanish, and its run ends.

        The next begins when it is given back.
        """
        island = self._islands.get(node)
        if island is not None:
            return island.lose()
        name, _, own = node.partition("/")
        job = self._islands[name].job
        return job is not None and job.lose(own, even_last=even_last)

    def give_back(self, node: str) -> None:
        """See `JobAccess`; an absent island begins with all its nodes."""
        name, _, own = node.partition("/")
        job = self._islands[name].job
        if job is None:
            self._due.append(name)  # in the thread that its agents shall live as long as
        elif own:
            job.give_back(own)

    def victims(self, part: Part) -> list[Victim]:
        """See `JobAccess`."""
        if part == "job":
            pids = [pid for job in self._jobs() for each in job.victims("job") for pid in each.pids]
            return [Victim(name="the job", part=part, pids=tuple(pids))]
        return [victim for each in self._islands.values() for victim in each.victims(part)]


def workload_of(workload: Workload, name: str, *, work: Path) -> Workload:
    """Return the workload of one run, which meets the others below ``work``. Pure."""
    if workload.policies:
        words = ("--policy", name, "--join", str(work / CAST))
        return msgspec.structs.replace(
            workload,
            command=(*workload.command, *words),
            nodes={**workload.nodes, **workload.policies[name]},
            policies={},
        )
    settings: dict[str, Any] = dict(workload.settings)
    settings["islands"] = {**settings.get("islands", {}), "name": name, "meet": str(work / SEA)}
    return msgspec.structs.replace(
        workload,
        command=(*workload.command, *workload.islands[name]),
        settings=settings,
        islands={},
        absent=(),
    )
