"""The environment processes of a worker: started when needed, killed, and started again.

The worker decides; the server of the processes (`server`) carries it out and is their parent. Every
end of a process is a `ToolError` of the call that it had, so the call may be made again elsewhere.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from holdfast.adapters.rl.environments.base import ToolError
from holdfast.adapters.rl.environments.process_settings import ProcessConfig
from holdfast.adapters.rl.environments.processes import wire
from holdfast.adapters.rl.environments.registry import EnvironmentConfig
from holdfast.ckpt.descriptors import descriptor_of, readable
from holdfast.ckpt.errors import CorruptError
from holdfast.ckpt.torch_versions import ALLOW_ENV
from holdfast.elastic.errors import ConfigError, JobFailedError
from holdfast.elastic.processes.children import Child, describe_exit
from holdfast.elastic.processes.configured import configured_argv

_MODULE: Final = "holdfast.adapters.rl.environments.processes"
_OURS: Final = "HOLDFAST_"
_STARTING: Final = 16
"""Most processes that make their environments at a time."""

_MOST_FAILED: Final = 4
"""Most starts of processes, or of their server, that may fail one after the other."""

_IMPORT_S: Final = 300.0
_END_S: Final = 2.0
_LOOK_S: Final = 0.05

Outcome = wire.Replied | wire.Prompted | wire.Faulty | ToolError
"""The outcome of a call."""


@dataclass(slots=True, kw_only=True)
class _Process:
    """A process: its time of start, the number of its call, None for none."""

    since_s: float
    ready: bool = False
    call: int | None = None
    exhausted: bool = False


class ProcessPool:
    """The processes of the module's docstring, for the environment that ``chosen`` names.

    Waits until one has made its environment. ``owner`` is for a reader of the process list. Raises
    ``ConfigError`` if the environment cannot be made, ``JobFailedError`` if processes do not start.
    All methods are for one thread at a time.
    """

    def __init__(self, chosen: EnvironmentConfig, *, seed: int, owner: str) -> None:
        assert chosen.processes is not None, "an environment in processes"
        self._chosen, self._settings, self._seed = chosen, chosen.processes, seed
        self._owner = owner
        self.missing: Mapping[str, str] = {}
        """Protection of the sandbox that this machine does not permit, with the reasons."""

        self._processes: dict[int, _Process] = {}
        self._idle: list[int] = []
        self._started = self._failed = self._lost_servers = 0
        self._is_awaited = False
        self._outcomes: list[tuple[int, Outcome]] = []
        self._start_server()
        try:
            while not self._idle:
                if not self._processes:
                    self._fork()
                self._look(_LOOK_S)
        except BaseException:
            self._end()
            raise

    @property
    def size(self) -> int:
        """Number of processes, with those that start."""
        return len(self._processes)

    @property
    def starting(self) -> int:
        """Number of processes that have not made their environments yet."""
        return sum(not each.ready for each in self._processes.values())

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._child.pid

    def begin(self, question: wire.Question, *, wanted: int = 1) -> bool:
        """Give a call to a process; False if there is none for it yet.

        Then processes are started, for this and others of ``wanted`` calls.
        """
        while self._idle:
            number = self._idle.pop()
            process = self._processes.get(number)
            if process is not None:
                process.call, self._is_awaited = question.call, False
                self._frames.send(number, wire.encode(question))
                return True
        self._is_awaited = True
        starting = self.starting
        room = min(self._settings.count - len(self._processes), _STARTING - starting)
        for _ in range(min(room, wanted - starting)):
            self._fork()
        return False

    def outcomes(self, wait_s: float) -> list[tuple[int, Outcome]]:
        """Return, once each, the calls that are over; wait up to ``wait_s`` for the first.

        Waits no longer either when a process is free for a call that `begin` had none for.
        """
        until_s = time.monotonic() + wait_s
        while True:
            self._look(until_s - time.monotonic())
            is_free = self._is_awaited and bool(self._idle)
            if self._outcomes or is_free or time.monotonic() >= until_s:
                found, self._outcomes = self._outcomes, []
                return found

    def stop(self, call: int) -> None:
        """Kill the process that has this call, for which there will be no outcome."""
        for number, process in self._processes.items():
            if process.call == call:
                self._kill(number)
                return

    def close(self) -> None:
        """End the server and all processes."""
        self._end()

    # -- the server --------------------------------------------------------------------------

    def _start_server(self) -> None:
        ours, theirs = wire.pair()
        config = wire.EnvironmentServerConfig(
            fd=theirs.fileno(),
            factory=self._chosen.factory,
            settings=self._chosen.settings,
            seed=self._seed,
            path=tuple(sys.path),
            processes=self._settings,
        )
        with theirs, descriptor_of(msgspec.json.encode(config)) as fd:
            self._child = Child.start(
                configured_argv(_MODULE, name=f"environments of {self._owner}", fd=fd),
                env=_variables(),
                tied=True,
                pass_fds=(fd, theirs.fileno()),
            )
        self._frames, self._loaded = wire.FrameStream(ours), False
        self._began_s = time.monotonic()
        self._end = weakref.finalize(self, _end, self._child, self._frames)

    def _look(self, wait_s: float) -> None:
        """Take what the server says, for at most so long; see to what is late."""
        if self._frames.wants_to_write:
            self._frames.flush()
            wait_s = min(wait_s, _LOOK_S)
        if not self._loaded or self.starting:
            wait_s = min(wait_s, self._settings.start_s / 4)
        try:
            if readable([self._frames.fd], wait_s):
                for number, message in self._frames.receive():
                    self._take(number, message)
        except (EOFError, CorruptError, msgspec.DecodeError) as error:
            self._lose_server(error)
        self._check_starts()

    def _take(self, number: int, message: bytes) -> None:
        if number != wire.SERVER:
            self._hear(number, message)
            return
        match wire.report.decode(message):
            case wire.ServerLoaded(missing=missing):
                self._loaded, self.missing = True, missing
                for process in self._processes.values():
                    process.since_s = time.monotonic()  # they were ordered before it could fork
            case wire.ServerRefused(why=why):
                raise ConfigError(f"environment {self._chosen.factory!r} in processes: {why}")
            case wire.ProcessEnded() as ended:
                self._bury(ended)

    def _lose_server(self, error: Exception) -> None:
        """Start another server; the calls of this one have failed."""
        code = self._child.wait(_END_S)
        self._end()
        how = str(error) if code is None else describe_exit(code)
        why = f"the server of the environment's processes ended ({how})"
        self._lost_servers += 1
        if not self._loaded or self._lost_servers > _MOST_FAILED:
            raise JobFailedError(f"environment {self._chosen.factory!r}: {why}")
        for process in self._processes.values():
            if process.call is not None:
                self._outcomes.append((process.call, ToolError(why)))
        self._processes.clear()
        self._idle.clear()
        self._start_server()

    # -- processes ---------------------------------------------------------------------------

    def _fork(self) -> None:
        self._started += 1
        self._processes[self._started] = _Process(since_s=time.monotonic())
        self._order(wire.Fork(process=self._started))

    def _order(self, order: wire.Order) -> None:
        self._frames.send(wire.SERVER, wire.encode(order))

    def _kill(self, number: int) -> None:
        del self._processes[number]
        self._order(wire.KillProcess(process=number))

    def _hear(self, number: int, message: bytes) -> None:
        """Take what a process said; what it cannot say now is garbage, and its end."""
        process = self._processes.get(number)
        if process is None:
            return
        try:
            said = wire.said.decode(message)
        except msgspec.DecodeError as error:
            self._lose(number, f"its process sent garbage ({error})")
            return
        match said:
            case wire.EnvironmentMade() if not process.ready:
                process.ready, self._failed = True, 0
                self._idle.append(number)
            case wire.Faulty(call=None, why=why) if not process.ready:
                raise ConfigError(f"environment {self._chosen.factory!r} in processes: {why}")
            case wire.Exhausted():
                process.exhausted = True
            case wire.Replied() | wire.Prompted() | wire.Faulty() | wire.ToolFailed() if (
                process.call is not None and said.call == process.call
            ):
                outcome = ToolError(said.why) if isinstance(said, wire.ToolFailed) else said
                self._outcomes.append((process.call, outcome))
                process.call, self._lost_servers = None, 0
                self._idle.append(number)
            case _:
                self._lose(number, f"its process sent {type(said).__name__} out of turn")

    def _lose(self, number: int, why: str) -> None:
        """Kill a process; its call has failed."""
        process = self._processes[number]
        self._kill(number)
        self._fail(process, why)

    def _bury(self, ended: wire.ProcessEnded) -> None:
        if (process := self._processes.pop(ended.process, None)) is not None:
            self._fail(process, _cause(ended, process, self._settings))

    def _fail(self, process: _Process, why: str) -> None:
        if process.call is not None:
            self._outcomes.append((process.call, ToolError(why)))
        if process.ready:
            return
        self._failed += 1
        if self._failed >= _MOST_FAILED:
            raise JobFailedError(
                f"environment {self._chosen.factory!r}: {self._failed} processes one after the "
                f"other did not make it: {why}"
            )

    def _check_starts(self) -> None:
        now_s, limit_s = time.monotonic(), self._settings.start_s
        if not self._loaded:
            limit_s = max(limit_s, _IMPORT_S)
            if now_s - self._began_s > limit_s:
                raise JobFailedError(
                    f"the modules of environment {self._chosen.factory!r} are not imported after "
                    f"{limit_s:g} s; import less, or give processes a longer start_s"
                )
            return
        starting = [number for number, each in self._processes.items() if not each.ready]
        for number in starting:
            if now_s - self._processes[number].since_s > limit_s:
                self._lose(number, f"it is not made after {limit_s:g} s (start_s)")


def _cause(ended: wire.ProcessEnded, process: _Process, settings: ProcessConfig) -> str:
    """Return why a process ended."""
    if process.exhausted:
        limit = f"{settings.memory} of memory" if settings.memory else "the memory that there is"
        return f"its process needed more than {limit}"
    if ended.why:
        return f"its process was given up: {ended.why}"
    if ended.code == -signal.SIGXCPU:
        return f"its process used more than {settings.cpu_s:g} s of processor"
    return f"its process ended: {describe_exit(ended.code)}"


def _variables() -> dict[str, str]:
    """Return this process's variables without Holdfast's, which have the run's key."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_OURS) or name == ALLOW_ENV
    }


def _end(child: Child, frames: wire.FrameStream) -> None:
    frames.close()
    child.kill()
    child.wait(_END_S)
