"""Checksums of a block by runs of 128 KiB: computed in one pass, compared, checked while reading.

A *sum* is the CRC32C of one run; a block's sums say which runs differ from an earlier step's, and
let a reader of any part check what it reads.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, Final, TypeAlias

import numpy as np
from typing_extensions import Buffer

from holdfast.ckpt.errors import CorruptError
from holdfast.ckpt.native import crc, isal

SUM_BYTES: Final = crc.BLOCK_BYTES
"""The length of a run, in bytes; the last run of a block may be shorter."""

_COMPARE_RUN: Final = 64
_START: Final = 0xFFFFFFFF

Sums: TypeAlias = np.ndarray[Any, np.dtype[np.uint32]]
Lengths: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
Flags: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]


@functools.cache
def _table(power: int) -> Sums:
    """Return tables (4, 256): the effect of ``2**power`` zero bytes on each byte of a checksum."""
    columns = np.array(crc.shift(power), dtype=np.uint32).reshape(4, 8)
    bits = (np.arange(256)[:, None] >> np.arange(8)) & 1
    picked = np.where(bits[None, :, :] == 1, columns[:, None, :], np.uint32(0))
    table: Sums = np.bitwise_xor.reduce(picked.astype(np.uint32), axis=2)
    return table


def shifted(sums: Sums, behind: Lengths) -> Sums:
    """Return the share of each checksum in that of a whole where ``behind`` bytes follow it.

    The checksum of the whole is the exclusive or of the shares of its parts.
    """
    found = sums.copy()
    bits = int(np.bitwise_or.reduce(behind, initial=0))
    for power in range(bits.bit_length()):
        if not bits >> power & 1:
            continue
        at = np.flatnonzero((behind >> power) & 1)
        table, value = _table(power), found[at]
        found[at] = (
            table[0][value & 255]
            ^ table[1][(value >> 8) & 255]
            ^ table[2][(value >> 16) & 255]
            ^ table[3][value >> 24]
        )
    return found


def combined(sums: Sums, lengths: Lengths, *, starts: Lengths, ends: Lengths) -> Sums:
    """Return the checksums of unions of neighbouring parts: parts ``starts[i] … ends[i]-1``.

    ``lengths`` are those of the parts; a union without parts has checksum 0.
    """
    total = np.zeros(len(starts), dtype=np.uint32)
    counts = ends - starts
    filled = np.flatnonzero(counts > 0)
    if filled.size == 0:
        return total
    first, count = starts[filled], counts[filled]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    group = np.repeat(np.arange(filled.size), count)
    begin = np.concatenate([[0], np.cumsum(count)[:-1]])
    parts = np.arange(int(count.sum())) - begin[group] + first[group]
    behind = offsets[ends[filled]][group] - offsets[parts + 1]
    total[filled] = np.bitwise_xor.reduceat(shifted(sums[parts], behind), begin)
    return total


def checksums(block: Buffer, *, at: Lengths, nbytes: Lengths) -> tuple[Sums, Sums]:
    """Return the sums of ``block`` and the checksums of ranges of it, in one pass.

    Range ``i`` has ``nbytes[i]`` bytes from ``at[i]``; ranges may overlap, be empty, or lie
    anywhere inside the block.
    """
    size = memoryview(block).nbytes
    grid = np.arange(0, size, SUM_BYTES, dtype=np.int64)
    cuts = np.unique(np.concatenate([grid, at, at + nbytes, [0, size]]).astype(np.int64))
    lengths = np.diff(cuts)
    start, one = isal.address_of(block) if size else 0, isal.crc32c_at
    pairs = zip(cuts[:-1].tolist(), lengths.tolist(), strict=True)
    parts = np.array([one(start + where, length) for where, length in pairs], dtype=np.uint32)
    edges = np.append(grid, size)
    found = np.searchsorted(cuts, edges)
    sums = combined(parts, lengths, starts=found[:-1], ends=found[1:])
    first, last = np.searchsorted(cuts, at), np.searchsorted(cuts, at + nbytes)
    return sums, combined(parts, lengths, starts=first, ends=last)


def of_zeros(nbytes: Lengths) -> Sums:
    """Return the checksum of ``nbytes[i]`` zeros, for each ``i``."""
    start = np.full(len(nbytes), _START, dtype=np.uint32)
    return shifted(start, nbytes) ^ start


def runs_of(at: int, nbytes: int) -> tuple[int, int]:
    """Return the first run that bytes ``at … at + nbytes`` of a block touch, and their number."""
    first = at // SUM_BYTES
    return first, -(-(at + nbytes) // SUM_BYTES) - first


def sums_of(block: Buffer) -> Sums:
    """Return the sums of ``block``."""
    size = memoryview(block).nbytes
    found = crc.block_checksums(isal.address_of(block), size) if size else []
    return np.array(found, dtype=np.uint32)


def sum_of_range(block: Buffer, sums: Sums, at: int, nbytes: int) -> int:
    """Return the checksum of bytes ``at … at + nbytes`` of a block that has just these ``sums``.

    Only the bytes of runs that the range begins or ends inside are read.
    """
    view, end = memoryview(block), at + nbytes
    low, high = -(-at // SUM_BYTES) * SUM_BYTES, end // SUM_BYTES * SUM_BYTES
    if low >= high:
        return isal.crc32c(view[at:end])
    found = isal.crc32c(view[at:low])
    runs = sums[low // SUM_BYTES : high // SUM_BYTES].tolist()
    return isal.crc32c(
        view[high:end], crc.combine(found, crc.of_blocks(runs, high - low), high - low)
    )


class CheckedBlock:
    """A block that checks its bytes against its sums before it returns them.

    ``sums`` begin with run ``first``. A run that was just checked is not checked again, so that a
    sequential read costs one pass. Use it from one thread at a time.
    """

    def __init__(self, block: Buffer, sums: Sums, *, first: int = 0, origin: str) -> None:
        self._view = memoryview(block)
        self._sums, self._first, self._origin = sums, first, origin
        self._address = isal.address_of(block) if self._view.nbytes else 0
        self._checked = (0, 0)

    def take(self, at: int, nbytes: int) -> memoryview:
        """Return some bytes. Raises ``CorruptError`` naming a run that fails its checksum."""
        low, high = at // SUM_BYTES, -(-(at + nbytes) // SUM_BYTES)
        begin = self._checked[1] if self._checked[0] <= low <= self._checked[1] else low
        for run in range(begin, high):
            self._check(run)
        self._checked = (low, max(high, begin))
        return self._view[at : at + nbytes]

    def _check(self, run: int) -> None:
        start = run * SUM_BYTES
        length = min(SUM_BYTES, self._view.nbytes - start)
        number = run - self._first
        if length <= 0 or not 0 <= number < len(self._sums):
            raise CorruptError(f"{self._origin}: bytes from {start:,} are outside the block")
        if isal.crc32c_at(self._address + start, length) != int(self._sums[number]):
            raise CorruptError(
                f"{self._origin}: bytes {start:,}+{length:,} of the block are not what was sealed; "
                "use another copy"
            )


def same_runs(
    new: Buffer, new_sums: Sums, old: Buffer, old_sums: Sums, *, known: Flags | None = None
) -> Flags:
    """Return the runs of ``new`` that have the very same bytes as those of ``old``.

    Runs with different sums differ; runs with equal sums are compared byte by byte, for a checksum
    is not a proof. Runs of different lengths differ. Those ``known`` to be the same are not read.
    """
    fresh, before = memoryview(new).nbytes, memoryview(old).nbytes
    same = np.zeros(len(new_sums), dtype=np.bool_)
    whole = len(new_sums) if fresh == before else min(fresh, before) // SUM_BYTES
    same[:whole] = new_sums[:whole] == old_sums[:whole]
    if not same.any():
        return same
    here, there = isal.address_of(new), isal.address_of(old)
    for low, high in set_runs(same if known is None else same & ~known):
        for run in range(low, high, _COMPARE_RUN):
            end = min(run + _COMPARE_RUN, high)
            if not _equal(here, there, run * SUM_BYTES, min(end * SUM_BYTES, fresh)):
                for each in range(run, end):
                    at, last = each * SUM_BYTES, min((each + 1) * SUM_BYTES, fresh)
                    same[each] = _equal(here, there, at, last)
    return same


def set_runs(flags: Flags) -> list[tuple[int, int]]:
    """Return the ranges of set flags, half-open."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flags.astype(np.int8), [0]])))
    return [(int(low), int(high)) for low, high in edges.reshape(-1, 2)]


@functools.cache
def _compare() -> Any:
    function = ctypes.CDLL(None).memcmp
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    function.restype = ctypes.c_int
    return function


def _equal(here: int, there: int, lo: int, hi: int) -> bool:
    return bool(_compare()(here + lo, there + lo, hi - lo) == 0)
