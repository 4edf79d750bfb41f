"""A fork server as its owner sees it: its state, and the orders for processes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final, NoReturn

import msgspec

from holdfast.ckpt.descriptors import descriptor_of, readable
from holdfast.ckpt.errors import PeerError
from holdfast.elastic.preload import wire
from holdfast.elastic.preload.program import program_of
from holdfast.elastic.preload.titles import OPTION, padded
from holdfast.elastic.processes.children import Child, ChildChange, describe_exit

_SERVER: Final = Path(__file__).with_name("server.py")
_SET_CHILD_SUBREAPER: Final = 36  # PR_SET_CHILD_SUBREAPER
_UNBUFFERED_ENV: Final = "PYTHONUNBUFFERED"
_FORK_S: Final = 5.0
_END_S: Final = 2.0


class ServerState(Enum):
    """The state of a fork server: it imports, it forks, it refused a module, or it has ended."""

    LOADING = "loading"
    READY = "ready"
    REFUSED = "refused"
    ENDED = "ended"


class ForkedProcess:
    """A child that another process forked for this one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def wait(self) -> int:
        """See `Process`."""
        if self._code is None:
            _, status = os.waitpid(self.pid, 0)
            self._code = os.waitstatus_to_exitcode(status)
        return self._code


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
    """The workers that a fork server forks: their command and environment.

    ``name`` is for a reader of the process list; to ``output`` go the messages of the imports.
    None: they go where those of the owner go.
    """

    command: Sequence[str]
    env: Mapping[str, str]
    name: str
    output: Path | None

    def task(self) -> wire.WorkerTask:
        """Return the workers' program. Raises ``ConfigError`` if it cannot be forked."""
        program = program_of(self.command, interpreter=sys.executable)
        return wire.WorkerTask(program=program, command=tuple(self.command))


