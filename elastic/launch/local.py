"""The launcher of a job on this machine: an embedded coordinator and one agent per node."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import os
import shutil
import signal
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

import msgspec

from holdfast.ckpt.descriptors import allow_many, patiently, readable
from holdfast.ckpt.errors import HoldfastError, PeerError
from holdfast.ckpt.memory import kept
from holdfast.ckpt.memory.arena import arena_path, arenas_of, hold, is_held, sweep, take_away
from holdfast.ckpt.private import make_private
from holdfast.ckpt.transport import RunKey
from holdfast.elastic.agent.config import AgentConfig
from holdfast.elastic.agent.notice import LEFT_STATUS
from holdfast.elastic.agent.reporting import PROCESSES_PATTERN, NodeProcesses, read_processes
from holdfast.elastic.coordinator.base import Coordinator
from holdfast.elastic.coordinator.connecting import connect
from holdfast.elastic.coordinator.embedded import EmbeddedServer
from holdfast.elastic.coordinator.service import (
    JOURNAL,
    RECORD,
    LauncherRecord,
    ServiceConfig,
    drop_memory,
    launcher_key,
)
from holdfast.elastic.decisions.restarting import Restarts, again
from holdfast.elastic.errors import ConfigError, CoordinatorError
from holdfast.elastic.events import Detected, Event, JobEnded, JobStarted, NodeExited
from holdfast.elastic.events.log import EVENTS_PATTERN, EventWriter, events_file
from holdfast.elastic.launch.config import EMBEDDED, LaunchConfig, NodeSpec
from holdfast.elastic.launch.coordinator_process import CoordinatorProcess, read_record
from holdfast.elastic.membership.records import TRAINER, JobOutcome
from holdfast.elastic.membership.view import (
    JobView,
    decode,
    encode,
    node_key,
    outcome_key,
    run_prefix,
)
from holdfast.elastic.processes import run_dirs
from holdfast.elastic.processes.children import Child, ChildChange, describe_exit, end_processes

_TICK_S = 0.05
_STOP_GRACE_S = 0.15
_CALL_TIMEOUT_S = 2.0
_UNHEARD_S = 10.0
_AGENT_END_S = 15.0
_SWEEP_S = 2.0
_SWEEP_TICK_S = 0.01
_REVIVALS = 3
KEY = "key.json"
"""File of the run's key, in the run directory."""

_log = logging.getLogger(__name__)


