"""How one rank's state is copied, step after step: worked out once, run while it stays put.

The pieces of a plan become *units*: ranges of large tensors, batches of small ones, and tensors
that have to be packed or brought from a device. Any thread may copy any unit, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Protocol

import torch

from ckpt import dtypes, isal
from ckpt.capture import CapturePlan, FlatState, Piece
from ckpt.copying import copy_at, copy_many, resolved, room_for
from ckpt.crc import combine
from ckpt.held import local_of, view_of
from ckpt.lanes import Lane, Lanes

RANGE_BYTES = 4 << 20
"""The largest unit: what one thread copies before it looks up."""

SMALL_BYTES = 16 << 10
SHORT_BATCH_BYTES = 256 << 10
_BATCH_PIECES = 256
_VERSION = attrgetter("_version")


@dataclass(frozen=True, slots=True)
class Room:
    """The payload of a slot: ``view`` and the address of its first byte."""

    view: memoryview
    address: int

    @classmethod
    def of(cls, view: memoryview) -> Room:
        """Return the room that ``view`` is; empty ones have no address."""
        return cls(view, isal.address_of(view) if view.nbytes else 0)


@dataclass(frozen=True, slots=True)
class Probe:
    """Bytes to look at twice: ``live`` returns their CRC32C, the copy is at ``at``."""

    live: Callable[[], int]
    at: int
    nbytes: int


class Unit(Protocol):
    """A part of the copy: of which pieces, and how large."""

    @property
    def pieces(self) -> Sequence[int]:
        """Which pieces of the plan it has all or a range of."""
        ...

    @property
    def nbytes(self) -> int:
        """How much is copied."""
        ...

    def copy(self, room: Room) -> list[int]:
        """Copy into ``room``; return the CRC32C of what was written of each piece."""
        ...

    def probes(self, turn: int, nbytes: int) -> Iterator[Probe]:
        """Yield a sample of about ``nbytes``, another one each ``turn``."""
        ...


@dataclass(frozen=True, slots=True)
class Range:
    """Adjacent bytes of one piece in host memory. ``source`` is their address."""

    pieces: Sequence[int]
    source: int
    at: int
    nbytes: int

    def copy(self, room: Room) -> list[int]:
        return [copy_at(self.source, room.address + self.at, self.nbytes)]

    def probes(self, turn: int, nbytes: int) -> Iterator[Probe]:
        size = min(nbytes, self.nbytes)
        start = (turn % -(-self.nbytes // size)) * size
        size = min(size, self.nbytes - start)
        live = partial(isal.crc32c_at, self.source + start, size)
        yield Probe(live, self.at + start, size)


@dataclass(frozen=True, slots=True)
class Batch:
    """Whole pieces in host memory, none of them large; ``short`` ones are copied in one go."""

    pieces: Sequence[int]
    sources: list[int]
    ats: list[int]
    sizes: list[int]
    nbytes: int
    short: bool

    def copy(self, room: Room) -> list[int]:
        targets = [room.address + at for at in self.ats]
        if self.short:
            return copy_many(self.sources, targets, self.sizes)
        return list(map(copy_at, self.sources, targets, self.sizes))

    def probes(self, turn: int, nbytes: int) -> Iterator[Probe]:
        count = len(self.sizes)
        for i in range(count):
            j = (turn + i) % count
            size = min(self.sizes[j], nbytes)
            yield Probe(partial(isal.crc32c_at, self.sources[j], size), self.ats[j], size)
            nbytes -= size
            if nbytes <= 0:
                return


@dataclass(frozen=True, slots=True)
class Packed:
    """A whole piece in host memory whose elements are not adjacent."""

    pieces: Sequence[int]
    source: torch.Tensor
    at: int
    nbytes: int

    def copy(self, room: Room) -> list[int]:
        into = room.view[self.at : self.at + self.nbytes]
        room_for(self.source, into).copy_(dtypes.as_carrier(resolved(self.source)))
        return [isal.crc32c(into)]

    def probes(self, turn: int, nbytes: int) -> Iterator[Probe]:
        rows = self.source.shape[0] if self.source.ndim else 1
        row = self.nbytes // rows
        count = min(max(nbytes // row, 1), rows)
        first = min((turn * count) % rows, rows - count)
        part = self.source.narrow(0, first, count) if self.source.ndim else self.source
        yield Probe(partial(_packed_checksum, part), self.at + first * row, count * row)


@dataclass(frozen=True, slots=True)
class Carried:
    """A whole piece in a device's memory, brought over by ``lane``."""

    pieces: Sequence[int]
    source: torch.Tensor
    lane: Lane
    at: int
    nbytes: int


def _packed_checksum(part: torch.Tensor) -> int:
    packed = resolved(part).contiguous()
    return isal.crc32c_at(packed.data_ptr(), packed.nbytes)


def _stage_for(source: torch.Tensor) -> torch.Tensor:
    """Return room for a copy on the same device, which can be written to in every mode."""
    with torch.inference_mode(mode=False):
        return torch.empty_like(
            dtypes.as_carrier(resolved(source)), memory_format=torch.contiguous_format
        )


