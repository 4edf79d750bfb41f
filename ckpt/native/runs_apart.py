"""The CRC-64/NVME of a whole from runs of its bytes, wherever they lie and whoever holds them.

The checksum is linear over GF(2). So each run has a *share* in the checksum of the whole, which
depends on its bytes and on the number of bytes behind it alone, and the checksum is the exclusive
or of all shares.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from math import prod
from typing import Any, Final, TypeAlias

import numpy as np

from holdfast.ckpt.geometry.layout import Box
from holdfast.ckpt.native import crc, isal
from holdfast.ckpt.native.sums import Lengths

_POLYNOMIAL: Final = 0x9A6C9329AC4BC9B5
_BITS: Final = 64

_Shares: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]


@functools.cache
def _tables(power: int) -> _Shares:
    """Return tables (8, 256): the effect of ``2**power`` zero bytes on each byte of a checksum."""
    matrix = crc.shift(power, _POLYNOMIAL, _BITS)
    columns = np.array(matrix, dtype=np.uint64).reshape(8, 8)
    bits = (np.arange(256)[:, None] >> np.arange(8)) & 1
    picked = np.where(bits[None, :, :] == 1, columns[:, None, :], np.uint64(0))
    tables: _Shares = np.bitwise_xor.reduce(picked, axis=2)
    return tables


def _shifted(sums: _Shares, behind: Lengths) -> _Shares:
    """Return the share of each checksum in that of a whole where ``behind`` bytes follow it."""
    found = sums.copy()
    for power in range(int(behind.max(initial=0)).bit_length()):
        at = np.flatnonzero((behind >> power) & 1)
        if at.size:
            tables, value = _tables(power), found[at]
            byte = [(value >> np.uint64(8 * i)) & np.uint64(255) for i in range(8)]
            found[at] = np.bitwise_xor.reduce([tables[i][byte[i]] for i in range(8)])
    return found


def share(address: int, box: Box, *, shape: Sequence[int], itemsize: int) -> int:
    """Return the share of a box in the CRC-64/NVME of its tensor's bytes in C order.

    ``address`` is that of the box's own bytes, which lie in C order; ``shape`` is the tensor's, and
    ``itemsize`` its bytes per element. An empty box has no share.
    """
    if 0 in box.shape:
        return 0
    inner = len(shape)
    while inner and box.shape[inner - 1] == shape[inner - 1]:
        inner -= 1
    outer = max(inner - 1, 0)  # the dimensions before this one lead from run to run
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = sum(o * s for o, s in zip(box.offset, strides, strict=True))
    starts = np.array([first], dtype=np.int64)
    for dim in range(outer):
        steps = np.arange(box.shape[dim], dtype=np.int64) * strides[dim]
        starts = np.add.outer(starts, steps).reshape(-1)
    run = prod(box.shape[outer:]) * itemsize
    sums = [isal.crc64_at(address + i * run, run) for i in range(len(starts))]
    behind = prod(shape) * itemsize - starts * itemsize - run
    return int(np.bitwise_xor.reduce(_shifted(np.array(sums, dtype=np.uint64), behind)))
