"""Queues into and out of worker processes that a killed process leaves as they were.

multiprocessing's queues have semaphores: one that a killed process held is never given back, and
their names stay in ``/dev/shm`` when the rank is killed; its tensors are asked for through sockets
in temporary directories that stay too. Here the lock is the kernel's (a record lock ends with its
process), nothing has a name, and the memory of a tensor travels with the message it is in.
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

_HEAD = struct.Struct("=QI")  # bytes of the message, descriptors that come before it
_FDS_AT_ONCE = 200  # the kernel takes 253
_SHUT_POLL_S = 0.05

_arriving = threading.local()


class Sender:
    """What a `DupFd` is made for while a message is pickled: it notes the descriptors."""

    def __init__(self) -> None:
        self.fds: list[int] = []

    def duplicate_for_child(self, fd: int) -> int:
        """Keep a copy of ``fd`` to send along; return its number in the message."""
        self.fds.append(os.dup(fd))
        return len(self.fds) - 1

    @staticmethod
    def DupFd(number: int) -> Arrived:
        """Return what stands for a descriptor in the message."""
        return Arrived(number)


class Arrived:
    """A descriptor of the message that is being unpickled."""

    def __init__(self, number: int) -> None:
        self._number = number

    def detach(self) -> int:
        """Return the descriptor, which is the caller's from now on."""
        fds: dict[int, int] = _arriving.fds
        return fds.pop(self._number)


class PipeQueue:
    """A queue of pickled objects between a rank and its workers; one process reads it.

    What is put is pickled at once and sent by a thread, so `put` never waits. It is as long as
    the requests that are under way, which a DataLoader bounds.
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
        """Send ``item``. Raises what pickling it raises."""
        self._outbox.put(_packed(item))
        if not self._sending:
            self._sending = True
            threading.Thread(target=self._send_all, name="data-queue", daemon=True).start()

    def _send_all(self) -> None:
        with contextlib.suppress(OSError):  # closed: nobody reads it any more
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

        A queue that was shut is empty. Raises ``EOFError`` where another process shut it.
        """
        if not wait([self._reader], timeout if block else 0):
            raise queue.Empty
        try:
            return self._next()
        except EOFError:
            if not self._is_shut:
                raise
        time.sleep(_SHUT_POLL_S)  # torch's thread for pinned memory asks again and again
        raise queue.Empty

    def _next(self) -> Any:
        size, count = _HEAD.unpack(self._exactly(_HEAD.size))
        fds: list[int] = []
        while len(fds) < count:
            told, more, _, _ = socket.recv_fds(self._reader, 1, _FDS_AT_ONCE)
            if not told:
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
        """Have whoever sends or waits here stop, in whatever thread or process."""
        self._is_shut = True
        self._outbox.put(None)
        for end in (self._reader, self._writer):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def __del__(self) -> None:
        if hasattr(self, "_turn"):
            os.close(self._turn)

    def cancel_join_thread(self) -> None:
        """Nothing: a process never waits at its end for what is not sent yet."""

    def close(self) -> None:
        """Nothing: the ends are closed with the object."""


class Flag:
    """A bit that all processes see, once it is set; what DataLoader uses an Event for."""

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
        """Say whether it was set."""
        return bool(self._page[0])


def _packed(item: Any) -> tuple[bytes, list[int]]:
    sender, message = Sender(), io.BytesIO()
    # A finalizer may put something while this very thread pickles something else.
    before = context.get_spawning_popen()
    context.set_spawning_popen(sender)  # type: ignore[arg-type]  # it has what is asked for
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
        for fd in _arriving.fds.values():  # of what could not be unpickled
            os.close(fd)
