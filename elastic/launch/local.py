"""The launcher of a job on this machine: an embedded coordinator and one agent per node."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import threading
import time

from holdfast.ckpt.descriptors import allow_many, patiently, readable
from holdfast.ckpt.errors import HoldfastError
from holdfast.ckpt.memory.arena import arena_path, sweep, take_away
from holdfast.ckpt.transport import RunKey
from holdfast.elastic.agent.config import AgentConfig
from holdfast.elastic.agent.notice import LEFT_STATUS
from holdfast.elastic.agent.reporting import NodeProcesses, read_processes
from holdfast.elastic.coordinator.base import Coordinator
from holdfast.elastic.coordinator.connecting import connect
from holdfast.elastic.decisions.remaining import hopeless
from holdfast.elastic.decisions.restarting import Restarts, again
from holdfast.elastic.errors import CoordinatorError
from holdfast.elastic.events import Detected, Event, JobEnded, JobStarted, NodeExited
from holdfast.elastic.events.log import EventWriter, events_file
from holdfast.elastic.launch.agent_start import agent_config, start_agent
from holdfast.elastic.launch.config import EMBEDDED, LaunchConfig, NodeSpec
from holdfast.elastic.launch.coordinator_process import CoordinatorProcess
from holdfast.elastic.launch.hosting import CoordinatorHost
from holdfast.elastic.launch.kept_arenas import KeptArenas
from holdfast.elastic.launch.run_folder import KEY, clear_run_dir, lock_run_dir
from holdfast.elastic.launch.shared_imports import SharedImports
from holdfast.elastic.membership.records import Decider, JobOutcome
from holdfast.elastic.membership.view import (
    JobView,
    decider_prefix,
    decode,
    encode,
    node_key,
    outcome_key,
    run_prefix,
)
from holdfast.elastic.preload.client import ForkServer
from holdfast.elastic.processes import run_dirs
from holdfast.elastic.processes.children import Child, ChildChange, describe_exit, end_processes

_TICK_S = 0.05
_STOP_GRACE_S = 0.15
_CALL_TIMEOUT_S = 2.0
_UNHEARD_S = 10.0
_AGENT_END_S = 15.0


class Launcher(CoordinatorHost):
    """The launcher of one job, from its start until its last process is gone."""

    def __init__(self, config: LaunchConfig, *, imports: ForkServer | None = None) -> None:
        """``imports`` is a server with the job's preloaded modules, for the nodes' servers."""
        super().__init__(config)
        self._imports = SharedImports(imports)
        self._agents: dict[str, Child] = {}
        self._memory = KeptArenas()
        self._restarts: dict[str, Restarts] = {}
        self._due: set[str] = set()
        self._stopped_s: dict[str, float] = {}
        self._lost: dict[str, str] = {}
        self._returning: set[str] = set()
        self._taken: set[str] = set()
        self._killed = threading.Event()
        self._ended = threading.Event()
        self._outcome: JobOutcome | None = None
        self._deciding_s = 0.0
        self._lifeline_read, self._lifeline_write = -1, -1

    def start(self) -> None:
        """Start coordinator and agents; they end with the thread that calls this.

        Raises ``ConfigError`` if the run directory or the coordinator's address is bad,
        ``CoordinatorError`` if the port is taken or etcd does not answer.
        """
        allow_many()
        sweep()
        run_dirs.sweep()
        before: CoordinatorProcess | None = None
        try:
            self._lock = lock_run_dir(self.run_dir, temporary=self._temporary)
            before = self._predecessor()
            if before is None:
                self.key = RunKey.new()
                clear_run_dir(self.run_dir)
            self._connect()
        except HoldfastError:
            if isinstance(self._server, CoordinatorProcess) and before is None:
                self._server.close()
            if self._temporary:
                shutil.rmtree(self.run_dir, ignore_errors=True)
            raise
        self._events = EventWriter(
            events_file(self.run_dir, "launcher"),
            node="launcher",
            history_bytes=self.config.history_bytes,
        )
        self._lifeline_read, self._lifeline_write = os.pipe()
        first = [node for node in self.config.nodes if node.name not in self.config.absent]
        names = [node.name for node in first]
        self.emit(JobStarted(run=self.run, nodes=tuple(names), wanted=dict(self.config.wanted)))
        if len(self.config.nodes) > 1:
            self._imports.start(self._agent_config(first[0]), env=self._agent_env())
        for node in first:
            self._start_agent(node)
        self._thread = threading.Thread(target=self._watch, name="launcher", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> JobOutcome | None:
        """Wait until the job and all its processes have ended; None if the time is up before."""
        return self._outcome if self._ended.wait(timeout_s) else None

    def stop(self, reason: str = "stopped by the user") -> None:
        """Request an orderly end; `wait` returns when the job has ended.

        Safe in a signal handler.
        """
        self._stop_reason = self._stop_reason or reason

    def kill(self) -> None:
        """End all processes now."""
        self._killed.set()

    def emit(self, event: Event) -> None:
        """Write an event of the launcher."""
        self._events.write(event, source="launcher")

    def processes(self) -> dict[str, NodeProcesses]:
        """Return the process ids of every node, as its agent last reported them."""
        return {
            name: found
            for name, agent in list(self._agents.items())
            if agent.alive and (found := read_processes(self.run_dir, name))
            if found.agent == agent.pid  # not from its predecessor
        }

    def lose_machine(self, node: str) -> list[int]:
        """Make ``node`` vanish as a lost machine does: its processes and its memory, at once.

        Returns the process ids, the agent's first; none if the node is gone already. For tests and
        demonstrations.
        """
        if (found := self.processes().get(node)) is None:
            return []
        pids = [pid for pid in (found.agent, found.sidecar, *found.workers.values()) if pid]
        self._taken.add(node)
        with take_away(arena_path(self.run, node)):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            end_processes(pids, mark=self.run)  # waits until they are gone
        return pids

    def return_machine(self, node: str) -> None:
        """Start ``node`` again with empty memory, as a repaired machine.

        An ``absent`` node starts for the first time. Does nothing while the node is there. For
        tests and demonstrations.
        """
        self._returning.add(node)

    def _take_over(self, *, number: int = -1) -> None:
        """Hold the nodes' memory, and end the remaining processes of the launcher before."""
        self._sign(number=number)
        for node in self.config.nodes:
            if (arena := arena_path(self.run, node.name)).exists():
                self._memory.keep(arena)
            if found := read_processes(self.run_dir, node.name):
                pids = [found.agent, found.sidecar, *found.workers.values()]
                end_processes(pids, mark=self.run)
            self._withdraw(node.name)

    def _withdraw(self, node: str) -> None:
        """Delete what a dead agent left: its node's record, and its place if it was a decider."""
        self._coordinator.delete(node_key(self.run, node))
        for entry in self._coordinator.range(decider_prefix(self.run))[0]:
            if decode(entry.key, entry.value, Decider).node == node:
                self._coordinator.delete(entry.key)

    def _connect(self) -> None:
        """Serve the coordinator, or connect to an existing one."""
        self.coordinator_address = self.config.coordinator
        taken = self._server is not None
        if not taken:
            self.key.save(self.run_dir / KEY)
        if self.config.coordinator == EMBEDDED:
            self._server = self._server or self._serve()
            self.coordinator_address = self._server.address
        self._coordinator: Coordinator = connect(
            self.coordinator_address, self.key, timeout_s=_CALL_TIMEOUT_S
        )
        if self._server is None:
            with contextlib.closing(connect(self.coordinator_address, self.key)) as patient:
                patient.get(outcome_key(self.run))
        elif taken:
            self._take_over()
        elif isinstance(self._server, CoordinatorProcess):
            self._sign()

    def _start_agent(self, node: NodeSpec) -> None:
        self._memory.keep(arena_path(self.run, node.name))
        self._agents[node.name] = start_agent(
            self._agent_config(node),
            env=self._agent_env(),
            stdin=self._lifeline_read,
            imports=self._imports.ready,
        )

    def _agent_config(self, node: NodeSpec) -> AgentConfig:
        return agent_config(
            self.config,
            node,
            run=self.run,
            run_dir=self.run_dir,
            coordinator=self.coordinator_address,
        )

    def _agent_env(self) -> dict[str, str]:
        return {**os.environ, **self.config.agent_env}

    def _watch(self) -> None:
        """Run the launcher's own loop until the job has ended."""
        try:
            while self._outcome is None and not self._killed.is_set():
                self._check_agents()
                self._check_coordinator()
                if self._stop_reason is not None:
                    self._decide(self._stop_reason)
                self._await_exit(_TICK_S)
                self._outcome = self._read_outcome()
            self._await_agents()
        finally:
            self._end()

    def _await_exit(self, timeout_s: float) -> None:
        """Return as soon as an agent exits."""
        with contextlib.ExitStack() as opened:
            pidfds = []
            for agent in self._agents.values():
                if agent.alive:
                    pidfds.append(patiently(functools.partial(os.pidfd_open, agent.pid)))
                    opened.callback(os.close, pidfds[-1])
            readable(pidfds, timeout_s)

    def _check_agents(self) -> None:
        for node in self.config.nodes:
            agent = self._agents.get(node.name)
            if agent is None:
                if node.name in self._returning:
                    self._returning.discard(node.name)
                    self._start_agent(node)
                continue
            returns = node.name in self._returning  # read before this check, which detects losses
            status = agent.poll()
            if status and status.change == ChildChange.STOPPED:
                self._stopped_s[node.name] = time.monotonic()
            elif status and status.change == ChildChange.CONTINUED:
                self._stopped_s.pop(node.name, None)
            stopped_s = self._stopped_s.get(node.name)
            if stopped_s and time.monotonic() - stopped_s > _STOP_GRACE_S:
                agent.kill()  # it cannot keep its lease: a stopped agent is a dead node
            if status and status.change == ChildChange.EXITED:
                self._stopped_s.pop(node.name, None)
                self._lose_node(node, agent)
            elif node.name in self._due:
                if time.monotonic() >= self._restarts[node.name].due_s:
                    self._restart_agent(node)
            elif returns and status is None and not self._is_going(node.name, agent):
                self._returning.discard(node.name)
                if not agent.alive:
                    self._start_agent(node)

    def _is_going(self, node: str, agent: Child) -> bool:
        """Return whether any thread of a lost node's agent has not ended yet."""
        return agent.alive and node in self._taken

    def _lose_node(self, node: NodeSpec, agent: Child) -> None:
        """Tell the others at once, make sure that no process of the node lives, and continue."""
        self._taken.discard(node.name)
        if self._read_outcome():
            return  # it ended with the job
        left = agent.code == LEFT_STATUS
        ending = "left after a notice" if left else describe_exit(agent.code or 0)
        found = read_processes(self.run_dir, node.name)
        if found:
            end_processes([found.sidecar, *found.workers.values()], mark=self.run)
            ending = found.failure or ending
        with contextlib.suppress(CoordinatorError):  # otherwise its lease ends a second later
            self._withdraw(node.name)
        kept = self._memory.has(arena_path(self.run, node.name))
        self._lost[node.name] = ending
        self.emit(NodeExited(victim=node.name, status=ending, memory_kept=kept))
        if not any(other.alive for other in self._agents.values()):
            self.emit(Detected(what="node_lost", victim=node.name))
        useless = found is not None and bool(found.failure)  # it has failed repeatedly
        wanted = not useless and not left and (kept or self._hopeless() is not None)
        progress = found.progress if found else -1
        if not wanted or not self._may_restart(node.name, progress=progress):
            self._give_up(node.name)

    def _may_restart(self, node: str, *, progress: int) -> bool:
        """Set when the node's agent is started again, unless that was done too often in a row."""
        restarts = again(
            self._restarts.get(node, Restarts()),
            progress=progress,
            most=self.config.node_restarts,
            now_s=time.monotonic(),
        )
        if restarts is None:
            return False
        self._restarts[node] = restarts
        self._due.add(node)
        return True

    def _restart_agent(self, node: NodeSpec) -> None:
        """Start a lost node's agent; where the machine refuses, that is one more failure of it."""
        self._due.discard(node.name)
        try:
            self._start_agent(node)
        except (OSError, HoldfastError) as error:
            self._lost[node.name] = f"its agent cannot be started: {error}"
            if not self._may_restart(node.name, progress=-1):
                self._give_up(node.name)

    def _give_up(self, node: str) -> None:
        self._remove_memory(node)
        if reason := self._hopeless():
            self.stop(reason)

    def _remove_memory(self, node: str) -> None:
        server = self._server
        shared = isinstance(server, CoordinatorProcess) and server.alive
        self._memory.remove(arena_path(self.run, node), shared=shared)

    def _hopeless(self) -> str | None:
        """Return why the job cannot continue with the remaining nodes, None if it can."""
        alive = {name for name, agent in self._agents.items() if agent.alive} | self._due
        left = {node.name: node.slots for node in self.config.nodes if node.name in alive}
        lost = {name: why for name, why in self._lost.items() if name not in alive}
        return hopeless(left, lost, needed=self._trainers_needed() if left else 0)

    def _trainers_needed(self) -> int:
        view = self._view()
        specs = [worker.spec for _, worker in view.workers() if worker.spec] if view else []
        return max((spec.least for spec in specs), default=0)

    def _view(self) -> JobView | None:
        try:
            entries, revision = self._coordinator.range(run_prefix(self.run))
        except CoordinatorError:
            return None
        return JobView.from_entries(
            entries, run=self.run, wanted=self.config.wanted, revision=revision
        )

    def _read_outcome(self) -> JobOutcome | None:
        try:
            entry = self._coordinator.get(outcome_key(self.run))
        except CoordinatorError:
            return None
        return decode(entry.key, entry.value, JobOutcome) if entry else None

    def _decide(self, failure: str) -> None:
        """Write the outcome unless there is one; `_watch` reads back the valid one.

        If the coordinator stays unreachable, the agents cannot learn the outcome; then kill all.
        """
        outcome = encode(JobOutcome(ok=False, message=failure))
        self._deciding_s = self._deciding_s or time.monotonic()
        try:
            self._coordinator.compare_and_set(outcome_key(self.run), outcome, expected=0)
        except CoordinatorError:
            if time.monotonic() - self._deciding_s > _UNHEARD_S:
                self.kill()

    def _await_agents(self) -> None:
        """Give the agents time to end by themselves, unless this launcher is killed."""
        timing = self.config.timing
        deadline_s = time.monotonic() + timing.done_grace_s + timing.stop_timeout_s + _AGENT_END_S
        while any(agent.alive for agent in self._agents.values()):
            if self._killed.is_set() or time.monotonic() > deadline_s:
                break
            self._await_exit(_TICK_S)
            self._check_agents()

    def _end(self) -> None:
        self._imports.close()
        os.close(self._lifeline_write)  # agents that still live end all their processes at once
        for name, agent in self._agents.items():
            if agent.wait(timeout_s=2.0) is None:
                agent.kill()
                agent.wait(timeout_s=2.0)
            if found := read_processes(self.run_dir, name):
                end_processes([*found.workers.values(), found.sidecar], mark=self.run)
                self._note_failure(found)
        os.close(self._lifeline_read)
        message = self._stop_reason or "killed by the user"
        outcome = self._outcome or JobOutcome(ok=False, message=message)
        self._outcome = outcome
        self.emit(JobEnded(ok=outcome.ok, message=outcome.message))
        self._events.close()
        if self._server is None:
            self._forget_run()
        self._coordinator.close()
        if self._server is not None:
            self._server.close()
        for node in self.config.nodes:
            self._remove_memory(node.name)
        self._lock.close()
        if self._temporary:
            shutil.rmtree(self.run_dir, ignore_errors=True)
        self._ended.set()

    def _note_failure(self, found: NodeProcesses) -> None:
        """Fail the job if a worker completed its part but then failed."""
        if found.failure and (self._outcome is None or self._outcome.ok):
            self._outcome = JobOutcome(ok=False, message=found.failure)
