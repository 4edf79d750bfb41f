"""Seeing the death of a process when it dies, not when the kernel is done with its memory.

A process can be waited for only when all its pages have been given back: a quarter of a second per
1.5 GiB where pages are small, seconds where the machine is busy, longer yet with pinned memory. But
the first thing the kernel does for a thread that ends is to hand on the *robust* mutexes it holds
(pthread_mutexattr_setrobust; exit_robust_list in the kernel's futexes). So a process holds one, in
memory that it shares, for as long as it lives, and whoever waits for that mutex hears of its end in
a millisecond. That no other thread of it will run again either is then read from /proc.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import time
from pathlib import Path

LOCK_BYTES = 64
"""Room for a mutex: 40 bytes on x86-64, 48 on ARM."""

_EXITING = 0x4  # PF_EXITING: no instruction of the program will be executed any more
_FLAGS, _EXIT_CODE = 6, 49  # fields of /proc/PID/stat as proc(5) numbers them, less 3
_PATIENCE_S, _LOOK_S = 0.1, 0.0005


class LifeLock:
    """A robust mutex at ``offset`` of a shared mapping, which must outlive all calls."""

    def __init__(self, mapping: mmap.mmap, offset: int) -> None:
        self._libc, self._mapping = ctypes.CDLL(None), mapping
        start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self._mutex = ctypes.c_void_p(start + offset)

    def prepare(self) -> None:
        """Make the mutex, before anybody else has the mapping."""
        attributes = ctypes.create_string_buffer(LOCK_BYTES)
        self._libc.pthread_mutexattr_init(attributes)
        self._libc.pthread_mutexattr_setpshared(attributes, 1)
        self._libc.pthread_mutexattr_setrobust(attributes, 1)
        self._libc.pthread_mutex_init(self._mutex, attributes)

    def hold(self) -> bool:
        """Hold it until the calling thread ends; say whether that was possible. Never waits.

        The mapping is not given back before the process ends: at its end the kernel looks there.
        """
        held: bool = self._libc.pthread_mutex_trylock(self._mutex) == 0
        if held:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._mapping))
        return held

    def await_end(self) -> bool:
        """Wait until the thread that holds it has ended; False when that cannot be known."""
        code: int = self._libc.pthread_mutex_lock(self._mutex)
        return code == errno.EOWNERDEAD


def wait_status(pid: int) -> int | None:
    """Return how a process was killed or failed, as ``wait`` tells it, once it will not run again.

    None where it runs on, has been waited for, or ended well: 0 is also what the kernel says of a
    process that is not ours to look into. The other threads of one that is killed follow the first
    within microseconds: they are given a moment.
    """
    deadline_s = time.monotonic() + _PATIENCE_S
    while (found := _threads(pid)) and not all(found):
        if time.monotonic() > deadline_s:
            return None
        time.sleep(_LOOK_S)
    fields = _stat(Path(f"/proc/{pid}/stat"))
    return int(fields[_EXIT_CODE]) or None if found and fields else None


def _threads(pid: int) -> list[bool]:
    """Say of each thread whether it is ending."""
    try:
        stats = [_stat(task / "stat") for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []
    return [bool(int(fields[_FLAGS]) & _EXITING) for fields in stats if fields]


def _stat(path: Path) -> list[str]:
    """Return the fields behind the name, none where the thread is gone."""
    try:
        return path.read_text().rpartition(")")[2].split()
    except OSError:
        return []
