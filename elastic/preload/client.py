"""A node's fork server as its agent sees it: its state, and the orders for workers."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Final, NoReturn

import msgspec

from holdfast.ckpt.descriptors import descriptor_of, readable
from holdfast.ckpt.errors import PeerError
from holdfast.elastic.preload import wire
from holdfast.elastic.preload.program import program_of
from holdfast.elastic.processes.children import Child, ChildChange, describe_exit

_SERVER: Final = Path(__file__).with_name("server.py")
_SET_CHILD_SUBREAPER: Final = 36  # PR_SET_CHILD_SUBREAPER
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


class ForkServer:
    """A process that imports modules and then forks workers, which are this process's children.

    It ends with the thread that starts it. ``why`` explains the states REFUSED and ENDED.
    """

    def __init__(
        self,
        modules: Sequence[str],
        command: Sequence[str],
        *,
        name: str,
        env: Mapping[str, str],
        output: Path | None,
    ) -> None:
        """Start it, with the environment of the workers. Raises ``OSError``.

        ``name`` is for a reader of the process list; to ``output`` go the messages of the imports.
        """
        self.state, self.why, self.module = ServerState.LOADING, "", modules[0]
        self.first_fd = 0
        self.began_s = time.monotonic()
        self._groups: set[int] = set()
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.setblocking(False)
        config = wire.ServerConfig(
            modules=tuple(modules),
            program=program_of(command, interpreter=sys.executable),
            command=tuple(command),
            fd=theirs.fileno(),
        )
        try:
            with theirs, descriptor_of(msgspec.json.encode(config)) as fd:
                options = ["-u"] if config.program.unbuffered else []
                argv = [sys.executable, *options, str(_SERVER)]
                argv += ["--name", name, "--config-fd", str(fd)]
                self.child = Child.start(
                    argv, env=env, tied=True, output=output, pass_fds=(fd, theirs.fileno())
                )
        except OSError:
            self.socket.close()
            raise

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
                case wire.Loaded(first_fd=first_fd):
                    self.state, self.first_fd = ServerState.READY, first_fd
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
        numbers from ``first_fd`` on. Raises ``PeerError`` if the
        server does not fork any more; then no worker has begun.
        """
        order = wire.ForkOrder(
            env=dict(env),
            fds=tuple(range(self.first_fd, self.first_fd + len(fds))),
            has_output=output is not None,
            agent=os.getpid(),
        )
        self._bury_adopted()
        ours, theirs = socket.socketpair()
        with ours, _adopting():
            with theirs, descriptor_of(wire.encode(order)) as described:
                passed = [described, theirs.fileno(), *([] if output is None else [output]), *fds]
                try:
                    socket.send_fds(self.socket, [b"\0"], passed)
                except OSError as error:
                    self._lose(str(error))
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
