"""The loop of a fork server, and the first moments of a forked worker.

The worker must be the agent's child, for the kernel tells only the parent of its stops and its end,
and kills it with the parent. The server forks twice and the process in the middle ends at once. The
kernel gives the orphan to the nearest ancestor that adopts orphans (``PR_SET_CHILD_SUBREAPER``):
the agent, for the moment of the order.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, Final

from holdfast.elastic.loop.uncaught.hook import watch_worker
from holdfast.elastic.preload import wire
from holdfast.elastic.preload.loading import UnfitModuleError, load

_SET_DEATH_SIGNAL: Final = 1  # PR_SET_PDEATHSIG
_ORPHANED_STATUS: Final = 137
_LOOK_S: Final = 0.0002
_FREE_FDS: Final = 32
"""Descriptors below ``first_fd`` that are left for an order, until they have their numbers."""


def serve(config: wire.ServerConfig) -> bool:
    """Import, then fork on every order; return True in a worker, False when the agent has ended."""
    with socket.socket(fileno=config.fd) as agent:
        agent.set_inheritable(False)
        try:
            load(config.modules, lambda name: _tell(agent, wire.ImportBegun(module=name)))
        except UnfitModuleError as error:
            _tell(agent, wire.Refused(module=error.module, reason=error.reason))
            return False
        first_fd = max(_open_fds()) + _FREE_FDS
        _tell(agent, wire.Loaded(first_fd=first_fd))
        while (order := _receive(agent)) is not None:
            if _fork(*order):
                break
    if order is None:
        return False
    _begin(*order, first_fd=first_fd)
    return True


def _tell(agent: socket.socket, message: wire.FromServer) -> None:
    agent.send(wire.encode(message))


def _receive(agent: socket.socket) -> tuple[wire.ForkOrder, list[int]] | None:
    """Return the next order with its descriptors, None when the agent has ended."""
    data, fds, _, _ = socket.recv_fds(agent, 1, wire.MOST_FDS, socket.MSG_CMSG_CLOEXEC)
    if not data:
        return None
    with os.fdopen(fds[0], "rb") as file:
        file.seek(0)
        return wire.fork_order.decode(file.read()), fds[1:]


def _fork(order: wire.ForkOrder, fds: list[int]) -> bool:
    """Fork a worker that is an orphan; return True in it, once the agent has adopted it."""
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
    if os.getppid() != order.agent:
        os._exit(_ORPHANED_STATUS)
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != order.agent:
        os._exit(_ORPHANED_STATUS)
    return True


def _begin(order: wire.ForkOrder, fds: list[int], *, first_fd: int) -> None:
    """Make this process the worker that the agent ordered; end it if the agent gave it up."""
    os.setsid()
    answer, *rest = fds
    if order.has_output:
        output = rest.pop(0)
        for stream in (1, 2):
            os.dup2(output, stream)
        os.close(output)
        for file in (sys.stdout, sys.stderr):
            file.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    for fd, number in zip(rest, order.fds, strict=True):
        assert fd < first_fd <= number, (fd, first_fd, number)
        os.dup2(fd, number)
        os.close(fd)
    with socket.socket(fileno=answer) as agent:
        agent.send(os.getpid().to_bytes(wire.PID_BYTES, sys.byteorder))
        if agent.recv(len(wire.GO)) != wire.GO:
            os._exit(_ORPHANED_STATUS)
    os.environ.update(order.env)
    gc.unfreeze()
    _draw_anew()
    watch_worker()


def _draw_anew() -> None:
    """Seed anew what a fresh process seeds from the system, so that workers do not share it.

    The interpreter does so for ``random``; torch's generators begin with a fixed seed.
    """
    if numpy_random := sys.modules.get("numpy.random"):
        drawing: Any = numpy_random
        drawing.seed()
    if process := sys.modules.get("multiprocessing.process"):
        starting: Any = process
        starting.current_process().authkey = os.urandom(32)


def _open_fds() -> list[int]:
    return [int(path.name) for path in Path("/proc/self/fd").iterdir()]
