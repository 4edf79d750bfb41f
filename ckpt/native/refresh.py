"""Bring a copy of memory up to date: runs that already lie there are read, but not written.

A run is taken for the same if both its CRC32C and its CRC-64/NVME are those of the bytes that were
copied there before. CRC32C alone would miss one change in four billion, which a job with gigabytes
of state makes in a day; both together miss one in 2^96.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from holdfast.ckpt.native import isal, piece_copy, streaming
from holdfast.ckpt.native.streaming import Words
from holdfast.ckpt.native.sums import Flags, Sums


class RefreshMode(IntEnum):
    """The treatment of a run.

    COPY it. READ it, so that both its checksums are known, and copy it. COMPARE: read it, and copy
    it unless its checksums are those known.
    """

    COPY = 0
    READ = 1
    COMPARE = 2


class _Outcome(IntEnum):
    """The same numbers, as the compiled function returns them."""

    KEPT = 0
    WRITTEN = 1
    UNREAD = 2


@dataclass(frozen=True, slots=True, eq=False)
class Fingerprints:
    """Two checksums of each of some runs, changed in place.

    ``sums`` are CRC32C, ``wide`` CRC-64/NVME; they mean something only where ``known``.
    """

    sums: Sums
    wide: Words
    known: Flags

    @classmethod
    def unknown(cls, count: int) -> Fingerprints:
        """Return those of ``count`` runs that nothing is known about."""
        return cls(
            np.zeros(count, dtype=np.uint32),
            np.zeros(count, dtype=np.uint64),
            np.zeros(count, dtype=np.bool_),
        )

    def take(self, chosen: slice | Flags) -> Fingerprints:
        """Return those of some runs; a slice shares memory, flags copy."""
        return Fingerprints(self.sums[chosen], self.wide[chosen], self.known[chosen])

    def put(self, chosen: slice | Flags, found: Fingerprints) -> None:
        """Note what was found about some runs."""
        self.sums[chosen], self.wide[chosen] = found.sums, found.wide
        self.known[chosen] = found.known

    def forget(self) -> None:
        """Know nothing any more."""
        self.known[:] = False

    def same(self, other: Fingerprints) -> Flags:
        """Return the runs that are known to be the same as the other's."""
        alike = (self.sums == other.sums) & (self.wide == other.wide)
        found: Flags = alike & self.known & other.known
        return found


@functools.cache
def kernel() -> Any:
    """Return the compiled function, or None if there is none."""
    found = streaming.library()
    if found is None or not found.stream_prepare():
        return None
    try:
        refresh = found.stream_refresh
    except AttributeError:  # compiled from an earlier version of the source
        return None
    refresh.argtypes, refresh.restype = [ctypes.c_size_t, *[ctypes.c_void_p] * 8], None
    return refresh


@functools.cache
def _checksums() -> tuple[int, int]:
    """Return the addresses of ISA-L's two functions; zeros if the compiled part needs none."""
    if piece_copy.kernel() is not None:
        return 0, 0
    lib = isal.library()
    found = [
        ctypes.cast(each, ctypes.c_void_p) for each in (lib.crc32_iscsi, lib.crc64_rocksoft_refl)
    ]
    return found[0].value or 0, found[1].value or 0


def refresh_runs(
    runs: tuple[Words, Words, Words], before: Fingerprints, modes: np.ndarray[Any, Any]
) -> tuple[Fingerprints, Flags]:
    """Copy runs of memory as their ``modes`` say (see `RefreshMode`).

    ``runs`` are the sources and targets, as addresses, and the sizes; ``before`` are the
    fingerprints of the bytes at the targets. Returns the fingerprints of the bytes there now, and
    the runs that were written. The CRC32C is that of the bytes as they were written, also where the
    fingerprint is not ``known``. The caller keeps the memory alive; no target overlaps another run.
    """
    wanted = np.where((modes == RefreshMode.COMPARE) & ~before.known, RefreshMode.READ, modes)
    outcome = np.ascontiguousarray(wanted, dtype=np.uint8)
    sums, wide = before.sums.copy(), before.wide.copy()
    words = [np.ascontiguousarray(each, dtype=np.uint64) for each in runs]
    if (refresh := kernel()) is not None:
        at = [*(each.ctypes.data for each in words), sums.ctypes.data, wide.ctypes.data]
        refresh(len(sums), *at, outcome.ctypes.data, *_checksums())
    else:
        _refresh(words, sums, wide, outcome)
    return Fingerprints(sums, wide, outcome != _Outcome.UNREAD), outcome != _Outcome.KEPT


def _refresh(words: list[Words], sums: Sums, wide: Words, outcome: np.ndarray[Any, Any]) -> None:
    """Do the work of the compiled function, run by run."""
    for i, (source, target, nbytes) in enumerate(zip(*(w.tolist() for w in words), strict=True)):
        mode, read, found = RefreshMode(int(outcome[i])), 0, 0
        if mode is not RefreshMode.COPY:
            read, found = isal.crc32c_at(source, nbytes), isal.crc64_at(source, nbytes)
            if mode is RefreshMode.COMPARE and (read, found) == (int(sums[i]), int(wide[i])):
                outcome[i] = _Outcome.KEPT
                continue
        sums[i], wide[i] = streaming.copy_run(source, target, nbytes), found
        known = mode is not RefreshMode.COPY and int(sums[i]) == read
        outcome[i] = _Outcome.WRITTEN if known else _Outcome.UNREAD
