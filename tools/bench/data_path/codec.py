"""Section parity: erasure coding and checksums, with the calls that the sidecar makes."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from holdfast.ckpt.native.isal import crc32c
from holdfast.ckpt.parity.erasure import ErasureCode
from holdfast.ckpt.sidecar.core.wire import PART_BYTES
from holdfast.tools.bench.samples import BenchRow, BenchSetup, Case, in_turn, timed

MEMCPY, CRC, PEER_CRC = "memcpy", "CRC32C", "google-crc32c"
SHAPES = ((2, 1), (4, 2))


def parity(setup: BenchSetup) -> list[BenchRow]:
    """Time, on one core, parity rows of the whole state, decoding of a column, and a checksum."""
    data = np.random.default_rng(0).integers(0, 256, max(setup.size_bytes, 4), dtype=np.uint8)
    data = data[: len(data) // 4 * 4]
    mirror = np.ones_like(data)
    cases: list[Case] = [
        timed(MEMCPY, lambda: np.copyto(mirror, data)),
        timed(CRC, lambda: crc32c(data.data)),
    ]
    if google := _optional("google_crc32c"):
        frozen = data.tobytes()
        cases.append(timed(PEER_CRC, lambda: google.value(frozen)))
    for k, m in SHAPES:
        cases += _coding(data, k, m)
        if eclib := _optional("pyeclib.ec_iface"):
            driver = eclib.ECDriver(k=k, m=m, ec_type="isa_l_rs_cauchy")
            cases.append(_peer_encode(driver, data, _pyeclib_name(k, m)))
    samples = in_turn(cases, setup)
    rows = []
    for k, m in SHAPES:
        for name in dict.fromkeys((_one(k, m), _all(k, m))):
            rows.append(samples.row("parity", name, data.nbytes, MEMCPY, _pyeclib_name(k, m)))
        rows.append(samples.row("parity", _lost(k, m), data.nbytes, MEMCPY))
    return [*rows, samples.row("parity", CRC, data.nbytes, MEMCPY, PEER_CRC)]


def _one(k: int, m: int) -> str:
    return f"encode {k} + {m}, one row"


def _all(k: int, m: int) -> str:
    return _one(k, m) if m == 1 else f"encode {k} + {m}, all rows"


def _lost(k: int, m: int) -> str:
    return f"decode a column of {k} + {m}, per byte read"


def _pyeclib_name(k: int, m: int) -> str:
    return f"pyeclib {k} + {m}"


def _optional(name: str) -> Any:
    """Return the module, None if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _coding(data: np.ndarray[Any, np.dtype[np.uint8]], k: int, m: int) -> list[Case]:
    """Return the cases: encode one row, decode a lost column, encode all rows."""
    codec, width = ErasureCode(k, m), len(data) // k
    columns = [data[at * width : (at + 1) * width].data for at in range(k)]
    rows = {row: np.zeros(width, dtype=np.uint8).data for row in range(m)}
    room = np.zeros(width, dtype=np.uint8).data
    codec.encode(columns, rows)
    left = dict(enumerate(columns)) | {k: rows[0]}
    del left[0]
    cases = [
        timed(_one(k, m), lambda: codec.encode(columns, {0: rows[0]})),
        timed(_lost(k, m), lambda: codec.decode(0, left, room)),
    ]
    if m > 1:
        cases.append(timed(_all(k, m), lambda: codec.encode(columns, rows)))
    return cases


def _peer_encode(driver: Any, data: np.ndarray[Any, np.dtype[np.uint8]], name: str) -> Case:
    """Time pyeclib's own call on each part; it takes ``bytes`` and returns new ones."""
    parts = [data[at : at + PART_BYTES].tobytes() for at in range(0, len(data), PART_BYTES)]

    def encode() -> None:
        for part in parts:
            driver.encode(part)

    return timed(name, encode)
