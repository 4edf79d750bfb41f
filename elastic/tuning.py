"""Process-wide tuning of memory while a training function runs.

The state of the next generation is about as large as that of the last. If the C library (glibc)
returned this memory to the kernel in between, the kernel would zero and map each page again while
all ranks wait: filling it would take ten times as long. The garbage collector would also visit the
hundreds of thousands of objects that imports leave, at every change of generation.

The process belongs to the user's script, for example a notebook that continues after training. So
everything is undone at the end, as far as possible.
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
    """Keep freed memory and exclude existing objects from garbage collection; then undo both.

    The collector has one set of frozen objects. If the process froze some before, this function
    freezes none, because the two could not be distinguished at the end.
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
    """Make glibc take tensors of up to 32 MiB from its heap, and keep up to 2 GiB of freed heap.

    glibc does the first by itself once a tensor of that size has been freed. Returns whether it was
    done: not with another C library, and not if the environment tunes glibc.
    """
    library = _glibc()
    if library is None or any(name in os.environ for name in _TUNED_BY):
        return False
    return bool(library.mallopt(_MMAP_THRESHOLD, _LARGEST)) and bool(
        library.mallopt(_TRIM_THRESHOLD, _KEPT)
    )


def release() -> None:
    """Return the memory that `keep` kept to the kernel, and make glibc keep little again.

    glibc starts with thresholds of 128 KiB and raises both as blocks are freed, until mallopt sets
    one: from then on they are fixed, and nothing turns the adjustment on again. So this function
    does not restore the first thresholds: with them, every tensor above 128 KiB would be mapped
    again at each allocation. It sets those at which the adjustment ends: allocations of up to 32
    MiB come from the heap, and twice that much of it is kept.
    """
    library = _glibc()
    if library is None:
        return
    library.mallopt(_TRIM_THRESHOLD, 2 * _LARGEST)
    library.malloc_trim(0)


def _glibc() -> Any:
    """Return the C library if it is glibc, else None."""
    try:
        library = ctypes.CDLL(None)
        return library if library.mallopt and library.malloc_trim else None
    except (AttributeError, OSError):
        return None
