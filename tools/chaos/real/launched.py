"""A Holdfast job as the victim: nodes on this machine with agents, sidecars and workers."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from holdfast.elastic.agent.config import AgentTiming
from holdfast.elastic.events.log import EVENTS_PATTERN, EventReader
from holdfast.elastic.launch.config import (
    APART_TIMING,
    EMBEDDED,
    ETCD_TIMING,
    LOCAL_TIMING,
    LaunchConfig,
    NodeSpec,
)
from holdfast.elastic.launch.local import Launcher
from holdfast.elastic.preload.program import PRELOAD_ENV, module_names
from holdfast.tools.chaos.judging.record import Told
from holdfast.tools.chaos.real.jobs import Ending, JobFolders, argv, environment, new_mark
from holdfast.tools.chaos.real.launching.process import LauncherProcess
from holdfast.tools.chaos.real.site import LaunchedSite
from holdfast.tools.chaos.scenarios.scenario import COORDINATOR_ENV, ScenarioError, Workload

_END_S: Final = 60.0
MANY: Final = 10_000
"""Restarts of a node or worker: effectively unlimited, as faults are not the job's own failures."""

_OF_INTERPRETERS: Final = "PYTHONPATH"
_WITH_LAUNCHER: Final = ("launcher", "job")


class HoldfastJob(LaunchedSite):
    """A `RealJob` that Holdfast's own launcher runs.

    ``timing`` is that of its agents; None: as the coordinator needs it.
    """

    def __init__(
        self,
        workload: Workload,
        place: JobFolders,
        *,
        source: Path,
        timing: AgentTiming | None = None,
    ) -> None:
        self.mark, self._place = new_mark(), place
        self._workload, self._source, self._timing = workload, source, timing
        config = self._config({})
        launcher = LauncherProcess(config) if workload.return_s else Launcher(config)
        super().__init__(launcher, place.folder)
        self._reader = EventReader(self._launcher.run_dir)

    def _config(self, env: Mapping[str, str]) -> LaunchConfig:
        load = self._workload
        spares = tuple(f"spare-{number}" for number in range(load.spares))
        nodes = {**load.nodes, **dict.fromkeys(spares, next(iter(load.nodes.values())))}
        roles = Counter[str]()
        for slots in load.nodes.values():
            roles.update(slots)
        address = EMBEDDED
        if load.coordinator != EMBEDDED:
            address = env.get(COORDINATOR_ENV, os.environ.get(COORDINATOR_ENV, EMBEDDED))
        return LaunchConfig(
            command=argv(load, self._place, source=self._source),
            nodes=tuple(
                NodeSpec(name=name, domain=load.domains.get(name, name), slots=slots)
                for name, slots in nodes.items()
            ),
            absent=frozenset(spares),
            apart=load.apart,
            wanted=load.wanted or dict(roles),
            settings=load.settings,
            run_dir=self._place.work / "run",
            coordinator=address,
            capture_output=True,
            max_attempts=MANY,
            node_restarts=MANY,
            timing=self._timing or _timing(load, address),
            return_s=load.return_s,
            preload=_preload(env),
            agent_env=environment(load, self._place, source=self._source, mark=self.mark, more=env),
        )

    @property
    def coordinator(self) -> str:
        """See `RealJob`."""
        return self._launcher.config.coordinator

    def start(self, env: Mapping[str, str]) -> None:
        """See `RealJob`."""
        config = self._config(env)
        if self._workload.coordinator != config.coordinator == EMBEDDED:
            raise ScenarioError(
                f"workload.coordinator is {self._workload.coordinator}: name a running one in the "
                f"environment, as in {COORDINATOR_ENV}=etcd://127.0.0.1:2379"
            )
        self._launcher.config = config
        self._launcher.start()

    def events(self) -> list[Told]:
        """See `RealJob`."""
        return [*self._reader.new()]

    def ending(self) -> Ending | None:
        """See `RealJob`."""
        outcome = self._launcher.wait(0)
        return Ending(ok=outcome.ok, message=outcome.message) if outcome else None

    def struck(self, part: str) -> None:
        """Have a killed launcher started again; it restarts all other parts."""
        if part in _WITH_LAUNCHER and isinstance(self._launcher, LauncherProcess):
            self._launcher.returns(after_s=0.0)

    def workers(self) -> list[int]:
        """See `RealJob`."""
        return [pid for node in self._processes().values() for pid in node.workers.values()]

    def output(self) -> str:
        """See `RealJob`."""
        logs = sorted((self._launcher.run_dir / "logs").iterdir())
        return "".join(path.read_text(errors="replace") for path in logs)

    def end(self) -> None:
        """See `RealJob`."""
        self._launcher.kill()
        self._launcher.wait(_END_S)
        for path in self._launcher.run_dir.glob(EVENTS_PATTERN):
            shutil.copy(path, self._place.history)


def _preload(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the modules to import once; none for faults that start with a worker's interpreter."""
    if _OF_INTERPRETERS in env:
        return ()
    return module_names(os.environ.get(PRELOAD_ENV, ""), option=PRELOAD_ENV)


def _timing(workload: Workload, address: str) -> AgentTiming:
    if address != EMBEDDED:
        return ETCD_TIMING
    return APART_TIMING if workload.return_s else LOCAL_TIMING
