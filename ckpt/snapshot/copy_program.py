"""The copy of one rank's state as a program of units; made once, run at every step.

It stays valid while the tensors stay in place. The pieces of a plan are cut where runs of the block
end (see `holdfast.ckpt.snapshot.run_cuts`). The parts become *units*: groups of about equally many
bytes of parts whose memory is laid out as it is stored, and tensors that have to be packed or
brought from a device. Any thread may copy any unit, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, pairwise
from types import MappingProxyType
from typing import Final, Protocol

import numpy as np
import torch

from holdfast.ckpt import torch_private
from holdfast.ckpt.native import isal
from holdfast.ckpt.native.streaming import Words, copy_runs, sums_of_runs
from holdfast.ckpt.native.sums import SUM_BYTES, Flags, Lengths, Sums, set_runs
from holdfast.ckpt.snapshot.fixed_choice import LEAST_BYTES
from holdfast.ckpt.snapshot.fixed_part import FixedLayout, FixedPiece, PieceKey
from holdfast.ckpt.snapshot.lanes import Lane, Lanes
from holdfast.ckpt.snapshot.part_memory import PartCopy, PartMemory, check_turn
from holdfast.ckpt.snapshot.run_cuts import Cover, OrderedRanges
from holdfast.ckpt.snapshot.touched import touched_bytes
from holdfast.ckpt.state import torch_dtypes
from holdfast.ckpt.state.capture import CapturePlan, FlatState
from holdfast.ckpt.state.copying import resolved, room_for
from holdfast.ckpt.state.local_boxes import counted_of, local_of, mark_of, view_of

UNIT_BYTES = 4 << 20
"""The approximate largest size of a unit, which a thread copies without a check in between."""

EMPTY: Final[Mapping[str, Flags]] = MappingProxyType({})

PART_BYTES = 4 << 10
"""The cost of a part beside its bytes, in bytes: tiny parts cost time, too."""


@dataclass(frozen=True, slots=True)
class PayloadBuffer:
    """The payload of a slot: ``view`` and the address of its first byte.

    ``parts`` knows which parts lie there already; without it everything is written.
    """

    view: memoryview
    address: int
    parts: PartCopy | None = None

    @classmethod
    def of(cls, view: memoryview, *, parts: PartCopy | None = None) -> PayloadBuffer:
        """Return ``view`` with its address; an empty one has no address."""
        return cls(view, isal.address_of(view) if view.nbytes else 0, parts)


@dataclass(frozen=True, slots=True)
class Probe:
    """Bytes to check twice: ``live`` returns the CRC32C of the source, the copy is at ``at``."""

    live: Callable[[], int]
    at: int
    nbytes: int


class Unit(Protocol):
    """A share of the copy: its ``pieces``, its ``parts`` of the program's parts, and its size."""

    @property
    def pieces(self) -> Sequence[int]: ...
    @property
    def parts(self) -> slice: ...
    @property
    def nbytes(self) -> int: ...

    def copy(self, room: PayloadBuffer) -> Sums:
        """Copy into ``room``; return the CRC32C of each part as written."""
        ...

    def probes(self, turn: int, nbytes: int) -> Iterator[Probe]:
        """Yield a sample of about ``nbytes``; each ``turn`` gives another one."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Adjacent:
    """Parts of pieces whose host memory is laid out as it is stored. ``sources`` are addresses."""

    pieces: Sequence[int]
    parts: slice
    sources: Words
    ats: Words
    sizes: Words
    nbytes: int

    def copy(self, room: PayloadBuffer) -> Sums:
        targets = self.ats + np.uint64(room.address)
        if room.parts is None:
            return copy_runs(self.sources, targets, self.sizes)
        return room.parts.copy(self.parts, self.sources, targets, self.sizes)

    def probes(self, turn: int, nbytes: int) -> Iterator[Probe]:
        count = len(self.sizes)
        for i in range(count):
            j = (turn + i) % count
            whole = int(self.sizes[j])
            start = turn // count * nbytes % whole
            size = min(whole - start, nbytes)
            live = partial(isal.crc32c_at, int(self.sources[j]) + start, size)
            yield Probe(live, int(self.ats[j]) + start, size)
            nbytes -= size
            if nbytes <= 0:
                return


@dataclass(frozen=True, slots=True)
class Packed:
    """A whole piece in host memory whose elements are not adjacent."""

    pieces: Sequence[int]
    parts: slice
    source: torch.Tensor
    at: int
    ats: Words
    sizes: Words
    nbytes: int

    def copy(self, room: PayloadBuffer) -> Sums:
        into = room.view[self.at : self.at + self.nbytes]
        room_for(self.source, into).copy_(torch_dtypes.as_carrier(resolved(self.source)))
        return _sums_of_rewritten(self, room)

    def probes(self, turn: int, nbytes: int) -> Iterator[Probe]:
        rows = self.source.shape[0] if self.source.ndim else 1
        row = self.nbytes // rows
        count = min(max(nbytes // row, 1), rows)
        first = min((turn * count) % rows, rows - count)
        part = self.source.narrow(0, first, count) if self.source.ndim else self.source
        yield Probe(partial(_packed_checksum, part), self.at + first * row, count * row)


@dataclass(frozen=True, slots=True)
class Carried:
    """A whole piece in a device's memory, copied to the host by ``lane``."""

    pieces: Sequence[int]
    parts: slice
    source: torch.Tensor
    lane: Lane
    at: int
    ats: Words
    sizes: Words
    nbytes: int

    def arrived(self, room: PayloadBuffer) -> Sums:
        """Return the CRC32C of each part, once the lane has copied them."""
        return _sums_of_rewritten(self, room)


