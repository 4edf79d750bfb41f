"""Freed memory is kept for the next message, up to a bound."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, os, resource, threading
from holdfast.ckpt.native.heap import keep_freed

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

def rounds():
    for _ in range(20):
        parts = [libc.malloc(1 << 20) for _ in range(4)]
        for part in parts:
            ctypes.memset(part, 1, 1 << 20)
        for part in parts:
            libc.free(part)

kept = keep_freed(8 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
thread = threading.Thread(target=rounds)
thread.start()
thread.join()
print(int(kept), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(**environment: str) -> tuple[int, int]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    kept, found = map(int, done.stdout.split())
    return kept, found


def test_memory_is_cleared_and_mapped_once_not_for_every_message() -> None:
    kept, found = faults()
    if not kept:
        pytest.skip("the C library has no mallopt")
    assert found < 20 * 4 * 256 / 4  # pages of all messages: twenty times four of 256


def test_what_the_environment_chose_stays() -> None:
    kept, _ = faults(MALLOC_TRIM_THRESHOLD_="131072")
    assert not kept
