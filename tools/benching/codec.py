"""Section parity: erasure coding and checksums, by the calls that the sidecar makes."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from ckpt.erasure import Codec
from ckpt.isal import crc32c
from ckpt.sidecar.wire import PART_BYTES
from tools.benching.samples import Case, Row, Setup, in_turn, stopwatch, timed

MEMCPY, CRC, PEER_CRC = "memcpy", "CRC32C", "google-crc32c"
SHAPES = ((2, 1), (4, 2))


def parity(setup: Setup) -> list[Row]:
    """Time parity rows over the whole state, and its checksum, on one core."""
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
        cases.append(_encode(data, k, m))
        if eclib := _optional("pyeclib.ec_iface"):
            driver = eclib.ECDriver(k=k, m=m, ec_type="isa_l_rs_cauchy")
            cases.append(_peer_encode(driver, data, _pyeclib_name(k, m)))
    samples = in_turn(cases, setup)
    rows = [
        samples.row("parity", _name(k, m), data.nbytes, MEMCPY, _pyeclib_name(k, m))
        for k, m in SHAPES
    ]
    return [*rows, samples.row("parity", CRC, data.nbytes, MEMCPY, PEER_CRC)]


def _name(k: int, m: int) -> str:
    return f"encode {k} + {m}"


def _pyeclib_name(k: int, m: int) -> str:
    return f"pyeclib {k} + {m}"


def _optional(name: str) -> Any:
    """Return the module, None where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _encode(data: np.ndarray[Any, np.dtype[np.uint8]], k: int, m: int) -> Case:
    """Add the columns to the rows part by part, as they arrive over the wire."""
    codec, width = Codec(k, m), len(data) // k
    rows = [np.zeros(width, dtype=np.uint8) for _ in range(m)]

    def case() -> Mapping[str, float]:
        for row in rows:
            row.fill(0)
        with stopwatch() as seconds:
            for column in range(k):
                fragment = data[column * width : (column + 1) * width].data
                for at in range(0, width, PART_BYTES):
                    part = fragment[at : at + PART_BYTES]
                    for number, row in enumerate(rows):
                        codec.encode_update(number, column, part, row.data[at : at + part.nbytes])
        return {_name(k, m): seconds[0]}

    return case


def _peer_encode(driver: Any, data: np.ndarray[Any, np.dtype[np.uint8]], name: str) -> Case:
    """Time pyeclib's own call on each part; it takes ``bytes`` and returns new ones."""
    parts = [data[at : at + PART_BYTES].tobytes() for at in range(0, len(data), PART_BYTES)]

    def encode() -> None:
        for part in parts:
            driver.encode(part)

    return timed(name, encode)