def _sums_of_rewritten(unit: Packed | Carried, room: PayloadBuffer) -> Sums:
    """Return the CRC32C of each part of a unit that was written as a whole."""
    if room.parts is not None:
        room.parts.rewritten(unit.parts)
    return sums_of_runs(unit.ats + np.uint64(room.address), unit.sizes)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's bytes lie in host memory as they are stored."""
    lazy = tensor.is_conj() or tensor.is_neg()
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not lazy


def _packed_checksum(part: torch.Tensor) -> int:
    packed = resolved(part).contiguous()
    return isal.crc32c_at(packed.data_ptr(), packed.nbytes)


def _stage_for(source: torch.Tensor) -> torch.Tensor:
    """Return a buffer for a copy on the same device, writable also in inference mode."""
    with torch.inference_mode(mode=False):
        return torch.empty_like(
            torch_dtypes.as_carrier(resolved(source)), memory_format=torch.contiguous_format
        )


class Program:
    """The units of a plan's pieces, for one set of addresses of its tensors.

    The program refers to that memory, which therefore stays until the copy is done, even if the
    tensors are freed. `stage` copies volatile tensors at once, into memory of the program's own.
    Pieces of a ``fixed`` part that is filled are not copied, only checked. Of pieces with
    ``least_bytes`` that change only in part, the parts that changed are copied. ``zeros`` are the
    positions that no piece fills, behind the fixed part; ``nbytes`` are to be copied,
    ``work_bytes`` to be copied or checked. ``exposed`` are the units that are copied from a device
    tensor of the state itself, which could change meanwhile.
    """

    def __init__(
        self,
        plan: CapturePlan,
        flat: FlatState,
        *,
        lanes: Lanes | None = None,
        fixed: FixedLayout | None = None,
        least_bytes: int = LEAST_BYTES,
    ) -> None:
        self.plan, self._lanes, self.fixed = plan, lanes, fixed
        self._kept = len(fixed.pieces) if fixed is not None else 0
        self._marks: list[tuple[int, int]] = []
        self._sources = [source.detach() for source in plan.sources(flat)]
        self._places: list[tuple[int, ...]] = [(each.data_ptr(),) for each in self._sources]
        self._volatile = [
            i
            for i, piece in enumerate(plan.pieces)
            if piece.fqn in flat.volatile and i >= self._kept
        ]
        self._staged_pieces = frozenset(self._volatile)
        self._stages = [_stage_for(self._sources[i]) for i in self._volatile]
        self._staged_at: dict[int, int] = {}
        for i, stage in zip(self._volatile, self._stages, strict=True):
            self._sources[i] = stage
        watched = self._with_versions(flat)
        self._watched = list(chain.from_iterable(watched))
        self._watched_at = [0, *accumulate(map(len, watched))]
        pieces = plan.pieces
        self.parts = OrderedRanges.of(
            _lengths(p.at for p in pieces), _lengths(p.nbytes for p in pieces)
        )
        self.cover = Cover.of(self.parts, plan.payload_bytes)
        self.carried = tuple(self._carried_units())
        self.exposed = tuple(u for u in self.carried if u.pieces[0] not in self._staged_pieces)
        self.units: tuple[Unit, ...] = (*self._adjacent_units(), *self._packed_units())
        gaps = self.cover.gaps
        self.zeros = gaps if fixed is None else gaps[gaps >= fixed.part.nbytes]
        self.memory = PartMemory(self.parts.edges, least_parts=-(-least_bytes // SUM_BYTES))
        self.nbytes = sum(piece.nbytes for piece in pieces[self._kept :])
        self.kept_bytes = sum(piece.nbytes for piece in pieces[: self._kept])
        left_out = sum(local_of(leaf).nbytes for leaf in flat.left_out.values())
        self.work_bytes = self.nbytes + self.kept_bytes + left_out

    def first_sums(self) -> Sums:
        """Return the checksums of all parts before the copy: only those of fixed pieces count."""
        sums = np.zeros(len(self.parts), dtype=np.uint32)
        for i, piece in enumerate(self.plan.pieces[: self._kept]):
            assert self.fixed is not None
            sums[self.parts.edges[i] : self.parts.edges[i + 1]] = self.fixed.pieces[piece.key].sums
        return sums

    def fixed_pieces(self, sums: Sums) -> dict[PieceKey, FixedPiece]:
        """Return the pieces that were copied into the fixed part, from the sums of all parts."""
        assert self.fixed is not None
        edges, crcs = self.parts.edges, self.parts.of_ranges(sums).tolist()
        pieces = self.plan.pieces[: len(self.fixed.at)]
        return {
            piece.key: FixedPiece(crc=crcs[i], sums=sums[edges[i] : edges[i + 1]], mark=mark)
            for i, (piece, mark) in enumerate(zip(pieces, self._marks, strict=True))
        }

    def contents(self, sums: Sums, versions: Sequence[int]) -> dict[PieceKey, tuple[int, ...]]:
        """Return what tells the contents of every piece apart in two snapshots.

        Those are their checksum, from the ``sums`` of all parts, their address, and the counts of
        in-place writes, from the ``versions`` at the time of the snapshot.
        """
        crcs, at = self.parts.of_ranges(sums).tolist(), self._watched_at
        return {
            piece.key: (crcs[i], *self._places[i], *versions[at[i] : at[i + 1]])
            for i, piece in enumerate(self.plan.pieces)
        }

    def changed(self, flat: FlatState, *, stop: Callable[[], bool]) -> list[PieceKey] | None:
        """Return the kept pieces whose bytes now are not those of the fixed part.

        ``stop`` is called between two pieces and at the end. Once it is true, the tensors may
        change: the rest is not looked at, and the result is None.
        """
        found = []
        for i, piece in enumerate(self.plan.pieces[: self._kept]):
            if stop():
                return None
            source = self._sources[i]
            if piece.fqn in flat.volatile:
                source = view_of(flat.tensors[piece.fqn], piece.region)
            if self.fixed is not None and (
                _packed_checksum(source) != self.fixed.pieces[piece.key].crc
            ):
                found.append(piece.key)
        return None if stop() else found

    def _with_versions(self, flat: FlatState) -> list[list[torch.Tensor]]:
        """Return per piece the tensors whose versions to check; staged ones have none."""
        return [
            [] if i in self._staged_pieces else counted_of(flat.tensors[piece.fqn])
            for i, piece in enumerate(self.plan.pieces)
        ]

    def stage(
        self, flat: FlatState, *, step: int, turn: int = 0, touched: Mapping[str, Flags] = EMPTY
    ) -> list[str]:
        """Copy the volatile tensors now.

        Of a tensor whose ``touched`` rows are known, by FQN, only those are read. Returns the
        tensors in which other rows have changed, too: all of them were read in the end.
        """
        if self.fixed is not None and not self.fixed.is_filled:
            pieces = self.plan.pieces[: len(self.fixed.at)]
            self._marks = [mark_of(flat.tensors[piece.fqn]) for piece in pieces]
        self.memory.unsettle()
        whole, into, wrong = list[torch.Tensor](), list[torch.Tensor](), list[str]()
        try:
            for i, stage in zip(self._volatile, self._stages, strict=True):
                piece = self.plan.pieces[i]
                source = resolved(view_of(flat.tensors[piece.fqn], piece.region))
                stayed = self._staged_at.get(i) == source.data_ptr()
                self._staged_at[i] = source.data_ptr()
                self._places[i] = mark_of(flat.tensors[piece.fqn])
                rows = touched.get(piece.fqn) if stayed else None
                local = local_of(flat.tensors[piece.fqn])
                if rows is not None and _is_plain(source) and _is_plain(local):
                    named = self._named(i, source, local, rows)
                    if not self._refresh(i, (source, stage), named, step=step, turn=turn):
                        wrong.append(piece.fqn)
                else:
                    self.memory.unread[self._parts_of(i)] = True
                    whole.append(torch_dtypes.as_carrier(source))
                    into.append(stage)
            if whole:
                with torch.no_grad():
                    torch_private.copy_each(into, whole)
        except BaseException:
            self.memory.source.forget()
            raise
        return wrong

    def _named(self, i: int, source: torch.Tensor, local: torch.Tensor, rows: Flags) -> Flags:
        """Return the parts of a piece that have bytes of named rows."""
        parts = self._parts_of(i)
        at = self.parts.at[parts] - self.plan.pieces[i].at + source.data_ptr() - local.data_ptr()
        return touched_bytes(rows, local[0].nbytes, at, self.parts.nbytes[parts])

    def _refresh(
        self,
        i: int,
        pair: tuple[torch.Tensor, torch.Tensor],
        named: Flags,
        *,
        step: int,
        turn: int,
    ) -> bool:
        """Bring a stage up to date; return False if other parts changed than those ``named``.

        ``pair`` are the piece and its stage.
        """
        parts = self._parts_of(i)
        at = (self.parts.at[parts] - self.plan.pieces[i].at).astype(np.uint64)
        source, stage = (np.uint64(tensor.data_ptr()) + at for tensor in pair)
        runs = (source, stage, self.parts.nbytes[parts].astype(np.uint64))
        looked = named | check_turn(len(at), turn)
        changed = self.memory.stage(parts, runs, read=looked, step=step)
        if not (changed & ~named).any():
            return True
        self.memory.stage(parts, runs, read=np.ones(len(at), dtype=np.bool_), step=step)
        return False

    def since(self, step: int, *, nbytes: int) -> Lengths:
        """Return the step since which each run of a block of ``nbytes`` is the same."""
        born = step if self.memory.born is None else self.memory.born
        return self.cover.newest(self.memory.since, born=born, step=step, nbytes=nbytes)

    def versions(self) -> list[int]:
        """Return the counts of in-place writes so far, for `written`."""
        return list(map(torch_private.version_of, self._watched))

    def written(self, pieces: Sequence[int], before: Sequence[int]) -> str:
        """Return the name of one of ``pieces`` that was written to since ``before``, or ""."""
        for i in pieces:
            own = slice(self._watched_at[i], self._watched_at[i + 1])
            if list(map(torch_private.version_of, self._watched[own])) != before[own]:
                return self.plan.pieces[i].fqn
        return ""

    def _lane(self, i: int) -> Lane | None:
        return self._lanes.of(self._sources[i]) if self._lanes is not None else None

    def _is_adjacent(self, i: int) -> bool:
        return _is_plain(self._sources[i]) and self._lane(i) is None and i >= self._kept

    def _parts_of(self, i: int) -> slice:
        return slice(int(self.parts.edges[i]), int(self.parts.edges[i + 1]))

    def _range(self, first: int, end: int) -> tuple[slice, Words, Words]:
        """Return parts ``first … end-1`` with their positions and sizes."""
        chosen = slice(first, end)
        at, nbytes = self.parts.at[chosen], self.parts.nbytes[chosen]
        return chosen, at.astype(np.uint64), nbytes.astype(np.uint64)

    def _whole(self, i: int) -> tuple[slice, Words, Words]:
        return self._range(int(self.parts.edges[i]), int(self.parts.edges[i + 1]))

    def _carried_units(self) -> Iterator[Carried]:
        for i, piece in enumerate(self.plan.pieces):
            if i >= self._kept and (lane := self._lane(i)) is not None:
                parts, ats, sizes = self._whole(i)
                yield Carried(
                    (i,), parts, self._sources[i], lane, piece.at, ats, sizes, piece.nbytes
                )

    def _packed_units(self) -> Iterator[Packed]:
        for i, piece in enumerate(self.plan.pieces):
            if i >= self._kept and self._lane(i) is None and not self._is_adjacent(i):
                parts, ats, sizes = self._whole(i)
                yield Packed((i,), parts, self._sources[i], piece.at, ats, sizes, piece.nbytes)

    def _adjacent_units(self) -> Iterator[Adjacent]:
        """Divide the parts that are laid out as stored into units of about `UNIT_BYTES`."""
        owner = self.parts.owner
        plain = np.array([self._is_adjacent(i) for i in range(len(self.plan.pieces))], np.bool_)
        address = np.array(
            [self._sources[i].data_ptr() if plain[i] else 0 for i in range(len(plain))], np.uint64
        )
        starts = _lengths(piece.at for piece in self.plan.pieces)
        weight = np.cumsum(self.parts.nbytes + PART_BYTES)
        for lo, hi in set_runs(plain[owner]):
            unit = (weight[lo:hi] - weight[lo]) // UNIT_BYTES
            cuts = [lo, *(np.flatnonzero(np.diff(unit)) + lo + 1).tolist(), hi]
            for first, end in pairwise(cuts):
                chosen, ats, sizes = self._range(first, end)
                owners = owner[chosen]
                sources = address[owners] + ats - starts[owners].astype(np.uint64)
                pieces = tuple(range(int(owners[0]), int(owners[-1]) + 1))
                yield Adjacent(pieces, chosen, sources, ats, sizes, int(sizes.sum()))


def _lengths(values: Iterable[int]) -> Lengths:
    return np.fromiter(values, dtype=np.int64)
