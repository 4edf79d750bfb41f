"""A job of several launchers, each of which stands for a machine, that run its etcd themselves."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from holdfast.ckpt.memory.arena import arena_path, take_away
from holdfast.ckpt.transport import RunKey
from holdfast.elastic.agent.reporting import NodeProcesses
from holdfast.elastic.coordinator.etcd.address import MANAGED, EtcdAddress
from holdfast.elastic.coordinator.managed.authority import Authority
from holdfast.elastic.coordinator.managed.cluster import MembersAdmin
from holdfast.elastic.coordinator.managed.command import FOLDER
from holdfast.elastic.coordinator.managed.program import etcd_program
from holdfast.elastic.decisions.etcd_members import wanted_voters
from holdfast.elastic.errors import CoordinatorError
from holdfast.elastic.events import StepDone, UserEvent
from holdfast.elastic.events.log import EVENTS_PATTERN, EventReader
from holdfast.elastic.launch.config import ETCD_TIMING, LaunchConfig, NodeSpec
from holdfast.elastic.launch.joint import JointConfig
from holdfast.elastic.launch.member_service import read_member, read_member_pid
from holdfast.elastic.processes.children import end_processes
from holdfast.elastic.rendezvous.link import CoordinatorPlace
from holdfast.tools.chaos.faults.injector import Victim
from holdfast.tools.chaos.hooks import GATE
from holdfast.tools.chaos.judging.record import Told, time_of
from holdfast.tools.chaos.real.jobs import (
    Ending,
    JobFolders,
    alive,
    argv,
    environment,
    new_mark,
)
from holdfast.tools.chaos.real.launched import MANY
from holdfast.tools.chaos.real.launching.messages import ManagedPart
from holdfast.tools.chaos.real.launching.process import LauncherProcess
from holdfast.tools.chaos.real.site import of_node
from holdfast.tools.chaos.scenarios.catalogue import Part
from holdfast.tools.chaos.scenarios.scenario import Workload
from holdfast.tools.environment import children
from holdfast.tools.leftovers import processes_of
from holdfast.tools.ports import free_ports

_END_S: Final = 60.0
_DIE_S: Final = 5.0
_DYING_S: Final = 1.0
_POLL_S: Final = 0.01
_RETURN_S: Final = 60.0
_ASK_S: Final = 1.0
REPLICATED: Final = "etcd_replicated"
"""The event of such a job once it trains and its etcd has all its voters: one may be lost then."""


class ManagedMachine:
    """The launcher of one machine: it is killed and started again, or lost with everything there.

    ``history`` is the folder that keeps the events of each launcher.
    """

    def __init__(self, config: LaunchConfig, part: ManagedPart, *, history: Path) -> None:
        self.launcher = LauncherProcess(config, part)
        (self.node,) = (spec.name for spec in config.nodes)
        self.is_lost = False
        self._history, self._kept = history, 0
        self._reader = EventReader(self.launcher.run_dir)
        self._told: list[Told] = []
        self._is_due = False

    @property
    def processes(self) -> NodeProcesses | None:
        """The processes of the node, None while its agent does not live."""
        return None if self.is_lost else self.launcher.processes().get(self.node)

    @property
    def member(self) -> list[int]:
        """The processes of its etcd member: the one that watches it, then etcd; none without it."""
        watcher = 0 if self.is_lost else read_member_pid(self.launcher.run_dir / FOLDER)
        return alive([watcher, *children(watcher)])

    def events(self) -> list[Told]:
        """Return the reports since the last call."""
        told, self._told = self._told, []
        return [*told, *self._reader.new()]

    def look(self) -> Ending | None:
        """Return the ending that the launcher saw; start one that was killed again."""
        if self._is_due:
            self._is_due = False
            self._begin()
        outcome = self.launcher.wait(0)
        return Ending(ok=outcome.ok, message=outcome.message) if outcome else None

    def returns(self) -> bool:
        """Have `look` start the launcher again if it is dead; return whether it is."""
        if not self.launcher.pid:
            self._is_due = True
            self.launcher.returns(after_s=_END_S)  # until then `look` has done so
        return self._is_due

    def lose(self, run: str) -> None:
        """Make the machine vanish: all its processes at one blow, its memory and its disk."""
        there = self.processes
        pids = [self.launcher.pid, *self.member]
        if there:
            pids += [there.agent, there.sidecar, *there.workers.values()]
        with take_away(arena_path(run, self.node)):
            for pid in alive(pids):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._await_death(pids)
        self.is_lost = True
        self.keep_events()
        shutil.rmtree(self.launcher.run_dir)

    def give_back(self, part: ManagedPart) -> None:
        """Start a launcher on the machine, which is empty."""
        self.launcher = LauncherProcess(self.launcher.config, part)
        self.is_lost, self._is_due = False, False
        self.launcher.begin()

    def keep_events(self) -> None:
        """Move the events to the history: the next launcher in the run directory begins anew."""
        self._told += self._reader.new()
        self._kept += 1
        for path in self.launcher.run_dir.glob(EVENTS_PATTERN):
            first, _, rest = path.name.partition("-")
            shutil.move(path, self._history / f"{first}-{self.node}-{self._kept}-{rest}")
        self._reader = EventReader(self.launcher.run_dir)

    def _begin(self) -> None:
        """Start the launcher again, once the processes of its node are gone with it."""
        there = self.processes
        if there:
            self._await_death([there.agent, there.sidecar, *there.workers.values()])
        self.keep_events()
        self.launcher.begin()

    def _await_death(self, pids: list[int]) -> None:
        deadline_s = time.monotonic() + _DIE_S
        while alive(pids) and time.monotonic() < deadline_s:
            self.launcher.pid  # noqa: B018 - reaps it
            time.sleep(_POLL_S)


class ManagedJob:
    """A `RealJob` of a launcher for every node; the node's name is that of its machine.

    It reports `REPLICATED` among the events of the job, and opens the gate of the workload then.
    """

    coordinator = ""

    def __init__(self, workload: Workload, place: JobFolders, *, source: Path) -> None:
        self.mark, self._place = new_mark(), place
        self._workload, self._source = workload, source
        self._program = etcd_program()
        (self._port,) = free_ports(1)
        self._machines: dict[str, ManagedMachine] = {}
        self._key_file, self._gate = place.work / "key.json", place.work / "gate"
        self._asked_s, self._trains = 0.0, False

    @property
    def folder(self) -> Path:
        """See `JobAccess`."""
        return self._place.folder

    @property
    def run(self) -> str:
        """See `JobAccess`."""
        return next((each.launcher.run for each in self._living() if each.launcher.run), "")

    @property
    def nodes(self) -> tuple[str, ...]:
        """See `JobAccess`."""
        return tuple(self._workload.nodes)

    def start(self, env: Mapping[str, str]) -> None:
        """See `RealJob`."""
        first = _host(0)
        for number, node in enumerate(self.nodes):
            self._machines[node] = ManagedMachine(
                self._config(number, node, env),
                self._part(number, towards=first, joins=False),
                history=self._place.history,
            )
        for machine in self._machines.values():
            machine.launcher.begin()

    def _config(self, number: int, node: str, env: Mapping[str, str]) -> LaunchConfig:
        load = self._workload
        roles = Counter[str]()
        for slots in load.nodes.values():
            roles.update(slots)
        return LaunchConfig(
            command=argv(load, self._place, source=self._source),
            nodes=(NodeSpec(name=node, slots=load.nodes[node]),),
            wanted=load.wanted or dict(roles),
            settings=load.settings,
            run_dir=self._place.work / node,
            elsewhere=len(load.nodes) - 1,
            host=_host(number),
            capture_output=True,
            max_attempts=MANY,
            node_restarts=MANY,
            timing=ETCD_TIMING,
            return_s=_RETURN_S,
            agent_env={
                **environment(load, self._place, source=self._source, mark=self.mark, more=env),
                GATE: str(self._gate),
            },
        )

    def _part(self, number: int, *, towards: str, joins: bool) -> ManagedPart:
        count = len(self.nodes)
        place = CoordinatorPlace.parse(
            f"{MANAGED}://{towards}:{self._port}", may_host=False if number or joins else None
        )
        joint = JointConfig(
            place=place,
            key_file=self._key_file,
            least=count,
            most=count,
            number=number,
            joins=joins,
            host=_host(number),
        )
        return ManagedPart(joint=joint, program=self._program)

    def events(self) -> list[Told]:
        """See `RealJob`."""
        found = [event for each in self._machines.values() for event in each.events()]
        now_s = time.monotonic()
        self._trains = self._trains or any(isinstance(each, StepDone) for each in found)
        if self._trains and not self._gate.exists() and now_s > self._asked_s + _ASK_S:
            self._asked_s = now_s
            if self._voters() >= wanted_voters(len(self.nodes)):
                self._gate.touch()
                found.append(UserEvent(name=REPLICATED, time_s=time.time()))
        return sorted(found, key=time_of)

    def _voters(self) -> int:
        """Return the number of etcd's members that have a vote, 0 if it does not answer."""
        first = next(iter(self._machines.values())).launcher.run_dir
        if (record := read_member(first / FOLDER)) is None:
            return 0
        identity = Authority.of(RunKey.load(self._key_file)).client(record.token)
        address = EtcdAddress.parse(f"{MANAGED}://{record.endpoint}/{record.token}")
        with (
            contextlib.suppress(CoordinatorError),
            contextlib.closing(MembersAdmin(address, identity, timeout_s=_ASK_S)) as admin,
        ):
            return sum(bool(each.name) and not each.learner for each in admin.members())
        return 0

    def ending(self) -> Ending | None:
        """See `RealJob`. The job has ended once every launcher that is there says so."""
        endings = [each.look() for each in self._living()]
        if not all(endings):
            return None
        failed = [each for each in endings if each and not each.ok]
        return next(iter((*failed, *endings)), None)

    def struck(self, part: str) -> None:
        """See `RealJob`."""
        deadline_s = time.monotonic() + _DYING_S
        while part in ("launcher", "job") and time.monotonic() < deadline_s:
            dead = [machine.returns() for machine in self._living()]
            if all(dead) or (part == "launcher" and any(dead)):
                break
            time.sleep(_POLL_S)

    def workers(self) -> list[int]:
        """See `RealJob`."""
        return [pid for each in self.victims("worker") for pid in each.pids]

    def output(self) -> str:
        """See `RealJob`."""
        logs = sorted(self._place.work.glob("*/logs/*"))
        return "".join(path.read_text(errors="replace") for path in logs)

    def end(self) -> None:
        """See `RealJob`."""
        there = list(self._living())
        for machine in there:
            machine.launcher.kill()
        for machine in there:
            machine.launcher.wait(_END_S)
        end_processes(processes_of(self.mark), mark=self.mark)
        for machine in there:
            machine.keep_events()

    # -- the victims -----------------------------------------------------------------------------

    def victims(self, part: Part) -> list[Victim]:
        """See `JobAccess`: a launcher, and mostly a coordinator, is on each machine."""
        if part == "store":
            return [Victim(name="the store", part=part, pids=())]
        found = [victim for each in self._living() for victim in _on_machine(each, part)]
        if part == "job":
            pids = tuple(pid for each in found for pid in each.pids)
            return [Victim(name="the job", part=part, pids=pids)]
        return sorted(found, key=lambda each: each.name)

    def lose(self, node: str, *, even_last: bool = False) -> bool:
        """See `JobAccess`."""
        machine = self._machines[node]
        others = [each for each in self._living() if each is not machine]
        if machine.is_lost or not (others or even_last):
            return False
        machine.lose(self.run)
        return True

    def give_back(self, node: str) -> None:
        """See `JobAccess`. Its launcher finds the job at a machine that is still there."""
        machine, number = self._machines[node], self.nodes.index(node)
        if machine.is_lost and self.ending() is None:
            towards = next(each.launcher.config.host for each in self._living())
            machine.give_back(self._part(number, towards=towards, joins=True))

    def _living(self) -> Iterator[ManagedMachine]:
        return (each for each in self._machines.values() if not each.is_lost)


def _on_machine(machine: ManagedMachine, part: Part) -> Iterator[Victim]:
    node, launcher = machine.node, alive([machine.launcher.pid])
    if part in ("launcher", "job") and launcher:
        yield Victim(name=f"launcher of {node}", part=part, pids=tuple(launcher), node=node)
    if part in ("coordinator", "job") and (member := machine.member):
        yield Victim(name=f"etcd member of {node}", part=part, pids=tuple(member), node=node)
    if part not in ("launcher", "coordinator") and (there := machine.processes):
        yield from of_node(node, there, part)


def _host(number: int) -> str:
    """Return the address that stands for a machine."""
    return f"127.0.0.{number + 2}"