class Launcher:
    """The launcher of one job, from its start until its last process is gone."""

    def __init__(self, config: LaunchConfig) -> None:
        self.config = config
        self.run = f"{os.getpid():x}-{uuid.uuid4().hex[:6]}"
        self._identity = config.job
        self._temporary = config.run_dir is None
        self.run_dir = config.run_dir or run_dirs.make()
        self._agents: dict[str, Child] = {}
        self._memory: dict[str, int] = {}
        self._restarts: dict[str, Restarts] = {}
        self._due: set[str] = set()
        self._stopped_s: dict[str, float] = {}
        self._lost: dict[str, str] = {}
        self._returning: set[str] = set()
        self._taken: set[str] = set()
        self._killed = threading.Event()
        self._ended = threading.Event()
        self._outcome: JobOutcome | None = None
        self._stop_reason: str | None = None
        self._deciding_s = 0.0
        self._server: EmbeddedServer | CoordinatorProcess | None = None
        self._coordinator_restarts = Restarts()
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
            self._lock_run_dir()
            before = self._predecessor()
            if before is None:
                self.key = RunKey.new()
                self._clear_run_dir()
            self._connect()
        except HoldfastError:
            if isinstance(self._server, CoordinatorProcess) and before is None:
                self._server.close()
            if self._temporary:
                shutil.rmtree(self.run_dir, ignore_errors=True)
            raise
        self._events = EventWriter(events_file(self.run_dir, "launcher"), node="launcher")
        self._lifeline_read, self._lifeline_write = os.pipe()
        first = [node for node in self.config.nodes if node.name not in self.config.absent]
        names = [node.name for node in first]
        self.emit(JobStarted(run=self.run, nodes=tuple(names), wanted=dict(self.config.wanted)))
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

    def _lock_run_dir(self) -> None:
        """Make the run directory and lock it.

        Raises ``UnsafePathError`` if another user made it or can write to it.
        """
        try:
            make_private(self.run_dir)  # its key and its coordinator's record are trusted below
            make_private(self.run_dir / "logs")
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            lock = os.open(self.run_dir / run_dirs.LOCK, flags, 0o600)
            self._lock = os.fdopen(lock, "w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._temporary:
                run_dirs.mark(self.run_dir)
        except BlockingIOError:
            raise ConfigError(
                f"run directory {self.run_dir}: another job uses it; choose another directory"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"run directory {self.run_dir}: {error.strerror}; choose one that can be written"
            ) from error

    def _predecessor(self) -> CoordinatorProcess | None:
        """Take up the coordinator of a killed launcher of the same job; end that of another."""
        if not self._bind() or (record := read_record(self.run_dir)) is None:
            return None
        try:
            self.key = RunKey.load(self.run_dir / KEY)
        except PeerError:
            return None
        found = CoordinatorProcess.found(self.run_dir, self.key)
        if record.job != self._identity:
            _log.warning(
                "%s: the job that ran here (%s) had another command or other options; it is not "
                "continued",
                self.run_dir,
                record.run,
            )
            if found:
                found.close()
        else:
            found = found or self._revive(record.run)
            if found:
                self.run, self._server = found.run, found
                return found
        drop_memory(record.run)
        return None

    def _revive(self, run: str) -> CoordinatorProcess | None:
        """Start a killed coordinator again, if its job can go on; None if it cannot."""
        if not self.config.return_s or not self._can_go_on(run):
            return None
        for _ in range(_REVIVALS):
            try:
                return CoordinatorProcess.start(self._service(self._bind(), run=run))
            except CoordinatorError as error:
                # the killed launcher may have just started one
                if found := CoordinatorProcess.found(self.run_dir, self.key):
                    return found
                _log.warning("%s: run %s cannot be continued: %s", self.run_dir, run, error)
        return None

    def _can_go_on(self, run: str) -> bool:
        """Return whether there is memory from which the run can continue."""
        return bool(arenas_of(run))

    def _clear_run_dir(self) -> None:
        """Remove the files of an earlier run, and write this run's key."""
        try:
            for pattern in (EVENTS_PATTERN, PROCESSES_PATTERN, KEY, RECORD, JOURNAL):
                for stale in self.run_dir.glob(pattern):
                    stale.unlink()
        except OSError as error:
            raise ConfigError(
                f"run directory {self.run_dir}: {error.strerror}; choose one that can be written"
            ) from error

    def _take_over(self, *, number: int = -1) -> None:
        """Hold the nodes' memory, and end the remaining processes of the launcher before."""
        self._sign(number=number)
        for node in self.config.nodes:
            if arena_path(self.run, node.name).exists():
                self._hold_memory(node.name)
            if found := read_processes(self.run_dir, node.name):
                pids = [found.agent, found.sidecar, *found.workers.values()]
                end_processes(pids, mark=self.run)
            self._coordinator.delete(node_key(self.run, node.name))

    def _sign(self, *, number: int = -1) -> None:
        """Write this launcher's record at the coordinator's process."""
        names = tuple(node.name for node in self.config.nodes)
        record = LauncherRecord(pid=os.getpid(), nodes=names, number=number)
        self._coordinator.put(launcher_key(self.run), encode(record))

    def _bind(self) -> str:
        """Return the address at which this launcher serves the coordinator, empty if it does not.

        It ends in ``*`` for any free port.
        """
        if self.config.coordinator != EMBEDDED:
            return ""
        return f"tcp://127.0.0.1:{self.config.port or '*'}"

    def _serve(self) -> EmbeddedServer | CoordinatorProcess:
        """Serve the coordinator here or, if it is to outlive this launcher, in its own process."""
        if self._temporary or not self.config.return_s:
            return EmbeddedServer(self.key, bind=self._bind())
        return CoordinatorProcess.start(self._service(self._bind(), run=self.run))

    def _service(self, bind: str, *, run: str) -> ServiceConfig:
        return ServiceConfig(
            run=run,
            job=self._identity,
            run_dir=str(self.run_dir.absolute()),
            key_file=str((self.run_dir / KEY).absolute()),
            bind=bind,
            return_s=self.config.return_s,
        )

    def _check_coordinator(self) -> None:
        """Start the coordinator's process again if it has ended; it continues with its journal."""
        server, restarts = self._server, self._coordinator_restarts
        if not isinstance(server, CoordinatorProcess) or server.alive:
            return
        if time.monotonic() < restarts.due_s:
            return
        listed = [read_processes(self.run_dir, node.name) for node in self.config.nodes]
        following = again(
            restarts,
            progress=max((found.progress for found in listed if found), default=-1),
            most=self.config.node_restarts,
            now_s=time.monotonic(),
        )
        if following is None:
            self._stop_reason = self._stop_reason or "the coordinator ended again and again"
            return
        self._coordinator_restarts = following
        try:
            self._server = CoordinatorProcess.start(self._service(server.address, run=self.run))
        except (CoordinatorError, OSError) as error:
            _log.warning("%s", error)

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
        self._hold_memory(node.name)
        config = AgentConfig(
            run=self.run,
            node=node.name,
            domain=node.domain,
            run_dir=str(self.run_dir),
            key_file=str(self.run_dir / KEY),
            coordinator=self.coordinator_address,
            slots=node.slots,
            wanted=dict(self.config.wanted),
            nodes=len(self.config.nodes) - len(self.config.absent) + self.config.elsewhere,
            command=self.config.command,
            env=dict(self.config.env),
            capture_output=self.config.capture_output,
            max_attempts=self.config.max_attempts,
            settings=dict(self.config.settings),
            timing=self.config.timing,
            notice=self.config.notice,
            host=self.config.host,
            memory_of=node.name if self.config.apart else "",
        )
        self._agents[node.name] = start_agent(
            config,
            env={**os.environ, **self.config.agent_env},
            stdin=self._lifeline_read,
        )

    def _hold_memory(self, node: str) -> None:
        """Make the node's memory outlive its processes, until the job ends."""
        if not self._has_memory(node):
            self._release_memory(node)
            self._memory[node] = hold(arena_path(self.run, node))

    def _has_memory(self, node: str) -> bool:
        return is_held(arena_path(self.run, node), self._memory.get(node, -1))

    def _release_memory(self, node: str) -> None:
        if (fd := self._memory.pop(node, -1)) >= 0:
            os.close(fd)

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
        with contextlib.ExitStack() as held:
            pidfds = []
            for agent in self._agents.values():
                if agent.alive:
                    pidfds.append(patiently(functools.partial(os.pidfd_open, agent.pid)))
                    held.callback(os.close, pidfds[-1])
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
            self._coordinator.delete(node_key(self.run, node.name))
        kept = self._has_memory(node.name)
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
        """Remove the memory of a node's processes, the last of which may still be ending."""
        self._release_memory(node)
        kept.give_up(arena_path(self.run, node))
        directory, deadline_s = arena_path(self.run, node), time.monotonic() + _SWEEP_S
        if isinstance(self._server, CoordinatorProcess) and self._server.alive:
            with take_away(directory):
                return  # it holds the memory too, until nothing lies there
        while directory.exists() and time.monotonic() < deadline_s:
            if not sweep(exactly=directory.name):
                time.sleep(_SWEEP_TICK_S)

    def _hopeless(self) -> str | None:
        """Return why the job cannot continue with the remaining nodes, None if it can."""
        alive = {name for name, agent in self._agents.items() if agent.alive} | self._due
        left = [node for node in self.config.nodes if node.name in alive]
        lost = ", ".join(
            f"{name} ({ending})" for name, ending in self._lost.items() if name not in alive
        )
        if not left:
            return f"every node is lost: {lost}; look for the cause in their output"
        needed = self._trainers_needed()
        room = sum(node.slots.get(TRAINER, 0) for node in left)
        if room < needed:
            return (
                f"{needed} trainers are needed and the nodes that are left have room for {room} "
                f"(lost: {lost}): give more nodes or slots, or allow fewer with "
                "Mesh(dp='auto', min_dp=...)"
            )
        return None

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

    def _forget_run(self) -> None:
        """Remove the run's keys from a coordinator that outlives it."""
        with contextlib.suppress(CoordinatorError):
            for entry in self._coordinator.range(run_prefix(self.run))[0]:
                self._coordinator.delete(entry.key)

    def _note_failure(self, found: NodeProcesses) -> None:
        """Fail the job if a worker completed its part but then failed."""
        if found.failure and (self._outcome is None or self._outcome.ok):
            self._outcome = JobOutcome(ok=False, message=found.failure)


def start_agent(
    config: AgentConfig, *, env: Mapping[str, str], stdin: int, output: Path | None = None
) -> Child:
    """Start a node's agent, tied to this thread; ``-P`` keeps the user's directory off its path.

    ``stdin`` is its lifeline; ``output`` is as in `Child.start`.
    """
    with os.fdopen(os.memfd_create("holdfast-config"), "w+b") as file:
        file.write(msgspec.json.encode(config))
        file.seek(0)
        argv = (sys.executable, "-P", "-m", "holdfast.elastic.agent")
        options = ("--name", f"{config.run}/{config.node}", "--config-fd", str(file.fileno()))
        return Child.start(
            (*argv, *options),
            env=env,
            tied=True,
            stdin=stdin,
            output=output,
            pass_fds=(file.fileno(),),
        )
