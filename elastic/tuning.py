"""Process-wide tuning of memory for the time that a training function runs.

The state of the next generation is about as large as that of the last. If the C library (glibc)
gave it back to the kernel in between, each of its pages would be zeroed and faulted in once more,
while all ranks wait: filling it would take ten times as long. And the collector would walk through
the hundred thousands of objects that imports leave, at every change of generation.

The process belongs to the user's script, as a notebook that goes on after training; so all of it is
undone at the end, as far as it can be.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
_LARGEST: Final = 32 << 20
"""The largest allocation that glibc takes from its heap; larger ones are mapped and unmapped."""
_KEPT: Final = (1 << 31) - 1
_TUNED_BY: Final = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


@contextmanager
def tuned() -> Iterator[None]:
    """Keep freed memory, and leave what exists now to no collection of garbage; then undo both.

    The collector has one set of frozen objects. Where the process froze some before, it is left as
    it is, because theirs could not be told from ours at the end.
    """
    keeps, freezes = keep(), not gc.get_freeze_count()
    if freezes:
        gc.freeze()
    try:
        yield
    finally:
        if freezes:
            gc.unfreeze()
        if keeps:
            release()


def keep() -> bool:
    """Have tensors of up to 32 MiB taken from the heap, and up to 2 GiB of it kept when freed.

    glibc does the first by itself from when a tensor of such a size was freed. Returns whether it
    was done: not with another C library, and not where the environment tunes this one.
    """
    library = _glibc()
    if library is None or any(name in os.environ for name in _TUNED_BY):
        return False
    return bool(library.mallopt(_MMAP_THRESHOLD, _LARGEST)) and bool(
        library.mallopt(_TRIM_THRESHOLD, _KEPT)
    )


def release() -> None:
    """Return to the kernel what `keep` kept, and have glibc keep little again.

    glibc starts with thresholds of 128 KiB and moves both as blocks are freed, until mallopt sets
    one: from then on they are fixed, and nothing turns the adjustment on again. So the process does
    not get its first thresholds, which would map every tensor above 128 KiB anew for good, but
    those at which the adjustment ends: allocations of up to 32 MiB come from the heap, and twice
    that much of it is kept.
    """
    library = _glibc()
    if library is None:
        return
    library.mallopt(_TRIM_THRESHOLD, 2 * _LARGEST)
    library.malloc_trim(0)


def _glibc() -> Any:
    """Return the C library where it is glibc, else None."""
    try:
        library = ctypes.CDLL(None)
        return library if library.mallopt and library.malloc_trim else None
    except (AttributeError, OSError):
        return None
