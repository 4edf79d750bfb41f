"""Queues to and from worker processes that stay usable when a process is killed.

multiprocessing's queues have semaphores. A semaphore that a killed process held is never released,
and its name stays in ``/dev/shm`` if the rank is killed. Its tensors are requested through sockets
in temporary directories, which stay too. Here the lock is the kernel's (a record lock ends with its
process), nothing has a name, and a tensor's memory travels with its message.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import mmap
import os
import queue
import socket
import struct
import threading
import time
from multiprocessing import context, reduction
from multiprocessing.connection import wait
from typing import Any

_HEAD = struct.Struct("=QI")  # bytes of the message, number of descriptors before it
_FDS_AT_ONCE = 200  # the kernel takes 253
_SHUT_POLL_S = 0.05

_arriving = threading.local()


class Sender:
    """Target of `DupFd` while a message is pickled; records the descriptors."""

    def __init__(self) -> None:
        self.fds: list[int] = []

    def duplicate_for_child(self, fd: int) -> int:
        """Keep a copy of ``fd`` to send along; return its number in the message."""
        self.fds.append(os.dup(fd))
        return len(self.fds) - 1

    @staticmethod
    def DupFd(number: int) -> Arrived:
        """Return the object that represents a descriptor in the message."""
        return Arrived(number)


class Arrived:
    """A descriptor of the message that is being unpickled."""

    def __init__(self, number: int) -> None:
        self._number = number

    def detach(self) -> int:
        """Return the descriptor; the caller owns it from now on."""
        fds: dict[int, int] = _arriving.fds
        return fds.pop(self._number)


class PipeQueue:
    """A queue of pickled objects between a rank and its workers; one process reads it.

    `put` pickles an object at once and a thread sends it, so `put` never waits. A DataLoader bounds
    the number of pending requests, and so the length of the queue.
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._turn = os.memfd_create("holdfast-turn", os.MFD_CLOEXEC)
        self._begin()

    def _begin(self) -> None:
        self._outbox: queue.SimpleQueue[tuple[bytes, list[int]] | None] = queue.SimpleQueue()
        self._sending = self._is_shut = False

    def __getstate__(self) -> tuple[Any, ...]:
        context.assert_spawning(self)
        fds = self._reader.fileno(), self._writer.fileno(), self._turn
        return tuple(reduction.DupFd(fd) for fd in fds)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        reader, writer, self._turn = (each.detach() for each in state)
        self._reader, self._writer = socket.socket(fileno=reader), socket.socket(fileno=writer)
        self._begin()

    def put(self, item: Any) -> None:
        """Send ``item``. Raises the errors of pickling it."""
        self._outbox.put(_packed(item))
        if not self._sending:
            self._sending = True
            threading.Thread(target=self._send_all, name="data-queue", daemon=True).start()

    def _send_all(self) -> None:
        with contextlib.suppress(OSError):  # closed: it has no reader any more
            while message := self._outbox.get():
                self._send(*message)

    def _send(self, message: bytes, fds: list[int]) -> None:
        fcntl.lockf(self._turn, fcntl.LOCK_EX)
        try:
            self._writer.sendall(_HEAD.pack(len(message), len(fds)))
            for at in range(0, len(fds), _FDS_AT_ONCE):
                socket.send_fds(self._writer, [b"\0"], fds[at : at + _FDS_AT_ONCE])
            self._writer.sendall(message)
        finally:
            fcntl.lockf(self._turn, fcntl.LOCK_UN)
            for fd in fds:
                os.close(fd)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Return the next object. Raises ``queue.Empty`` after ``timeout`` seconds without one.

        A queue that was shut is empty. Raises ``EOFError`` if another process shut it.
        """
        if not wait([self._reader], timeout if block else 0):
            raise queue.Empty
        try:
            return self._next()
        except EOFError:
            if not self._is_shut:
                raise
        time.sleep(_SHUT_POLL_S)  # torch's thread for pinned memory polls in a loop
        raise queue.Empty

    def _next(self) -> Any:
        size, count = _HEAD.unpack(self._exactly(_HEAD.size))
        fds: list[int] = []
        while len(fds) < count:
            mark, more, _, _ = socket.recv_fds(self._reader, 1, _FDS_AT_ONCE)
            if not mark:
                raise EOFError("the queue was closed")
            fds += more
        return _unpacked(self._exactly(size), fds)

    def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        view, have = memoryview(data), 0
        while have < size:
            got = self._reader.recv_into(view[have:])
            if not got:
                raise EOFError("the queue was closed")
            have += got
        return data

    def shut(self) -> None:
        """Stop every thread and process that sends or waits here."""
        self._is_shut = True
        self._outbox.put(None)
        for end in (self._reader, self._writer):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def __del__(self) -> None:
        if hasattr(self, "_turn"):
            os.close(self._turn)

    def cancel_join_thread(self) -> None:
        """Do nothing: a process never waits at its end for unsent objects."""

    def close(self) -> None:
        """Do nothing: the ends are closed with the object."""


class Flag:
    """A bit that all processes see once it is set; DataLoader uses it as an Event."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("holdfast-flag", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, mmap.PAGESIZE)
        self._page = mmap.mmap(self._fd, mmap.PAGESIZE)

    def __getstate__(self) -> Any:
        context.assert_spawning(self)
        return reduction.DupFd(self._fd)

    def __setstate__(self, state: Any) -> None:
        self._fd = state.detach()
        self._page = mmap.mmap(self._fd, mmap.PAGESIZE)

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)

    def set(self) -> None:
        """Set it."""
        self._page[0] = 1

    def is_set(self) -> bool:
        """Return whether it was set."""
        return bool(self._page[0])


def _packed(item: Any) -> tuple[bytes, list[int]]:
    sender, message = Sender(), io.BytesIO()
    # A finalizer may put an object while this same thread pickles another.
    before = context.get_spawning_popen()
    context.set_spawning_popen(sender)  # type: ignore[arg-type]  # it has the methods that are used
    try:
        reduction.dump(item, message)
    except BaseException:
        for fd in sender.fds:
            os.close(fd)
        raise
    finally:
        context.set_spawning_popen(before)
    return message.getvalue(), sender.fds


def _unpacked(message: bytearray, fds: list[int]) -> Any:
    _arriving.fds = dict(enumerate(fds))
    try:
        return reduction.ForkingPickler.loads(message)
    finally:
        for fd in _arriving.fds.values():  # of objects that could not be unpickled
            os.close(fd)