class _Batching:
    """Gathers pieces until there are enough for a batch."""

    def __init__(self, room_bytes: int) -> None:
        self._room_bytes = self._left = room_bytes
        self.members: list[int] = []

    def add(self, i: int, nbytes: int) -> list[int]:
        """Take a piece; return those before it where they are a full batch by now."""
        full: list[int] = []
        if self.members and (nbytes > self._left or len(self.members) == _BATCH_PIECES):
            full, self.members, self._left = self.members, [], self._room_bytes
        self.members.append(i)
        self._left -= nbytes
        return full


class Program:
    """The units of a plan's pieces for one place of its tensors in memory.

    Refers to that memory, so that it stays while it is copied, whatever becomes of the tensors.
    Volatile tensors are copied at once by `stage`, into memory of the program's own.
    """

    def __init__(self, plan: CapturePlan, flat: FlatState, *, lanes: Lanes | None = None) -> None:
        self.plan, self._lanes = plan, lanes
        self._sources = [source.detach() for source in plan.sources(flat)]
        self._volatile = [i for i, piece in enumerate(plan.pieces) if piece.fqn in flat.volatile]
        self._stages = [_stage_for(self._sources[i]) for i in self._volatile]
        for i, stage in zip(self._volatile, self._stages, strict=True):
            self._sources[i] = stage
        self._watched = self._with_versions(flat)
        self.units = tuple(self._host_units())
        self.carried = tuple(self._carried_units())
        self.nbytes = sum(piece.nbytes for piece in plan.pieces)

    def _with_versions(self, flat: FlatState) -> list[torch.Tensor]:
        """Return what to ask for versions, per piece: staged ones and inference have none."""
        with torch.inference_mode(mode=False):
            still = torch.empty(0)
        watched = [local_of(flat.tensors[piece.fqn]) for piece in self.plan.pieces]
        for i in self._volatile:
            watched[i] = still
        return [still if tensor.is_inference() else tensor for tensor in watched]

    def stage(self, flat: FlatState) -> None:
        """Copy the volatile tensors as they are now."""
        if not self._stages:
            return
        now = []
        for i in self._volatile:
            piece = self.plan.pieces[i]
            source = resolved(view_of(flat.tensors[piece.fqn], piece.region))
            now.append(dtypes.as_carrier(source))
        with torch.no_grad():
            torch._foreach_copy_(self._stages, now)

    def versions(self) -> list[int]:
        """Return how often each piece was written to in place so far."""
        return list(map(_VERSION, self._watched))

    def written(self, pieces: Sequence[int], before: Sequence[int]) -> str:
        """Return the name of one of ``pieces`` that was written to since ``before``, or nothing."""
        for i in pieces:
            if self._watched[i]._version != before[i]:
                return self.plan.pieces[i].fqn
        return ""

    def checksums(self, found: Sequence[Sequence[int]], carried: Sequence[int]) -> list[int]:
        """Return the CRC32C of each piece from those of all units."""
        sums: dict[int, int] = {}
        for unit, parts in zip(self.units, found, strict=True):
            for i, part in zip(unit.pieces, parts, strict=True):
                sums[i] = combine(sums[i], part, unit.nbytes) if i in sums else part
        for each, crc in zip(self.carried, carried, strict=True):
            sums[each.pieces[0]] = crc
        return [sums[i] for i in range(len(self.plan.pieces))]

    def _lane(self, i: int) -> Lane | None:
        return self._lanes.of(self._sources[i]) if self._lanes is not None else None

    def _carried_units(self) -> Iterator[Carried]:
        for i, piece in enumerate(self.plan.pieces):
            if (lane := self._lane(i)) is not None:
                yield Carried(range(i, i + 1), self._sources[i], lane, piece.at, piece.nbytes)

    def _host_units(self) -> Iterator[Unit]:
        batches = {True: _Batching(SHORT_BATCH_BYTES), False: _Batching(RANGE_BYTES)}
        for i, piece in enumerate(self.plan.pieces):
            if self._lane(i) is not None:
                continue
            if piece.nbytes >= RANGE_BYTES or not self._is_plain(i):
                yield from self._large(i, piece)
                continue
            short = piece.nbytes <= SMALL_BYTES
            if full := batches[short].add(i, piece.nbytes):
                yield self._batch(full, short=short)
        for short, batch in batches.items():
            if batch.members:
                yield self._batch(batch.members, short=short)

    def _is_plain(self, i: int) -> bool:
        source = self._sources[i]
        odd = source.is_conj() or source.is_neg()
        return source.is_contiguous() and not odd and self._lane(i) is None

    def _batch(self, members: Sequence[int], *, short: bool) -> Batch:
        pieces = [self.plan.pieces[i] for i in members]
        sizes = [piece.nbytes for piece in pieces]
        return Batch(
            tuple(members),
            [self._sources[i].data_ptr() for i in members],
            [piece.at for piece in pieces],
            sizes,
            sum(sizes),
            short,
        )

    def _large(self, i: int, piece: Piece) -> Iterator[Unit]:
        whole, source = range(i, i + 1), self._sources[i]
        if not self._is_plain(i):
            yield Packed(whole, source, piece.at, piece.nbytes)
            return
        start = source.data_ptr()
        for at in range(0, piece.nbytes, RANGE_BYTES):
            size = min(RANGE_BYTES, piece.nbytes - at)
            yield Range(whole, start + at, piece.at + at, size)
