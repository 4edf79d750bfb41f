"""Lower a thread's priority, so that it uses only idle processor and disk time."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading
from typing import Final

NICE: Final = 19
_IOPRIO_SET: Final = {"x86_64": 251, "aarch64": 30, "riscv64": 30, "ppc64le": 273, "s390x": 282}
"""Numbers of the system call ``ioprio_set`` (Linux), which the C library does not wrap."""

_WHO_PROCESS: Final = 1
_CLASS_IDLE: Final = 3 << 13


def yield_to_others() -> str:
    """Lower the calling thread's priority; return in words the priority that the system granted.

    Threads that it starts inherit it. It uses nice 19, not ``SCHED_IDLE``: under a full load the
    latter gets three thousandths of a core, and a checkpoint would not end.
    """
    granted = []
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        granted.append(f"nice {NICE}")
    except OSError as error:
        granted.append(f"usual processor priority ({error.strerror})")
    granted.append("idle disk priority" if _idle_disk() else "usual disk priority")
    return ", ".join(granted)


def _idle_disk() -> bool:
    number = _IOPRIO_SET.get(platform.machine())
    if sys.platform != "linux" or number is None:
        return False
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_int, ctypes.c_int]
    return int(syscall(number, _WHO_PROCESS, 0, _CLASS_IDLE)) == 0
