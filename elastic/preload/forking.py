"""The loop of a fork server, and the first moments of the processes that it forks.

A worker must be the child of the server's owner, an agent. For the kernel tells only the parent of
its stops and its end, and kills it with the parent. The server forks twice and the process in the
middle ends at once. The kernel gives the orphan to the nearest ancestor that adopts orphans
(``PR_SET_CHILD_SUBREAPER``): the owner, for the moment of the order.

A server that a launcher owns can make the agents themselves. Such a process forks a server of its
own, which has all imports already, and then executes the agent's program: so that server is the
agent's child, and its workers can become that too.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from holdfast.ckpt.descriptors import allow_many
from holdfast.elastic.loop.uncaught.hook import watch_worker
from holdfast.elastic.preload import wire
from holdfast.elastic.preload.loading import UnfitModuleError, load
from holdfast.elastic.preload.running import search_path_entry
from holdfast.elastic.preload.titles import retitle

_SET_DEATH_SIGNAL: Final = 1  # PR_SET_PDEATHSIG
_ORPHANED_STATUS: Final = 137
_NO_PROGRAM_STATUS: Final = 127
_LOOK_S: Final = 0.0002
_FREE_FDS: Final = 32
"""Descriptors below ``first_fd`` that are left for an order, until they have their numbers."""


def serve(config: wire.ServerConfig) -> wire.WorkerTask | None:
    """Import, then carry out orders; return the task of a worker in it, None when the owner ends.

    A server that is forked for another owner goes on here.
    """
    owner, task = socket.socket(fileno=config.fd), config.task
    owner.set_inheritable(False)
    try:
        load(config.modules, lambda name: _tell(owner, wire.ImportBegun(module=name)))
    except UnfitModuleError as error:
        _tell(owner, wire.Refused(module=error.module, reason=error.reason))
        return None
    first_fd = max(_open_fds()) + _FREE_FDS
    _tell_ready(owner, first_fd)
    while (received := _receive(owner)) is not None:
        order, fds = received
        if not _fork(fds, owner=order.owner):
            continue
        owner.close()
        if isinstance(order, wire.ForkOrder):
            _begin(order, fds, first_fd=first_fd)
            return task
        owner = _branch(order, fds, before=task, first_fd=first_fd)
        task = order.task
        _tell_ready(owner, first_fd)
    return None


def _tell(owner: socket.socket, message: wire.FromServer) -> None:
    owner.send(wire.encode(message))


def _tell_ready(owner: socket.socket, first_fd: int) -> None:
    unbuffered = bool(sys.stdout.write_through)  # type: ignore[union-attr]
    _tell(owner, wire.Loaded(first_fd=first_fd, pid=os.getpid(), unbuffered=unbuffered))


def _receive(owner: socket.socket) -> tuple[wire.Order, list[int]] | None:
    """Return the next order with its descriptors, None when the owner has ended."""
    data, fds, _, _ = socket.recv_fds(owner, 1, wire.MOST_FDS, socket.MSG_CMSG_CLOEXEC)
    if not data:
        return None
    with os.fdopen(fds[0], "rb") as file:
        file.seek(0)
        return wire.order.decode(file.read()), fds[1:]


def _fork(fds: list[int], *, owner: int) -> bool:
    """Fork a process that is an orphan; return True in it, once the owner has adopted it."""
    middle = os.fork()
    if middle:
        for fd in fds:
            os.close(fd)
        os.waitpid(middle, 0)
        return False
    parent = os.getpid()
    if os.fork():
        os._exit(0)
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    _end_with(owner)
    return True


def _end_with(parent: int) -> None:
    """End this process when its parent ends, or now if that is another one than ``parent``."""
    if os.getppid() == parent:
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(_ORPHANED_STATUS)


def _begin(order: wire.ForkOrder, fds: list[int], *, first_fd: int) -> None:
    """Make this process the worker that its owner ordered; end it if the owner gave it up."""
    os.setsid()
    answer, *rest = fds
    if order.has_output:
        output = rest.pop(0)
        for stream in (1, 2):
            os.dup2(output, stream)
        os.close(output)
        for file in (sys.stdout, sys.stderr):
            file.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    _number(rest, order.fds, first_fd=first_fd)
    _answer(answer)
    os.environ.update(order.env)
    gc.unfreeze()
    _draw_anew()
    watch_worker()


def _number(fds: Sequence[int], numbers: Sequence[int], *, first_fd: int) -> None:
    for fd, number in zip(fds, numbers, strict=True):
        assert fd < first_fd <= number, (fd, first_fd, number)
        os.dup2(fd, number)
        os.close(fd)


def _answer(fd: int) -> None:
    """Tell the owner this process's id, and wait until it knows that its child begins."""
    with socket.socket(fileno=fd) as owner:
        owner.send(os.getpid().to_bytes(wire.PID_BYTES, sys.byteorder))
        if owner.recv(len(wire.GO)) != wire.GO:
            os._exit(_ORPHANED_STATUS)


def _branch(
    order: wire.BranchOrder, fds: list[int], *, before: wire.WorkerTask, first_fd: int
) -> socket.socket:
    """Fork a server and execute the program of the order; return the socket in the server.

    ``before`` is the task of the server that got the order.
    """
    old_entry = search_path_entry(before.program)
    os.setsid()
    os.chdir(order.directory)
    answer, *rest = fds
    for stream, fd in enumerate(rest[:3]):
        os.dup2(fd, stream)
        os.close(fd)
    _number(rest[3:], order.fds, first_fd=first_fd)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    if os.fork():
        os.dup2(ours.fileno(), order.socket)
        _execute(order, answer)
    _end_with(parent)
    os.setsid()
    ours.close()
    for fd in (answer, *order.fds):
        os.close(fd)
    _set_streams(order.output)
    os.environ.clear()
    os.environ.update(order.server_env)
    new_entry = search_path_entry(order.task.program)
    if not sys.flags.safe_path and old_entry in sys.path:
        sys.path[sys.path.index(old_entry)] = new_entry
    retitle(order.name)
    return theirs


def _execute(order: wire.BranchOrder, answer: int) -> NoReturn:
    _answer(answer)
    allow_many()
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which the interpreter ignores
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execve(order.argv[0], order.argv, order.env)
    finally:
        os._exit(_NO_PROGRAM_STATUS)


def _set_streams(output: str) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    if output:
        log = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.close(log)


def _draw_anew() -> None:
    """Seed anew what a fresh process seeds from the system, so that workers do not share it.

    The interpreter does so for ``random``. torch's generator keeps the state that the server's
    imports left: they may have seeded it, and a run seeds it before each microbatch.
    """
    if numpy_random := sys.modules.get("numpy.random"):
        drawing: Any = numpy_random
        drawing.seed()
    if process := sys.modules.get("multiprocessing.process"):
        starting: Any = process
        starting.current_process().authkey = os.urandom(32)


def _open_fds() -> list[int]:
    return [int(path.name) for path in Path("/proc/self/fd").iterdir()]
