"""ISA-L by ctypes: CRC32C and erasure coding on preallocated buffers, without the GIL.

The library is the one the pyeclib wheel carries, or the system's ``libisal``. pyeclib's own API
copies every fragment and holds the GIL; these calls do neither.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from typing_extensions import Buffer


def _candidates() -> Iterator[str]:
    spec = importlib.util.find_spec("pyeclib")
    for place in (spec.submodule_search_locations or []) if spec else []:
        libs = Path(place).parent / "pyeclib.libs"
        yield from (str(path) for path in sorted(libs.glob("libisal*")))
    if found := ctypes.util.find_library("isal"):
        yield found


@functools.cache
def library() -> ctypes.CDLL:
    """Return the loaded ISA-L. Raises ``OSError`` naming what was tried and the remedy."""
    tried = list(_candidates())
    for path in tried:
        try:
            lib = ctypes.CDLL(path)
        except OSError:
            continue
        lib.crc32_iscsi.restype = ctypes.c_uint32
        lib.crc32_iscsi.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32]
        return lib
    raise OSError(
        f"no ISA-L library found (tried {tried or 'none'}): install the pyeclib wheel, or the "
        "system package libisal2"
    )


def address_of(buffer: Buffer) -> int:
    """Return the address of a contiguous buffer's first byte; the caller keeps it alive."""
    return int(np.frombuffer(memoryview(buffer), dtype=np.uint8).ctypes.data)


_MAX_CRC_BYTES = 1 << 30


def crc32c(buffer: Buffer, value: int = 0) -> int:
    """Return the CRC32C (Castagnoli, RFC 3720) of ``buffer``, continuing from ``value``."""
    view = memoryview(buffer).cast("B")
    if view.nbytes == 0:
        return value
    lib, start = library(), address_of(view)
    state = value ^ 0xFFFFFFFF
    for at in range(0, view.nbytes, _MAX_CRC_BYTES):
        state = lib.crc32_iscsi(start + at, min(_MAX_CRC_BYTES, view.nbytes - at), state)
    return int(state) ^ 0xFFFFFFFF
