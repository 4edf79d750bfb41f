"""Detection of a process's death when it dies, before the kernel has freed its memory.

A wait for a process returns only after the kernel has freed all its pages: a quarter of a second
per 1.5 GiB with small pages, seconds on a busy machine, even longer with pinned memory. But when a
thread ends, the kernel first hands on the *robust* mutexes that it holds
(pthread_mutexattr_setrobust; exit_robust_list in the kernel's futexes). So a process holds one in
shared memory for as long as it lives, and a waiter for that mutex detects its end within a
millisecond. /proc then shows whether its other threads will not run again either.
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
_FLAGS, _EXIT_CODE = 6, 49  # fields of /proc/PID/stat: proc(5)'s numbers less 3
_PATIENCE_S, _LOOK_S = 0.1, 0.0005


class LifeLock:
    """A robust mutex at ``offset`` of a shared mapping, which must outlive all calls."""

    def __init__(self, mapping: mmap.mmap, offset: int) -> None:
        self._libc, self._mapping = ctypes.CDLL(None), mapping
        start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self._mutex = ctypes.c_void_p(start + offset)

    def prepare(self) -> None:
        """Make the mutex, before another process has the mapping."""
        attributes = ctypes.create_string_buffer(LOCK_BYTES)
        self._libc.pthread_mutexattr_init(attributes)
        self._libc.pthread_mutexattr_setpshared(attributes, 1)
        self._libc.pthread_mutexattr_setrobust(attributes, 1)
        self._libc.pthread_mutex_init(self._mutex, attributes)

    def hold(self) -> bool:
        """Hold it until the calling thread ends; return whether that was possible. Never waits.

        The mapping stays until the process ends, because the kernel reads it then.
        """
        is_acquired: bool = self._libc.pthread_mutex_trylock(self._mutex) == 0
        if is_acquired:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._mapping))
        return is_acquired

    def await_end(self) -> bool:
        """Wait until the thread that holds it has ended; False if that cannot be known."""
        code: int = self._libc.pthread_mutex_lock(self._mutex)
        return code == errno.EOWNERDEAD


def wait_status(pid: int) -> int | None:
    """Return a process's nonzero wait status, once it will not run again.

    None if it still runs, has been waited for, or ended well: the kernel also shows 0 for a process
    that this one may not inspect. The other threads of a killed process end within microseconds
    after the first; this waits a moment for them.
    """
    deadline_s = time.monotonic() + _PATIENCE_S
    while (found := _threads(pid)) and not all(found):
        if time.monotonic() > deadline_s:
            return None
        time.sleep(_LOOK_S)
    fields = _stat(Path(f"/proc/{pid}/stat"))
    return int(fields[_EXIT_CODE]) or None if found and fields else None


def _threads(pid: int) -> list[bool]:
    """Return for each thread whether it is ending."""
    try:
        stats = [_stat(task / "stat") for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []
    return [bool(int(fields[_FLAGS]) & _EXITING) for fields in stats if fields]


def _stat(path: Path) -> list[str]:
    """Return the fields after the name, none if the thread is gone."""
    try:
        return path.read_text().rpartition(")")[2].split()
    except OSError:
        return []
