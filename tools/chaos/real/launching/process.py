"""A job's launcher in a process of its own: it can be killed, and is then started again."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Final

import msgspec

from holdfast.ckpt.descriptors import descriptor_of, readable
from holdfast.ckpt.private import PRIVATE
from holdfast.elastic.agent.reporting import NodeProcesses, read_processes
from holdfast.elastic.errors import CoordinatorError
from holdfast.elastic.launch.config import LaunchConfig
from holdfast.elastic.launch.coordinator_process import read_record
from holdfast.elastic.membership.records import JobOutcome
from holdfast.elastic.processes.children import Child, describe_exit
from holdfast.elastic.processes.log_files import last_words
from holdfast.tools.chaos.real.jobs import alive
from holdfast.tools.chaos.real.launching.messages import (
    KILL,
    LOSE,
    RETURN,
    Ended,
    LaunchOrder,
    Lost,
    ManagedPart,
    Reply,
    RunBegun,
    encoded,
)

_MODULE: Final = "holdfast.tools.chaos.real.launching"
_START_S: Final = 60.0
_REPLY_S: Final = 30.0
_WAIT_S: Final = 0.05
_BYTES: Final = 1 << 16
_replies: Final = msgspec.json.Decoder(Reply)


class LauncherProcess:
    """Has the calls of a `Launcher` that faults need; ``config`` must have a ``run_dir``.

    With a ``managed`` part it is one of several launchers of a job. ``begun`` counts the runs that
    it has begun: more than one, and a launcher did not continue its predecessor's job. All calls
    are for the thread that started it, which must outlive it.
    """

    def __init__(self, config: LaunchConfig, managed: ManagedPart | None = None) -> None:
        assert config.run_dir is not None
        self.config, self.run_dir, self.managed = config, config.run_dir, managed
        self.run = self.coordinator_address = ""
        self.begun = 0
        self._child: Child | None = None
        self._orders = self._answers = -1
        self._unread = b""
        self._outcome: JobOutcome | None = None
        self._due_s: float | None = None

    @property
    def pid(self) -> int:
        """Its process id, 0 while it is down."""
        if self._child is None or self._child.wait(0) is not None:
            return 0
        return self._child.pid

    @property
    def coordinator_pid(self) -> int:
        """The process id of the run's coordinator, 0 while there is none."""
        record = read_record(self.run_dir)
        return next(iter(alive([record.pid])), 0) if record is not None else 0

    def start(self) -> None:
        """Start it, or start it again. Raises ``CoordinatorError`` if it does not run."""
        self.begin()
        if not isinstance(self._reply(RunBegun, _START_S), RunBegun):
            raise CoordinatorError(f"the launcher does not start: {last_words(self._log)}")

    def begin(self) -> None:
        """Start it, and do not wait until it has begun or continued the run."""
        for folder in (self.run_dir, self.run_dir / "logs"):
            folder.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        self._close()
        self._due_s, self._unread = None, b""
        orders, self._orders = os.pipe()
        self._answers, replies = os.pipe()
        try:
            order = LaunchOrder(config=self.config, managed=self.managed)
            with descriptor_of(encoded(order)) as fd:
                self._child = Child.start(
                    (sys.executable, "-P", "-m", _MODULE, str(fd), str(replies)),
                    env={**os.environ, **self.config.agent_env},
                    tied=True,
                    stdin=orders,
                    output=self._log,
                    pass_fds=(fd, replies),
                )
        finally:
            os.close(orders)
            os.close(replies)

    def returns(self, *, after_s: float) -> None:
        """Expect its death: `wait` starts it again ``after_s`` seconds from now."""
        self._due_s = time.monotonic() + after_s

    def wait(self, timeout_s: float | None = None) -> JobOutcome | None:
        """Wait for the job's outcome; None if the time is up before, or while it is down."""
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while (outcome := self._look()) is None:
            if until_s is not None and time.monotonic() >= until_s:
                return None
            readable([self._answers], _WAIT_S)
        return outcome

    def kill(self) -> None:
        """End all processes now; a launcher that is down is started again for it."""
        if self._outcome is not None:
            return
        if self._due_s is not None and self._child is not None:
            self._child.wait(_REPLY_S)  # it may still be dying, and obeys no more
            self.start()
        self._due_s = None
        self._order(KILL)

    def processes(self) -> dict[str, NodeProcesses]:
        """Return the process ids of every node whose agent lives."""
        listed = {node.name: read_processes(self.run_dir, node.name) for node in self.config.nodes}
        return {name: found for name, found in listed.items() if found and alive([found.agent])}

    def lose_machine(self, node: str) -> list[int]:
        """Do as a `Launcher` does."""
        self._order(f"{LOSE} {node}")
        message = self._reply(Lost, _REPLY_S)
        return list(message.pids) if isinstance(message, Lost) else []

    def return_machine(self, node: str) -> None:
        """Do as a `Launcher` does."""
        self._order(f"{RETURN} {node}")

    @property
    def _log(self) -> Path:
        return self.run_dir / "logs" / "launcher.log"

    def _look(self) -> JobOutcome | None:
        """Read the outcome; start a launcher that is due again."""
        if self._outcome is not None or self._child is None:
            return self._outcome
        code = self._child.wait(0)
        self._reply(Ended, 0.0)  # it may have told the outcome before its end
        if code is not None and self._outcome is None:
            if self._due_s is None:
                message = f"the launcher ended: {describe_exit(code)}"
                self._outcome = JobOutcome(ok=False, message=message)
            elif time.monotonic() >= self._due_s:
                self.start()
        if self._outcome is not None:
            self._child.wait(_REPLY_S)
            self._close()
        return self._outcome

    def _order(self, text: str) -> None:
        with contextlib.suppress(OSError):  # it is down
            os.write(self._orders, f"{text}\n".encode())

    def _reply(self, kind: type[Reply], timeout_s: float) -> Reply | None:
        """Return the next reply of a kind, None if it is late or the launcher has ended."""
        until_s = time.monotonic() + timeout_s
        while self._outcome is None and self._answers >= 0:
            line, end, rest = self._unread.partition(b"\n")
            if end:
                self._unread = rest
                message = _replies.decode(line)
                if isinstance(message, RunBegun):
                    self.begun += message.run != self.run
                    self.run, self.coordinator_address = message.run, message.coordinator
                if isinstance(message, Ended):
                    self._outcome = message.outcome
                if isinstance(message, kind):
                    return message
                continue
            if not readable([self._answers], until_s - time.monotonic()):
                return None
            more = os.read(self._answers, _BYTES)
            if not more:
                return None
            self._unread += more
        return None

    def _close(self) -> None:
        for fd in (self._orders, self._answers):
            if fd >= 0:
                os.close(fd)
        self._orders = self._answers = -1
