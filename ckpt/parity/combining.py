"""Combination of fragments over GF(256) in pieces that fit into the cache, with checksums.

One compiled pass does all of it on processors that can: `holdfast.ckpt.native.xored`, and
`holdfast.ckpt.native.mixed` for other coefficients than one. Elsewhere ISA-L writes a piece into
memory of the thread's own. From there the piece is copied past the cache to its destination and
checksummed on the way (`holdfast.ckpt.native.streaming`). That takes no longer than to let ISA-L
store it there directly, which makes the processor fetch the memory that is about to be overwritten;
so the checksum is free. An output that equals one fragment is copied directly.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from typing_extensions import Buffer

from holdfast.ckpt.native import isal, mixed, xored
from holdfast.ckpt.native.streaming import MemoryRuns, Words
from holdfast.ckpt.native.sums import Lengths, Sums, combined, of_zeros

Coefficients: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

_Pass: TypeAlias = Callable[[list[int], list[int], Sequence[int], Lengths], Sums]
"""Makes all combinations of the inputs of some numbers and addresses at the targets, between stops;
returns the checksums, shape (targets, stops - 1)."""

PIECE_BYTES: Final = 256 << 10
_PAGE_BYTES: Final = 4096


def combine(
    coefficients: Coefficients,
    sources: Sequence[Buffer],
    into: Sequence[Buffer],
    *,
    cuts: Sequence[int] = (),
    before: Callable[[int, int], None] | None = None,
) -> Sums:
    """Overwrite every buffer of ``into`` with its combination of ``sources``.

    ``coefficients`` has the shape (outputs, inputs). The outputs are of one length; a shorter
    source is extended by zeros. Returns the CRC32C of the parts into which ``cuts``, in order,
    divide each output: shape (outputs, cuts + 1). ``before(lo, hi)`` is called before those bytes
    of the sources are used; the bytes it reads are then in the cache. Raises ``ValueError`` for a
    source that is too long, and for outputs of different lengths.
    """
    lengths = [memoryview(each).nbytes for each in sources]
    sizes = [memoryview(each).nbytes for each in into]
    nbytes = sizes[0]
    if any(size != nbytes for size in sizes) or max(lengths, default=0) > nbytes:
        raise ValueError(f"sources of {lengths} bytes do not fit into {sizes}")
    if not nbytes:
        return np.zeros((len(into), len(cuts) + 1), dtype=np.uint32)
    inputs = [
        isal.address_of(each) if length else 0
        for each, length in zip(sources, lengths, strict=True)
    ]
    targets = [isal.address_of(each) for each in into]
    if (compiled := _compiled(coefficients)) is not None:
        return _in_one_pass(compiled, inputs, lengths, targets, (0, *cuts, nbytes), before=before)
    pieces = sorted({*lengths, *range(0, nbytes, PIECE_BYTES), 0, nbytes})
    bands = [
        _Band(lo, hi, [number for number, length in enumerate(lengths) if length >= hi])
        for lo, hi in pairwise(sorted({*lengths, 0, nbytes}))
    ]
    straight = [
        (band.lo, band.hi, inputs[band.reach[0]]) for band in bands if band.is_copy(coefficients)
    ]
    storing = _Storing(pieces, (0, *cuts, nbytes), targets, straight)
    for band in bands:
        reach, lo, hi = band.reach, band.lo, band.hi
        mixing = _Mixing(coefficients[:, reach], [inputs[each] for each in reach], storing.rooms)
        for at in range(lo - lo % PIECE_BYTES, hi, PIECE_BYTES):
            first, last = max(at, lo), min(at + PIECE_BYTES, hi)
            if before is not None:
                before(first, last)
            if not band.is_copy(coefficients):
                mixing.make(first, last)
            storing.store_next()
    return storing.sums()


def _compiled(coefficients: Coefficients) -> _Pass | None:
    """Return the compiled pass that makes these combinations, None if there is none."""
    outputs, inputs = coefficients.shape
    if outputs == 1 and xored.kernel() is not None and bool((coefficients == 1).all()):
        return lambda _, sources, targets, stops: xored.xor_runs(sources, targets[0], stops)[None]
    if mixed.kernel() is None or inputs > mixed.most_inputs():
        return None
    return lambda reach, sources, targets, stops: mixed.combine_runs(
        coefficients[:, reach], sources, targets, stops
    )


def _in_one_pass(
    compiled: _Pass,
    inputs: Sequence[int],
    lengths: Sequence[int],
    targets: Sequence[int],
    cuts: Sequence[int],
    *,
    before: Callable[[int, int], None] | None,
) -> Sums:
    """Combine by a compiled pass: bytes are read once and stored once (see `combine`)."""
    nbytes = cuts[-1]
    pieces = {0, nbytes, *lengths}
    if before is not None:
        pieces.update(range(0, nbytes, PIECE_BYTES))
    edges: Lengths = np.array(cuts, dtype=np.int64)
    stops: Lengths = np.unique(np.concatenate([edges, np.array([*pieces], dtype=np.int64)]))
    parts = []
    for lo, hi in pairwise(sorted(pieces)):
        if before is not None:
            before(lo, hi)
        reach = [number for number, length in enumerate(lengths) if length >= hi]
        inside = stops[slice(*np.searchsorted(stops, [lo, hi + 1]))]
        if reach:
            parts.append(compiled(reach, [inputs[each] for each in reach], targets, inside))
        else:
            for target in targets:
                ctypes.memset(target + lo, 0, hi - lo)
            parts.append(np.tile(of_zeros(np.diff(inside)), (len(targets), 1)))
    sums = np.concatenate(parts, axis=1)
    if np.array_equal(stops, edges):  # not by their number: edges repeat where a part is empty
        return sums
    places = np.searchsorted(stops, edges)
    of = partial(combined, lengths=np.diff(stops), starts=places[:-1], ends=places[1:])
    return np.stack([of(each) for each in sums])


class _Band(NamedTuple):
    """Bytes ``lo … hi`` of the outputs; the inputs ``reach`` are long enough for them."""

    lo: int
    hi: int
    reach: list[int]

    def is_copy(self, coefficients: Coefficients) -> bool:
        """Return whether every output there is a copy of the same single input."""
        return len(self.reach) == 1 and bool((coefficients[:, self.reach] == 1).all())


class _Mixing:
    """Computes the combinations of some inputs, given by their addresses, piece by piece."""

    def __init__(
        self, coefficients: Coefficients, inputs: Sequence[int], rooms: Sequence[int]
    ) -> None:
        self._inputs, self._rooms = inputs, rooms
        self._sources = (ctypes.c_void_p * len(inputs))()
        self._targets = (ctypes.c_void_p * len(rooms))(*rooms)
        if inputs:
            self._tables = _tables(coefficients.tobytes(), len(inputs))
            self._tables_at = int(self._tables.ctypes.data)

    def make(self, lo: int, hi: int) -> None:
        """Fill the rooms with bytes ``lo … hi`` of the outputs."""
        if not self._inputs:
            for room in self._rooms:
                ctypes.memset(room, 0, hi - lo)
            return
        for number, start in enumerate(self._inputs):
            self._sources[number] = start + lo
        count, outputs = len(self._inputs), len(self._rooms)
        isal.library().ec_encode_data(
            hi - lo, count, outputs, self._tables_at, self._sources, self._targets
        )


class _Storing:
    """Copies pieces from the ``rooms`` of this thread to their destinations, in order.

    ``straight`` are byte ranges that copy an input unchanged: begin, end, and the input's address.
    """

    def __init__(
        self,
        pieces: Sequence[int],
        cuts: Sequence[int],
        targets: Sequence[int],
        straight: Sequence[tuple[int, int, int]],
    ) -> None:
        self.rooms = _scratch.rooms(len(targets))
        self._cuts = np.array(cuts, dtype=np.int64)
        self._stops: Lengths = np.unique(np.concatenate([self._cuts, pieces]))
        ends = np.searchsorted(self._stops, pieces)
        self._ends, self._next = ends.tolist(), 0
        sizes: Words = np.diff(self._stops).astype(np.uint64)
        begins = np.repeat(np.array(pieces[:-1], dtype=np.int64), np.diff(ends))
        starts: Words = self._stops[:-1].astype(np.uint64)
        behind: Words = (self._stops[:-1] - begins).astype(np.uint64)
        self._runs = []
        for room, target in zip(self.rooms, targets, strict=True):
            sources: Words = behind + np.uint64(room)
            for lo, hi, address in straight:
                inside = slice(*np.searchsorted(self._stops, [lo, hi]).tolist())
                sources[inside] = starts[inside] + np.uint64(address)
            self._runs.append(MemoryRuns(sources, starts + np.uint64(target), sizes))

    def store_next(self) -> None:
        """Copy the next piece of each output."""
        first, last = self._ends[self._next : self._next + 2]
        for runs in self._runs:
            runs.copy(first, last)
        self._next += 1

    def sums(self) -> Sums:
        """Return the checksums of the bytes between the cuts, for each output."""
        if np.array_equal(self._stops, self._cuts):
            return np.stack([runs.sums for runs in self._runs])
        edges, lengths = np.searchsorted(self._stops, self._cuts), np.diff(self._stops)
        starts, ends = edges[:-1], edges[1:]
        return np.stack(
            [combined(runs.sums, lengths, starts=starts, ends=ends) for runs in self._runs]
        )


@lru_cache(maxsize=256)
def _tables(coefficients: bytes, inputs: int) -> isal.Bytes:
    return isal.encode_tables(np.frombuffer(coefficients, dtype=np.uint8).reshape(-1, inputs))


class _PieceScratch(threading.local):
    """A thread's buffers for one piece of each output."""

    def __init__(self) -> None:
        self._memory = np.zeros(0, dtype=np.uint8)

    def rooms(self, count: int) -> list[int]:
        """Return the addresses of ``count`` buffers for a piece, aligned to pages."""
        if len(self._memory) < (needed := count * PIECE_BYTES + _PAGE_BYTES):
            self._memory = np.zeros(needed, dtype=np.uint8)
        at = int(self._memory.ctypes.data)
        first = at + -at % _PAGE_BYTES
        return [first + number * PIECE_BYTES for number in range(count)]


_scratch = _PieceScratch()
