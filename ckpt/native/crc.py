"""Checksums of what lies in memory, and of what was checksummed in pieces.

CRC32C is linear over GF(2): the checksum of a concatenation follows from those of its parts, so
bytes are passed over once however many checksums they take part in.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Final

import numpy as np

from holdfast.ckpt.native import isal

BLOCK_BYTES: Final = 128 << 10
"""The unit that is checksummed by itself inside a chunk; a ranged read can verify each unit."""

_POLYNOMIAL: Final = 0x82F63B78
_BITS: Final = 32


@functools.cache
def shift(power: int, polynomial: int = _POLYNOMIAL, bits: int = _BITS) -> tuple[int, ...]:
    """Return the matrix (by columns) that appends ``2**power`` zero bytes to a checksum.

    The ``polynomial`` of ``bits`` bits is in reflected form; CRC32C's is the default.
    """
    if power == 0:
        one_bit = (polynomial, *(1 << i for i in range(bits - 1)))
        return _square(_square(_square(one_bit)))
    return _square(shift(power - 1, polynomial, bits))


def _square(matrix: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(_times(matrix, column) for column in matrix)


def _times(matrix: tuple[int, ...], vector: int) -> int:
    found = 0
    while vector:
        low = vector & -vector
        found ^= matrix[low.bit_length() - 1]
        vector ^= low
    return found


@functools.cache
def _by_bytes(power: int) -> tuple[tuple[int, ...], ...]:
    """Return tables (4, 256): the effect of ``2**power`` zero bytes on each byte of a checksum."""
    columns = shift(power)
    tables = []
    for first in range(0, _BITS, 8):
        table = [0]
        for value in range(1, 256):
            low = value & -value
            table.append(table[value ^ low] ^ columns[first + low.bit_length() - 1])
        tables.append(tuple(table))
    return tuple(tables)


def combine(first: int, second: int, second_bytes: int) -> int:
    """Return the CRC32C of two concatenated runs of bytes from the CRC32C of each."""
    left = second_bytes if first else 0
    while left:
        a, b, c, d = _by_bytes((left & -left).bit_length() - 1)
        first = a[first & 255] ^ b[first >> 8 & 255] ^ c[first >> 16 & 255] ^ d[first >> 24]
        left &= left - 1
    return first ^ second


def block_checksums(address: int, nbytes: int) -> list[int]:
    """Return the CRC32C of each `BLOCK_BYTES` of the memory at ``address``; the last is short."""
    crc = isal.crc32c_at
    return [
        crc(address + at, min(BLOCK_BYTES, nbytes - at)) for at in range(0, nbytes, BLOCK_BYTES)
    ]


def of_blocks(blocks: Iterable[int], nbytes: int) -> int:
    """Return the CRC32C of ``nbytes`` bytes from those of its blocks."""
    found = 0
    for block in blocks:
        size = min(BLOCK_BYTES, nbytes)
        found = combine(found, block, size)
        nbytes -= size
    return found


def to_bytes(blocks: Iterable[int]) -> bytes:
    """Return checksums in their stored form: four bytes each, little-endian."""
    return np.fromiter(blocks, dtype="<u4").tobytes()


def from_bytes(data: bytes) -> list[int]:
    """Return the checksums that `to_bytes` was given."""
    return [int(each) for each in np.frombuffer(data, dtype="<u4")]
