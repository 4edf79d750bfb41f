"""Memory that a generation frees is there for the next one, where the C library lets us (glibc).

The state of the next generation is about as large as that of the last. Given back to the kernel in
between, each of its pages would be zeroed and faulted in once more, while all ranks wait: filling
it then takes ten times as long.
"""

from __future__ import annotations

import ctypes
from typing import Final

_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
_LARGEST: Final = 32 << 20
"""The largest allocation that glibc takes from its heap; larger ones are mapped and unmapped."""
_KEPT: Final = (1 << 31) - 1


def keep() -> bool:
    """Have tensors of up to 32 MiB taken from the heap, and up to 2 GiB of it kept when freed.

    glibc does the first by itself from when a tensor of such a size was freed. Returns whether the
    C library can be told so.
    """
    try:
        tell = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return False
    return bool(tell(_MMAP_THRESHOLD, _LARGEST)) and bool(tell(_TRIM_THRESHOLD, _KEPT))
