"""The freed memory that the C library keeps, for processes that receive large messages.

glibc returns freed memory to the kernel soon, which then has to clear and map every page again for
the next message: as much work as decoding it.
"""

from __future__ import annotations

import ctypes
import os
from typing import Final

_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
_LARGEST: Final = 32 << 20
"""The largest allocation that glibc takes from its heap, at its own limit."""
_TUNED_BY: Final = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed(nbytes: int) -> bool:
    """Have glibc keep up to ``nbytes`` of freed memory at the end of each of its heaps.

    Returns whether it does: not another C library, nor where the environment tunes glibc.
    """
    if any(name in os.environ for name in _TUNED_BY):
        return False
    try:
        tune = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(tune(_MMAP_THRESHOLD, _LARGEST)) and bool(tune(_TRIM_THRESHOLD, nbytes))
