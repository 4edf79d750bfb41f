"""A listening socket that lets in no more strangers than it can bear.

ZeroMQ accepts every connection, and closes it if it has shown no key in time. Until then each takes
a descriptor and some memory. So while too many new connections have said nothing genuine, or the
process runs out of descriptors, the kernel drops further attempts to connect; clients repeat
theirs by themselves. In such a crowd a connection must show its key soon, so that it makes room for
the next, which may be a client's.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import math
import os
import resource
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import monotonic
from typing import Any, Final

import zmq

from holdfast.ckpt.transport.sockets import HANDSHAKE_MS, next_event

_log = logging.getLogger(__name__)

STRANGERS: Final = 256
"""The most connections that have not shown a key yet."""

CROWDED_S: Final = 3.0
"""Time that a connection has to show a key while there are too many that did not."""

_STRANGERS_SHARE: Final = 0.125  # of the descriptors
_SHARE: Final = 0.75  # of the descriptors; the rest is for files, pipes and children
_KNOWN_AFTER_S: Final = HANDSHAKE_MS / 1000 + 1.0  # ZeroMQ has closed strangers by then
_ATTACH, _DETACH = 26, 27  # SO_ATTACH_FILTER, SO_DETACH_FILTER; not in Python's socket module
_DROP_ALL: Final = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
_LOOK_MS: Final = 100
_WARN_EVERY_S: Final = 60.0


class Door:
    """Watches the connections of a server's socket, made before it is bound.

    ``monitor`` is to be polled with `look` after every event, and at least every ``pause_ms``. For
    the thread of the socket only.
    """

    def __init__(
        self, router: zmq.Socket[bytes], *, clock: Callable[[], float] = monotonic
    ) -> None:
        self._router, self._clock = router, clock
        events = zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
        self.monitor = router.get_monitor_socket(events)
        self._listening: socket.socket | None = None
        self._strangers: dict[int, _Stranger] = {}
        self._newest = 0
        self._warned_s = -math.inf
        self.shut = False

    @property
    def pause_ms(self) -> int | None:
        """The longest time between two looks; None if an event begins each."""
        return _LOOK_MS if self.shut else None

    def received(self, *, most: int) -> Iterator[tuple[bytes, list[Any]]]:
        """Yield the messages that wait, with their peers; ``most`` at once, to be fair to replies.

        Each message is that of a peer with a key.
        """
        for _ in range(most):
            try:
                peer, *parts = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self.known(peer)
            yield peer.bytes, [part.buffer for part in parts]

    def known(self, message: zmq.Frame) -> None:
        """Note the connection that sent a genuine message."""
        if self._strangers:
            with contextlib.suppress(zmq.ZMQError):
                self._strangers.pop(int(message.get(zmq.SRCFD)), None)

    def look(self) -> None:
        """Take in the events; shut or open."""
        while event := next_event(self.monitor):
            self._take(*event)
        for fd in self._elder(_KNOWN_AFTER_S):
            del self._strangers[fd]
        if self._is_crowded():
            for fd in self._elder(CROWDED_S):
                self._strangers.pop(fd).put_out(fd)
        crowded = self._is_crowded()
        scarce = self._is_scarce()
        if (crowded or scarce) != self.shut and self._listening is not None:
            self._set(shut=crowded or scarce)

    def _elder(self, age_s: float) -> list[int]:
        """Return the strangers that have been there so long; they are in order of their age."""
        before_s = self._clock() - age_s
        return [
            *itertools.takewhile(lambda fd: self._strangers[fd].since_s < before_s, self._strangers)
        ]

    def _is_crowded(self) -> bool:
        most = min(STRANGERS, _most_descriptors() * _STRANGERS_SHARE)
        return len(self._strangers) >= most

    def close(self) -> None:
        """Release the descriptors; the socket itself is closed by its owner."""
        if self._listening is not None:
            self._listening.close()

    def _take(self, kind: int, fd: int) -> None:
        if kind == zmq.EVENT_LISTENING:
            self._listening = socket.socket(fileno=os.dup(fd))
        elif kind == zmq.EVENT_DISCONNECTED:
            self._strangers.pop(fd, None)
        elif kind == zmq.EVENT_ACCEPTED:
            self._newest = fd
            self._strangers.pop(fd, None)  # to the end
            self._strangers[fd] = _Stranger(self._clock(), _peer_of(fd))

    def _is_scarce(self) -> bool:
        """Return whether few descriptors are left: the kernel gives the lowest free number."""
        most = _most_descriptors() * _SHARE
        if not self.shut and self._newest < most:
            return False
        try:
            lowest = os.open(os.devnull, os.O_RDONLY)
        except OSError:
            return True
        os.close(lowest)
        self._newest = 0
        return lowest >= most

    def _set(self, *, shut: bool) -> None:
        assert self._listening is not None
        program = struct.pack("HP", 1, ctypes.addressof(_DROP_ALL)) if shut else 0
        try:
            self._listening.setsockopt(socket.SOL_SOCKET, _ATTACH if shut else _DETACH, program)
        except OSError as error:  # a kernel without filters
            _log.debug("connections cannot be held back: %s", error)
        self.shut = shut
        now_s = self._clock()
        if shut and now_s > self._warned_s + _WARN_EVERY_S:
            self._warned_s = now_s
            _log.warning(
                "new connections wait: %d that showed no key yet are open, or few of this "
                "process's descriptors are left (ulimit -n)",
                len(self._strangers),
            )


@dataclass(frozen=True, slots=True)
class _Stranger:
    """A connection that has shown no key, since when, and its other end."""

    since_s: float
    peer: object

    def put_out(self, fd: int) -> None:
        """End the connection, unless its number is already that of another file."""
        with _opened(fd) as found:
            if found is not None and self.peer is not None and _name_of(found) == self.peer:
                with contextlib.suppress(OSError):
                    found.shutdown(socket.SHUT_RDWR)


def _peer_of(fd: int) -> object:
    with _opened(fd) as found:
        return _name_of(found) if found is not None else None


def _name_of(found: socket.socket) -> object:
    try:
        return found.getpeername()
    except OSError:
        return None


@contextlib.contextmanager
def _opened(fd: int) -> Iterator[socket.socket | None]:
    """Yield a socket of this process by its number, None if it is no socket any more."""
    try:
        own = os.dup(fd)
    except OSError:
        yield None
        return
    try:
        found = socket.socket(fileno=own)
    except OSError:
        os.close(own)
        yield None
        return
    with found:
        yield found


def _most_descriptors() -> float:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return math.inf if soft == resource.RLIM_INFINITY else soft
