"""The agent: one event loop over all inputs of a node.

Inputs are the exits and stops of children, the workers' channels, changes at the coordinator,
answers of the sidecar, the parent's lifeline and the clock. After each input `Conductor` brings the
node to the state that the decisions require.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from holdfast.ckpt.sidecar.core.lease_page import LeasePage
from holdfast.ckpt.transport import RunKey
from holdfast.elastic.agent.conduct import Conductor
from holdfast.elastic.agent.config import AgentConfig
from holdfast.elastic.agent.crew import Crew
from holdfast.elastic.agent.inbox import Inbox
from holdfast.elastic.agent.lease import LeaseKeeper
from holdfast.elastic.agent.notice import LEFT_STATUS, NoticeWatch
from holdfast.elastic.agent.reach import Reach
from holdfast.elastic.agent.registry import Registry
from holdfast.elastic.agent.reporting import NodeProcesses, Reporter
from holdfast.elastic.agent.watch import KeyWatch
from holdfast.elastic.agent.workers import SeatProcess
from holdfast.elastic.coordinator.base import Coordinator, Entry, KeyEvent
from holdfast.elastic.coordinator.connecting import connect
from holdfast.elastic.coordinator.embedded import EmbeddedServer
from holdfast.elastic.coordinator.service import JOURNAL
from holdfast.elastic.errors import CoordinatorError
from holdfast.elastic.events import Detected
from holdfast.elastic.membership.records import JobOutcome, WorkerState
from holdfast.elastic.membership.view import job_prefix, node_key, run_prefix
from holdfast.elastic.planning.holdoff import why_held_off
from holdfast.elastic.processes.node_sidecar import SidecarPlan

_IDLE_TICK_S = 0.25
_BUSY_TICK_S = 0.02
_CALL_TIMEOUT_S = 1.0
_ORDER_S = 1.0
_REGISTER_AGAIN_S = 0.25
_FAREWELL_S = 5.0
_POLL_S = 0.02
_LOGS_EVERY_S = 5.0


class Agent:
    """One node's agent, from its start to the end of the job or of its parent.

    If so configured, it serves the run's coordinator from the start, because the agent itself
    connects to it. Raises ``CoordinatorError`` if it cannot.
    """

    def __init__(self, config: AgentConfig) -> None:
        self._config, self._timing = config, config.timing
        self._key = RunKey.load(Path(config.key_file))
        self._hosting = _Hosting(config, self._key) if config.coordinator_bind else None
        self._selector = selectors.DefaultSelector()
        self._inbox = Inbox()
        self._reporter = Reporter(
            Path(config.run_dir), node=config.node, history_bytes=config.history_bytes
        )
        self._crew = Crew(
            config, selector=self._selector, reporter=self._reporter, wake=self._inbox.wake
        )
        self._lease_page = LeasePage.create(f"{config.run}-{config.node}")
        plan = SidecarPlan(
            run=config.run,
            node=config.node,
            key=self._key,
            key_file=Path(config.key_file),
            run_dir=Path(config.run_dir),
            host=config.host,
            lease_fd=self._lease_page.fd,
            memory_of=config.memory_of,
        )
        self._coordinator, self._leasing = self._connection(), self._connection()
        self._lease: LeaseKeeper | None = None
        self._reach = Reach(config.node, key=self._key, inbox=self._inbox)
        self._conductor = Conductor(
            config,
            plan=plan,
            inbox=self._inbox,
            crew=self._crew,
            reporter=self._reporter,
            registry=Registry(self._coordinator, run=config.run, lease=self._lease_number),
            reach=self._reach,
        )
        self._sidecar = self._conductor.sidecar
        self._signals = socket.socketpair()
        self._watch: KeyWatch | None = None
        self._watching = self._coordinator
        self._whole, self._watches = True, 0
        self._ending: JobOutcome | None = None
        self._ending_s = 0.0
        self._orphaned = False
        self._terminated_s = self._logs_due_s = 0.0
        self._over = threading.Event()
        self._notices: NoticeWatch | None = None

    def serve(self, *, lifeline: int) -> int:
        """Run until the job or the parent ends; return the process's exit status."""
        self._wire(lifeline)
        if not self._connect():
            self._reporter.close()
            return 1
        self._notices = NoticeWatch(
            self._config.notice,
            node=self._config.node,
            notice=lambda why: self._inbox.post(lambda: self._notice(why)),
        )
        while not (self._orphaned or self._conductor.unusable or self._conductor.left):
            for key, mask in self._selector.select(self._patience_s()):
                key.data(mask)
            self._crew.check()
            if self._ending is None:
                self._sidecar.check()
                self._conductor.carry_on()
                self._conductor.publish()
                self._watch_keys()
            elif self._crew.end_late(time.monotonic() - self._ending_s, grace_s=self._grace_s):
                break
            self._list_processes()
            self._bound_logs()
        return self._leave()

    def _wire(self, lifeline: int) -> None:
        woken, waker = self._signals
        for end in (woken, waker):
            end.setblocking(False)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.signal(signal.SIGTERM, lambda number, frame: self._on_terminate())
        read = selectors.EVENT_READ
        self._selector.register(woken, read, lambda mask: woken.recv(4096))
        self._selector.register(lifeline, read, lambda mask: self._on_lifeline(lifeline))
        self._selector.register(self._inbox, read, lambda mask: self._on_inbox())

    def _connect(self) -> bool:
        """Register, however long the coordinator takes; return False if the parent ended before."""
        while not self._registered():
            for key, mask in self._selector.select(0):
                key.data(mask)
            if self._orphaned:
                return False
        self._watching = self._connection()
        self._watch_keys()
        return True

    def _watch_keys(self) -> None:
        """Watch all records of the run, or only the keys of the whole job, as the node's part is.

        It is called again whenever that changes. Then a late message of the watch before is void.
        """
        whole = self._conductor.watches
        if self._watch is not None:
            if whole is self._whole:
                return
            self._watch.close()
        self._whole = whole
        self._watches = number = self._watches + 1

        def post(take: Callable[[], None]) -> None:
            self._inbox.post(lambda: take() if number == self._watches else None)

        run = self._config.run
        self._watch = KeyWatch(
            self._watching,
            run_prefix(run) if whole else job_prefix(run),
            start=lambda entries: post(lambda: self._on_entries(entries, whole=whole)),
            change=lambda events: post(lambda: self._on_changes(events)),
        )

    def _registered(self) -> bool:
        try:
            self._take_lease()
        except CoordinatorError:
            return False
        return True

    def _connection(self) -> Coordinator:
        return connect(self._config.coordinator, self._key, timeout_s=_CALL_TIMEOUT_S)

    def _patience_s(self) -> float:
        """Return the longest time that the loop may sleep without an input."""
        suspicious = self._crew.suspicious or self._sidecar.suspicious
        if self._ending or self._conductor.busy or suspicious:
            return _BUSY_TICK_S
        due_s = self._conductor.patience_s(time.monotonic())
        return _IDLE_TICK_S if due_s is None else min(_IDLE_TICK_S, due_s)

    def _on_inbox(self) -> None:
        for delivery in self._inbox.take():
            delivery()

    def _on_lifeline(self, lifeline: int) -> None:
        if not os.read(lifeline, 4096):
            self._orphan()

    def _orphan(self) -> None:
        self._orphaned = True

    def _on_terminate(self) -> None:
        """Treat SIGTERM as a notice, and a SIGTERM more than a second later as an order to end.

        A supervisor that signals all processes of a service at once reaches the agent twice: the
        launcher passes on a second signal.
        """
        now_s = time.monotonic()
        self._terminated_s = self._terminated_s or now_s
        if self._notices is None or now_s - self._terminated_s > _ORDER_S:
            self._orphan()
        self._inbox.post(lambda: self._notice("SIGTERM"))

    def _notice(self, why: str) -> None:
        if self._ending is None:
            self._conductor.notice(why, grace_s=self._config.notice.grace_s)

    # -- the coordinator ----------------------------------------------------------------------

    def _take_lease(self) -> None:
        self._lease = LeaseKeeper(
            self._leasing,
            timing=self._timing,
            fence=self._crew.table.kill_all,
            lost=lambda: self._inbox.post(self._on_lease_lost),
            extend=self._extend,
        )

    def _lease_number(self) -> int:
        """Return the lease under which the node acts; it registers before it writes anything."""
        assert self._lease is not None
        return self._lease.lease

    def _extend(self, until_ns: int) -> None:
        self._lease_page.extend(until_ns)
        self._crew.table.extend(until_ns)

    def _on_lease_lost(self) -> None:
        """Register again, after the node lost its lease and killed its workers.

        This runs on a thread for as long as it takes, because the coordinator may be unreachable.
        """
        self._reporter.emit(Detected(what="lease_lost", victim=self._config.node))
        threading.Thread(target=self._register_anew, name="register", daemon=True).start()

    def _register_anew(self) -> None:
        while not self._over.is_set():
            if self._registered():
                self._inbox.wake()  # the loop publishes the node again, under that lease
                return
            self._over.wait(_REGISTER_AGAIN_S)

    def _on_entries(self, entries: Sequence[Entry], *, whole: bool) -> None:
        self._conductor.look(entries, whole=whole)
        self._looked()

    def _on_changes(self, events: Sequence[KeyEvent]) -> None:
        self._conductor.look_at_changes(events)
        self._looked()

    def _looked(self) -> None:
        outcome = self._conductor.view.outcome
        if outcome and self._ending is None:
            self._ending, self._ending_s = outcome, time.monotonic()
            self._crew.stop(outcome.message)

    # -- the end --------------------------------------------------------------------------------

    def _grace_s(self, worker: SeatProcess) -> float:
        """Return a worker's grace; one that completed its part may still write its results."""
        completed = self._ending and self._ending.ok and worker.state is WorkerState.DONE
        return self._timing.done_grace_s if completed else self._timing.stop_timeout_s

    def _list_processes(self) -> None:
        workers = {worker.seat: worker.child.pid for worker in self._crew.table.living()}
        self._reporter.list_processes(
            NodeProcesses(
                agent=os.getpid(),
                sidecar=self._sidecar.pid,
                address=self._sidecar.address,
                workers=workers,
                fork_server=self._crew.fork_server,
                failure="; ".join(self._crew.failures) or self._conductor.failure,
                stragglers=self._conductor.stragglers,
                data_troubles=self._crew.data_troubles,
                unreachable=tuple(sorted(self._reach.probing.unreachable)),
                progress=self._conductor.progress,
                held_off=why_held_off(self._conductor.view, self._config.node),
            )
        )

    def _bound_logs(self) -> None:
        if time.monotonic() >= self._logs_due_s:
            self._logs_due_s = time.monotonic() + _LOGS_EVERY_S
            self._reporter.bound_logs(worker.seat for worker in self._crew.table)

    def _leave(self) -> int:
        """End the remaining processes, fast if orphaned; the sidecar removes its shared memory."""
        self._over.set()
        if self._watch:
            self._watch.close()
        self._reach.close()
        if self._notices:
            self._notices.close()
        self._crew.table.kill_all()
        self._crew.close()
        for worker in self._crew.table:
            worker.child.await_end(timeout_s=self._timing.stop_timeout_s)
        if self._conductor.left or self._ending:
            self._conductor.withdraw()
        for worker in self._crew.table:
            worker.child.wait(timeout_s=self._timing.stop_timeout_s)
        self._sidecar.stop()
        if self._lease:
            self._lease.close()
        if self._hosting:
            if self._ending:
                self._hosting.end_with(self._coordinator)
            self._hosting.close()
        self._list_processes()
        self._reporter.close()
        if self._conductor.left:
            return LEFT_STATUS
        return 1 if self._orphaned or self._conductor.unusable or self._crew.failures else 0


class _Hosting:
    """Serves the coordinator at ``config.coordinator_bind``, with its journal in the run directory.

    An agent that is restarted there continues with the same table. Raises ``CoordinatorError``.
    """

    def __init__(self, config: AgentConfig, key: RunKey) -> None:
        self._run = config.run
        self._journal = Path(config.run_dir) / JOURNAL
        self._server = EmbeddedServer(key, bind=config.coordinator_bind, journal=self._journal)

    def end_with(self, coordinator: Coordinator) -> None:
        """Wait until the other agents have seen the job's end and left, then delete the journal."""
        deadline_s = time.monotonic() + _FAREWELL_S
        try:
            while coordinator.range(node_key(self._run, ""))[0] and time.monotonic() < deadline_s:
                time.sleep(_POLL_S)
        except CoordinatorError:
            pass  # it is unreachable: nothing to wait for
        self._journal.unlink(missing_ok=True)

    def close(self) -> None:
        """Stop serving; the journal stays."""
        self._server.close()
