"""Facts that only a try gives: disks that are written to, addresses, files' permissions."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
import time
from pathlib import Path
from typing import Final

from holdfast.tools.doctor.facts import AddressFacts, DiskFacts, PathFacts

_WRITTEN_BYTES: Final = 64 << 20
_BLOCK_BYTES: Final = 1 << 20
_CONNECT_S: Final = 3.0
_LOOPBACK: Final = "127.0.0.1"


def try_disk(
    purpose: str, place: Path, *, size_bytes: int, every_s: float, most_bytes: int = _WRITTEN_BYTES
) -> DiskFacts:
    """Write a file of up to 64 MiB in a place, or in the folder where it would be made.

    The file is synced, timed and removed.
    """
    folder = _existing(place)
    try:
        found = os.statvfs(folder)
        free_bytes = found.f_bavail * found.f_frsize
        seconds, written_bytes = _write(folder, max(_BLOCK_BYTES, min(most_bytes, free_bytes // 4)))
    except OSError as error:
        why = error.strerror or str(error)
        return DiskFacts(purpose=purpose, place=str(place), error=why)
    return DiskFacts(
        purpose=purpose,
        place=str(place),
        free_bytes=free_bytes,
        written_bytes=written_bytes,
        seconds=seconds,
        size_bytes=size_bytes,
        every_s=every_s,
    )


def _existing(place: Path) -> Path:
    place = place.absolute()
    return next((each for each in (place, *place.parents) if each.is_dir()), place)


def _write(folder: Path, size_bytes: int) -> tuple[float, int]:
    """Return the seconds that writing took, and the number of bytes."""
    block, written_bytes = os.urandom(_BLOCK_BYTES), 0
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        began_s = time.monotonic()
        while written_bytes < size_bytes:
            written_bytes += file.write(block)
        os.fsync(file.fileno())
        return time.monotonic() - began_s, written_bytes


def look_at(purpose: str, path: Path, *, directory: bool = False) -> PathFacts:
    """Return the permissions of a file or directory; links are not followed."""
    user = os.geteuid()
    try:
        found = path.lstat()
    except FileNotFoundError:
        return PathFacts(purpose=purpose, path=str(path), there=False, user=user)
    except OSError as error:
        return PathFacts(purpose=purpose, path=str(path), error=str(error.strerror), user=user)
    wanted = stat.S_ISDIR if directory else stat.S_ISREG
    fault = "" if wanted(found.st_mode) else "is no " + ("directory" if directory else "file")
    if not fault and not os.access(path, os.R_OK):
        fault = "cannot be read"
    return PathFacts(
        purpose=purpose,
        path=str(path),
        directory=directory,
        mode=stat.S_IMODE(found.st_mode),
        owner=found.st_uid,
        user=user,
        error=fault,
    )


def try_loopback() -> AddressFacts:
    """Listen on the loopback address and connect to it."""
    return _both_ways("loopback", _LOOPBACK)


def try_host(host: str) -> AddressFacts:
    """Listen on an address that other machines are to use, and connect to it."""
    return _both_ways("host", host)


def _both_ways(purpose: str, host: str) -> AddressFacts:
    began_s = time.monotonic()
    try:
        with socket.create_server((host, 0)) as server:
            server.settimeout(_CONNECT_S)
            address = server.getsockname()[:2]
            with socket.create_connection(address, timeout=_CONNECT_S) as client:
                peer, _ = server.accept()
                with peer:
                    client.sendall(b"!")
                    peer.settimeout(_CONNECT_S)
                    peer.recv(1)
    except OSError as error:
        return AddressFacts(purpose=purpose, address=host, error=_why(error))
    return AddressFacts(purpose=purpose, address=host, seconds=time.monotonic() - began_s)


def try_port(host: str, port: int) -> AddressFacts:
    """Listen at a port for a moment."""
    address = f"{host}:{port}"
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        return AddressFacts(purpose="port", address=address, error=_why(error))
    return AddressFacts(purpose="port", address=address)


def try_to_reach(host: str, port: int) -> AddressFacts:
    """Connect to another machine's port."""
    address, began_s = f"{host}:{port}", time.monotonic()
    try:
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
    except OSError as error:
        return AddressFacts(purpose="reach", address=address, error=_why(error))
    return AddressFacts(purpose="reach", address=address, seconds=time.monotonic() - began_s)


def _why(error: OSError) -> str:
    return str(error.strerror or error).lower() if error.errno else str(error)