class ForkServer:
    """A process that imports modules and then forks others, which are this process's children.

    It ends with the thread that starts it. ``why`` explains the states REFUSED and ENDED.
    """

    def __init__(self, child: Child, ours: socket.socket, *, module: str) -> None:
        """Use the process ``child``, which begins with the import of ``module``."""
        self.state, self.why, self.module = ServerState.LOADING, "", module
        self.child, self.socket = child, ours
        self.first_fd, self._unbuffered = 0, False
        self.socket.setblocking(False)
        self._groups: set[int] = set()

    @classmethod
    def start(cls, modules: Sequence[str], spec: ServerSpec) -> ForkServer:
        """Start one, which begins to import. Raises ``OSError``."""
        task = spec.task()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        config = wire.ServerConfig(modules=tuple(modules), task=task, fd=theirs.fileno())
        try:
            with theirs, descriptor_of(msgspec.json.encode(config)) as fd:
                options = ["-u"] if task.program.unbuffered else []
                argv = [sys.executable, *options, str(_SERVER)]
                argv += [OPTION, padded(spec.name), "--config-fd", str(fd)]
                fds = (fd, theirs.fileno())
                child = Child.start(argv, env=spec.env, tied=True, output=spec.output, pass_fds=fds)
        except OSError:
            ours.close()
            raise
        return cls(child, ours, module=modules[0])

    @classmethod
    def inherited(cls, fd: int) -> ForkServer:
        """Return the server that was this process's child when its program began (`branch`).

        ``fd`` is its socket. Raises ``OSError`` if the server has died before it spoke.
        """
        ours = socket.socket(fileno=fd)
        ours.set_inheritable(False)
        if not readable([fd], _FORK_S) or not (data := ours.recv(wire.PACKET_BYTES)):
            ours.close()
            raise OSError("the fork server of this process does not answer")
        loaded = msgspec.json.decode(data, type=wire.Loaded)
        found = cls(Child(ForkedProcess(loaded.pid)), ours, module="")
        found._take(loaded)
        return found

    def _take(self, loaded: wire.Loaded) -> None:
        self.state = ServerState.READY
        self.first_fd, self._unbuffered = loaded.first_fd, loaded.unbuffered

    def check(self) -> None:
        """Take its messages, and detect its end or its stop. Never blocks."""
        self._receive()
        while status := self.child.poll():
            if status.change is ChildChange.STOPPED:
                self.child.kill()  # it would not answer an order
            if status.change is ChildChange.EXITED:
                self._receive()
                self._end(describe_exit(status.code))

    def _receive(self) -> None:
        while self.state in (ServerState.LOADING, ServerState.READY):
            try:
                data = self.socket.recv(wire.PACKET_BYTES)
            except OSError:  # none, or the server is gone: its exit is reported by the kernel
                return
            if not data:
                return
            match wire.from_server.decode(data):
                case wire.ImportBegun(module=module):
                    self.module = module
                case wire.Loaded() as loaded:
                    self._take(loaded)
                case wire.Refused(module=module, reason=reason):
                    self.state, self.module, self.why = ServerState.REFUSED, module, reason

    def _end(self, why: str) -> None:
        if self.state is ServerState.LOADING:
            why = f"{why} during the import of {self.module}"
        if self.state is not ServerState.REFUSED:
            self.state, self.why = ServerState.ENDED, why

    def fork(
        self, *, env: Mapping[str, str], fds: Sequence[int], output: int | None
    ) -> ForkedProcess:
        """Fork a worker: a child of this process, in a session of its own, which ends with it.

        Its environment is the server's with ``env``; its descriptors are copies of ``fds`` with the
        numbers from ``first_fd`` on. Raises ``PeerError`` if the server does not fork any more;
        then no worker has begun.
        """
        order = wire.ForkOrder(
            env=dict(env),
            fds=self._numbers(len(fds)),
            has_output=output is not None,
            owner=os.getpid(),
        )
        return self._carry_out(order, [*([] if output is None else [output]), *fds])

    def branch(
        self,
        argv: Sequence[str],
        spec: ServerSpec,
        *,
        env: Mapping[str, str],
        stdin: int,
        config: int,
    ) -> ForkedProcess:
        """Start a program that owns a fork server for ``spec``, which has the imports already.

        The program is a child of this process as a worker of `fork` is. There the descriptor
        ``config`` has the number ``first_fd``, and that for `inherited` the next one. Raises
        ``PeerError`` as `fork` does, and if the workers' interpreter needs other options.
        """
        task = spec.task()
        unbuffered = task.program.unbuffered or bool(spec.env.get(_UNBUFFERED_ENV))
        if unbuffered != self._unbuffered:
            raise PeerError("the fork server's interpreter has other options")
        order = wire.BranchOrder(
            argv=tuple(argv),
            directory=str(Path.cwd()),
            env=dict(env),
            fds=self._numbers(1),
            socket=self.first_fd + 1,
            owner=os.getpid(),
            task=task,
            name=spec.name,
            server_env=dict(spec.env),
            output=str(spec.output or ""),
        )
        return self._carry_out(order, [stdin, 1, 2, config])

    def _numbers(self, count: int) -> tuple[int, ...]:
        return tuple(range(self.first_fd, self.first_fd + count))

    def _carry_out(self, order: wire.Order, fds: Sequence[int]) -> ForkedProcess:
        self._bury_adopted()
        ours, theirs = socket.socketpair()
        with ours, _adopting():
            with theirs, descriptor_of(wire.encode(order)) as described:
                try:
                    socket.send_fds(self.socket, [b"\0"], [described, theirs.fileno(), *fds])
                except OSError as error:
                    code = self.child.wait(_END_S)
                    self._lose(str(error) if code is None else describe_exit(code))
            pid = self._answer(ours)
        self._groups.add(pid)
        return ForkedProcess(pid)

    def _answer(self, worker: socket.socket) -> int:
        """Return the worker's process id, once it is this process's child, and let it begin."""
        answer = b""
        with contextlib.suppress(OSError):
            if readable([worker.fileno()], _FORK_S):
                answer = worker.recv(wire.PID_BYTES)
        if not answer:
            self._lose(f"it forked no worker within {_FORK_S:g} s")
        with contextlib.suppress(OSError):  # it has died: its exit is reported by the kernel
            worker.sendall(wire.GO)
        return int.from_bytes(answer, sys.byteorder)

    def _lose(self, why: str) -> NoReturn:
        self.child.kill()
        self._end(why)
        raise PeerError(why)

    def _bury_adopted(self) -> None:
        """Reap what was adopted beside a worker: an orphan of another worker, if it has ended.

        It is in the process group of its worker, which is killed when that ends.
        """
        for group in tuple(self._groups):
            try:
                while found := os.waitid(os.P_PGID, group, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                    if found.si_pid == group:
                        break  # the worker itself, which its own object reaps
                    os.waitid(os.P_PID, found.si_pid, os.WEXITED | os.WNOHANG)
            except ChildProcessError:
                self._groups.discard(group)

    def close(self) -> None:
        """End it; the workers stay."""
        self.socket.close()
        self.child.kill()
        self.child.wait(_END_S)


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Make orphans among this process's descendants its children."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
