"""ISA-L by ctypes: CRC32C and erasure coding on preallocated buffers, without the GIL.

The library is the one the pyeclib wheel carries, or else the system's. pyeclib's own API copies
every fragment and holds the GIL; these calls do neither. Neither place is a documented interface of
pyeclib's, so all that is relied on is named here and checked when the library is loaded: the file,
the functions, the version.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from typing_extensions import Buffer

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

IN_WHEEL: Final = "pyeclib.libs/libisal-pyeclib.so.2"
"""The file in the wheels of pyeclib 1.8, beside the package."""

IN_SYSTEM: Final = "libisal.so.2"
"""The name under which the dynamic linker knows the system's library of the same interface."""

OLDEST: Final = (2, 31, 0)
"""The first version with a CRC64 of Rocksoft's polynomial."""

BEYOND: Final = (3, 0, 0)
"""The first version whose interface may be another."""

_log = logging.getLogger(__name__)


def _candidates() -> Iterator[str]:
    spec = importlib.util.find_spec("pyeclib")
    for place in (spec.submodule_search_locations or []) if spec else []:
        yield str(Path(place).parent / IN_WHEEL)
    yield IN_SYSTEM


@functools.cache
def library() -> ctypes.CDLL:
    """Return the loaded ISA-L.

    The system's is taken, with a warning, where the wheel's is missing or is not what is relied on.
    Raises ``OSError`` naming the libraries tried, what is wrong with each, and the remedy.
    """
    refused: list[str] = []
    for path in _candidates():
        try:
            lib = _load(path)
        except OSError as error:
            refused.append(str(error))
            continue
        if refused:
            _log.warning("ISA-L is taken from %s: %s", path, "; ".join(refused))
        return lib
    raise OSError(
        f"no ISA-L library of version {_dotted(OLDEST)} or newer, below {_dotted(BEYOND)} "
        f"({'; '.join(refused)}): install a wheel of pyeclib 1.8, or the system package libisal2"
    )


def _load(path: str) -> ctypes.CDLL:
    """Load one library; raises ``OSError`` when it is missing or is not what is relied on."""
    lib = ctypes.CDLL(path)
    try:
        lib.isal_get_version.restype = ctypes.c_uint
        _declare_sums(lib)
        _declare_erasure(lib)
    except AttributeError as error:
        raise OSError(f"{path} is too old for Holdfast: {error}") from None
    found = lib.isal_get_version()
    version = (found >> 16, found >> 8 & 0xFF, found & 0xFF)
    if not OLDEST <= version < BEYOND:
        raise OSError(f"{path} has the version {_dotted(version)}")
    return lib


def _dotted(version: tuple[int, int, int]) -> str:
    return ".".join(map(str, version))


def _declare_sums(lib: ctypes.CDLL) -> None:
    lib.crc32_iscsi.restype = ctypes.c_uint32
    lib.crc32_iscsi.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32]
    lib.crc64_rocksoft_refl.restype = ctypes.c_uint64
    lib.crc64_rocksoft_refl.argtypes = [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint64]


def _declare_erasure(lib: ctypes.CDLL) -> None:
    pointer, number = ctypes.c_void_p, ctypes.c_int
    table = ctypes.POINTER(ctypes.c_void_p)
    lib.ec_init_tables.argtypes = [number, number, pointer, pointer]
    lib.ec_init_tables.restype = None
    lib.ec_encode_data.argtypes = [number, number, number, pointer, table, table]
    lib.ec_encode_data.restype = None
    lib.ec_encode_data_update.argtypes = [number] * 4 + [pointer, pointer, table]
    lib.ec_encode_data_update.restype = None
    lib.gf_gen_cauchy1_matrix.argtypes = [pointer, number, number]
    lib.gf_gen_cauchy1_matrix.restype = None
    lib.gf_invert_matrix.argtypes = [pointer, pointer, number]
    lib.gf_invert_matrix.restype = number


def address_of(buffer: Buffer) -> int:
    """Return the address of a contiguous buffer's first byte; the caller keeps it alive."""
    return int(np.frombuffer(memoryview(buffer), dtype=np.uint8).ctypes.data)


_MAX_CRC_BYTES = 1 << 30
_MAX_ENCODE_BYTES = 1 << 30


def crc32c(buffer: Buffer, value: int = 0) -> int:
    """Return the CRC32C (Castagnoli, RFC 3720) of ``buffer``, continuing from ``value``."""
    if isinstance(buffer, bytes) and len(buffer) <= _MAX_CRC_BYTES:
        return int(library().crc32_iscsi(buffer, len(buffer), value ^ 0xFFFFFFFF)) ^ 0xFFFFFFFF
    view = memoryview(buffer).cast("B")
    if view.nbytes == 0:
        return value
    lib, start = library(), address_of(view)
    state = value ^ 0xFFFFFFFF
    for at in range(0, view.nbytes, _MAX_CRC_BYTES):
        state = lib.crc32_iscsi(start + at, min(_MAX_CRC_BYTES, view.nbytes - at), state)
    return int(state) ^ 0xFFFFFFFF


def crc32c_at(address: int, nbytes: int) -> int:
    """Return the CRC32C of at most 1 GiB of memory that the caller keeps alive."""
    return int(library().crc32_iscsi(address, nbytes, 0xFFFFFFFF)) ^ 0xFFFFFFFF


def crc64_at(address: int, nbytes: int, value: int = 0) -> int:
    """Return the CRC64 (Rocksoft, as in NVMe) of memory that the caller keeps alive.

    It continues from ``value``, the CRC64 of the bytes before.
    """
    return int(library().crc64_rocksoft_refl(value, address, nbytes))


def encode_tables(coefficients: Bytes) -> Bytes:
    """Return ISA-L's expanded tables of ``coefficients``: shape (inputs) or (outputs, inputs).

    Their layout depends on the processor: tables can be neither joined nor cut.
    """
    rows = np.ascontiguousarray(np.atleast_2d(coefficients))
    outputs, inputs = rows.shape
    tables = np.zeros(32 * rows.size, dtype=np.uint8)
    library().ec_init_tables(
        inputs, outputs, address_of(rows.reshape(-1).data), address_of(tables.data)
    )
    return tables


def encode_update(
    column: int,
    source: Buffer,
    tables: Bytes,
    into: Buffer,
) -> None:
    """Add the contribution of input ``column`` to ``into``; ``source`` has the same length."""
    nbytes, k = memoryview(into).nbytes, len(tables) // 32
    if nbytes == 0:
        return
    start, target = address_of(source), address_of(into)
    for at in range(0, nbytes, _MAX_ENCODE_BYTES):
        output = (ctypes.c_void_p * 1)(target + at)
        size = min(_MAX_ENCODE_BYTES, nbytes - at)
        library().ec_encode_data_update(
            size, k, 1, column, address_of(tables.data), start + at, output
        )


def cauchy_matrix(n: int, k: int) -> Bytes:
    """Return the n by k encoding matrix: identity, then Cauchy rows; any k rows are invertible."""
    matrix = np.zeros((n, k), dtype=np.uint8)
    library().gf_gen_cauchy1_matrix(address_of(matrix.reshape(-1).data), n, k)
    return matrix


def invert(matrix: Bytes) -> Bytes | None:
    """Return the inverse over GF(256), None for a singular matrix."""
    work, inverse = matrix.copy(), np.zeros_like(matrix)
    size = matrix.shape[0]
    singular = library().gf_invert_matrix(
        address_of(work.reshape(-1).data), address_of(inverse.reshape(-1).data), size
    )
    return None if singular else inverse
