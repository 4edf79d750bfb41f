"""The TCP connections of other processes: found in /proc, cut and reset by the kernel itself.

A socket of another process is borrowed (``pidfd_getfd``, Linux 5.6) and gets a filter with which
the kernel drops its incoming packets. TCP above it behaves as if a cable were cut: it waits,
resends, and gives up in its own time, and no process is informed. No process is changed, and
nothing else on the machine is affected.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import ipaddress
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

_GETFD: Final = 438
_ATTACH, _DETACH = 26, 27  # SO_ATTACH_FILTER, SO_DETACH_FILTER
_LOAD, _JUMP_IF_LESS_NOT, _RETURN = 0x20, 0x35, 0x06  # ld [k]; jge #k; ret #k
_RANDOM: Final = 0xFFFFF000 + 56
"""Offset at which a filter reads a random number: SKF_AD_OFF + SKF_AD_RANDOM."""

_ALL: Final = 0xFFFFFFFF
_LISTENS: Final = "0A"
_ENDED: Final = {"06", "07"}  # TIME_WAIT and CLOSE belong to no process
_INSTRUCTION: Final = struct.Struct("HBBI")
_PROGRAM: Final = struct.Struct("HxxxxxxP")
_UNSPECIFIED: Final = bytes(16)
_libc = ctypes.CDLL(None, use_errno=True)

Address: TypeAlias = tuple[str, int]


class End(msgspec.Struct, frozen=True, kw_only=True):
    """One end of a connection, or a listener: a socket that process ``pid`` has as ``fd``.

    ``space`` is the network namespace if the addresses are ambiguous without it (loopback), else
    "".
    """

    pid: int
    fd: int
    inode: int
    local: Address
    remote: Address
    listens: bool
    space: str = ""

    @property
    def other(self) -> tuple[str, Address, Address]:
        """The key of the other end."""
        return self.space, self.remote, self.local

    @property
    def key(self) -> tuple[str, Address, Address]:
        """The key of this end."""
        return self.space, self.local, self.remote


def ends(pids: Iterable[int]) -> list[End]:
    """Return every TCP socket of the processes; a process that is gone has none."""
    found: list[End] = []
    tables: dict[str, dict[int, tuple[Address, Address, str]]] = {}
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            space = str(Path(f"/proc/{pid}/ns/net").readlink())
            sockets = sockets_of(pid)
            table = tables.get(space)
            if table is None:
                table = tables[space] = _table(pid)
            for fd, inode in sockets.items():
                if row := table.get(inode):
                    local, remote, state = row
                    found.append(
                        End(
                            pid=pid,
                            fd=fd,
                            inode=inode,
                            local=local,
                            remote=remote,
                            listens=state == _LISTENS,
                            space=space if _is_loopback(local[0]) else "",
                        )
                    )
    return found


def pairs(inside: list[End], outside: list[End]) -> list[tuple[End, End | None]]:
    """Return every connection that leaves ``inside``, with its other end if ``outside`` has it."""
    own = {end.key for end in inside}
    others = {end.key: end for end in outside}
    return [
        (end, others.get(end.other)) for end in inside if not end.listens and end.other not in own
    ]


def program(share: float) -> bytes:
    """Return the kernel's filter program that drops a share of all packets. Pure."""
    if share >= 1:
        return _INSTRUCTION.pack(_RETURN, 0, 0, 0)
    instructions = (
        (_LOAD, 0, 0, _RANDOM),
        (_JUMP_IF_LESS_NOT, 1, 0, int(share * _ALL)),
        (_RETURN, 0, 0, 0),
        (_RETURN, 0, 0, _ALL),
    )
    return b"".join(_INSTRUCTION.pack(*each) for each in instructions)


def drop(end: End, share: float = 1.0) -> bool:
    """Make the kernel drop a share of a socket's incoming packets; False if the socket is gone."""
    filters = ctypes.create_string_buffer(program(share), len(program(share)))
    packed = _PROGRAM.pack(len(filters) // _INSTRUCTION.size, ctypes.addressof(filters))
    with _borrowed(end) as found:
        if found is not None:
            found.setsockopt(socket.SOL_SOCKET, _ATTACH, packed)
        return found is not None


def hear(end: End) -> None:
    """Remove the filter."""
    with _borrowed(end) as found, contextlib.suppress(FileNotFoundError):
        if found is not None:
            found.setsockopt(socket.SOL_SOCKET, _DETACH, 0)


def reset(end: End) -> bool:
    """End a connection by RST, which informs both sides. False if the socket is gone."""
    with _borrowed(end) as found:
        if found is None:
            return False
        if _libc.connect(found.fileno(), _UNSPECIFIED, len(_UNSPECIFIED)):  # AF_UNSPEC: disconnect
            with contextlib.suppress(OSError):
                found.shutdown(socket.SHUT_RDWR)  # kernels refuse while a thread waits in it
        return True


def borrow(pid: int, fd: int) -> int | None:
    """Return a descriptor of what a process has as ``fd``; None if either is gone.

    Raises ``PermissionError``.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    try:
        found: int = _libc.syscall(_GETFD, pidfd, fd, 0)
        number = ctypes.get_errno()
    finally:
        os.close(pidfd)
    if found >= 0:
        return found
    if number in (errno.ESRCH, errno.EBADF):
        return None
    raise OSError(number, f"pidfd_getfd: {os.strerror(number)}")


@contextlib.contextmanager
def _borrowed(end: End) -> Iterator[socket.socket | None]:
    """Yield the socket itself, None if process or socket are gone. Raises ``PermissionError``."""
    fd = borrow(end.pid, end.fd)
    if fd is None:
        yield None
        return
    if os.fstat(fd).st_ino != end.inode:
        os.close(fd)  # the number belongs to another file now
        yield None
        return
    with socket.socket(fileno=fd) as found:
        yield found


def sockets_of(pid: int) -> dict[int, int]:
    """Return fd → inode of a process's sockets."""
    found = {}
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            kind, _, inode = str(link.readlink()).partition(":[")
            if kind == "socket":
                found[int(link.name)] = int(inode[:-1])
    return found


def _table(pid: int) -> dict[int, tuple[Address, Address, str]]:
    """Return inode → addresses and state in a process's namespace."""
    found = {}
    for name in ("tcp", "tcp6"):
        path = Path(f"/proc/{pid}/net/{name}")
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            _, local, remote, state, _, _, _, _, _, inode, *_ = line.split()
            if state not in _ENDED:
                found[int(inode)] = _address(local), _address(remote), state
    return found


def _address(text: str) -> Address:
    """Return host and port of an entry in /proc/net/tcp, whose words have native byte order."""
    host, _, port = text.partition(":")
    words = [bytes.fromhex(host[at : at + 8])[::-1] for at in range(0, len(host), 8)]
    found = ipaddress.ip_address(b"".join(words))
    mapped = getattr(found, "ipv4_mapped", None)
    return str(mapped or found), int(port, 16)


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host).is_loopback
