"""Plans of copies from saved chunks to wanted boxes; every wanted cell exactly once. Pure.

Chunks of a tensor are sorted along the dim that cuts it most. A wanted box visits only those that
can meet it, all at once: work grows with chunks plus copies, not with their product.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import Final, TypeAlias

import msgspec
import numpy as np

from holdfast.ckpt.errors import CorruptError, MismatchError
from holdfast.ckpt.geometry.grid import fault_of_cover, fault_of_overlap
from holdfast.ckpt.geometry.layout import Box, TensorSpec
from holdfast.ckpt.geometry.shard_index import Chunk, ChunkRef, ShardIndex
from holdfast.ckpt.geometry.spans import Ints, Spans, covers, overlap, spans_of

SHOWN_PROBLEMS = 6

MANY: Final = 32
"""From this number of chunks on, arrays are faster than one chunk after another."""

Wanted = Mapping[str, tuple[TensorSpec, tuple[Box, ...]]]


class Copy(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Copy region ``src`` of a chunk to region ``dst`` of wanted box number ``box`` of ``fqn``.

    ``fqn`` is the wanted name; ``ref.fqn`` differs from it where the saved tensor was tied.
    Both regions are relative to their container and have the same shape.
    """

    fqn: str
    ref: ChunkRef
    src: Box
    box: int
    dst: Box


class ReshardPlan(msgspec.Struct, frozen=True, kw_only=True):
    """All copies, grouped by chunk, in the order of the chunks at their writers."""

    copies: tuple[Copy, ...]

    def refs(self) -> list[ChunkRef]:
        """Return every needed chunk once, in order."""
        return [copies[0].ref for copies in self.by_chunk()]

    def by_chunk(self) -> Iterator[tuple[Copy, ...]]:
        """Yield the copies of one chunk after another."""
        keys = list(map(_place, self.copies))
        at = 0
        for end in range(1, len(keys) + 1):
            if end == len(keys) or keys[end] != keys[at]:
                yield self.copies[at:end]
                at = end

    @property
    def bytes(self) -> int:
        """Bytes of all needed chunks."""
        return sum(ref.chunk.nbytes for ref in self.refs())

    def describe(self) -> ReshardSummary:
        """Return the totals of the plan."""
        needed: dict[int, int] = {}
        chunks = wanted = 0
        for copies in self.by_chunk():
            writer, chunk = copies[0].ref.writer, copies[0].ref.chunk
            needed[writer] = needed.get(writer, 0) + chunk.nbytes
            chunks += 1
            wanted += sum(copy.dst.size for copy in copies) * (chunk.nbytes // chunk.box.size)
        return ReshardSummary(
            copies=len(self.copies), chunks=chunks, wanted_bytes=wanted, needed_bytes=needed
        )


class ReshardSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The totals of a plan; prints as one line.

    ``wanted_bytes`` are the bytes that the copies fill; ``needed_bytes`` gives per writer the bytes
    of the chunks they come from. A source that reads whole chunks reads that much; one that reads
    parts of chunks reads less.
    """

    copies: int
    chunks: int
    wanted_bytes: int
    needed_bytes: dict[int, int]

    @property
    def excess(self) -> float:
        """Bytes of the needed chunks over bytes wanted; 1 where nothing is wanted.

        Below 1 if one chunk fills several boxes.
        """
        return sum(self.needed_bytes.values()) / self.wanted_bytes if self.wanted_bytes else 1.0

    def __str__(self) -> str:
        shares = self.needed_bytes.values()
        return (
            f"{self.copies} copies out of {self.chunks} chunks of {len(shares)} writers: "
            f"{self.wanted_bytes} bytes wanted, {sum(shares)} in these chunks "
            f"({self.excess:.2f} ×), at most {max(shares, default=0)} of one writer"
        )


def chunk_key(ref: ChunkRef) -> tuple[int, str, int]:
    """Return a key that is unique for each chunk of a step."""
    return (ref.writer, ref.fqn, ref.chunk.at)


def saved_specs(have: Sequence[ShardIndex]) -> dict[str, TensorSpec]:
    """Return every saved tensor. Raises ``CorruptError`` if writers contradict each other."""
    specs: dict[str, TensorSpec] = {}
    for index in have:
        for fqn, entry in index.tensors.items():
            spec = specs.get(fqn)
            if spec is None:
                specs[fqn] = TensorSpec(fqn=fqn, dtype=entry.dtype, shape=entry.shape)
            elif spec.shape != entry.shape or spec.dtype != entry.dtype:
                raise CorruptError(
                    f"{fqn}: writer {index.writer} saved {entry.dtype} {entry.shape}, another "
                    f"writer {spec.dtype} {spec.shape}; use another restore point"
                )
    return specs


def saved_aliases(have: Sequence[ShardIndex]) -> dict[str, str]:
    """Return the tied names of all writers: name to stored name."""
    return {name: stored for index in have for name, stored in index.aliases.items()}


def differences(
    saved: Mapping[str, TensorSpec],
    want: Mapping[str, TensorSpec],
    *,
    aliases: Mapping[str, str],
    strict: bool = True,
    ignore: Collection[str] = (),
) -> list[str]:
    """List how wanted and saved tensors differ; missing and extra ones only where ``strict``.

    ``ignore`` names saved tensors that need not be wanted.
    """
    missing, differs = [], []
    used = set(ignore)
    for fqn, spec in want.items():
        stored = aliases.get(fqn, fqn)
        used.add(stored)
        found = saved.get(stored)
        if found is None:
            missing.append(f"missing: {fqn} {spec.dtype} {list(spec.shape)} was not saved")
        elif (found.dtype, found.shape) != (spec.dtype, spec.shape):
            differs.append(
                f"differs: {fqn} is {spec.dtype} {list(spec.shape)}, saved is "
                f"{found.dtype} {list(found.shape)}"
            )
    if not strict:
        return differs
    extra = [
        (f"extra: {fqn} was saved, and this state has no such tensor")
        for fqn in sorted(saved.keys() - used)
    ]
    return differs + missing + extra


def mismatch(problems: Sequence[str], *, origin: str = "the saved state") -> MismatchError:
    """Return the error that lists the first few problems."""
    shown = "; ".join(problems[:SHOWN_PROBLEMS])
    more = f"; and {len(problems) - SHOWN_PROBLEMS} more" if len(problems) > SHOWN_PROBLEMS else ""
    return MismatchError(
        f"{origin} does not fit this state ({len(problems)} differences): {shown}{more}. Build "
        "the model and optimizer that were saved, choose another checkpoint, or pass "
        'strict="ignore" to restore what has the same name and shape'
    )


def plan(
    have: Saved,
    want: Wanted,
    *,
    strict: bool = True,
    ignore: Collection[str] = (),
) -> ReshardPlan:
    """Return the copies that fill every wanted box, each cell exactly once.

    Pass ``SavedChunks`` to plan several times over the same indexes. Raises ``MismatchError``
    listing missing, extra and different tensors (where not ``strict``: different ones only;
    missing ones are then left out) and ``CorruptError`` if the saved chunks of a wanted tensor
    do not cover it exactly once.
    """
    saved = have if isinstance(have, SavedChunks) else SavedChunks(have)
    specs = {fqn: spec for fqn, (spec, _) in want.items()}
    aliases = saved.aliases
    if problems := differences(saved.specs, specs, aliases=aliases, strict=strict, ignore=ignore):
        raise mismatch(problems)
    copies: list[Copy] = []
    for fqn, (_, boxes) in want.items():
        table = saved.table(aliases.get(fqn, fqn))
        if table is not None:
            for number, box in enumerate(boxes):
                copies += table.copies(fqn, number, box)
    copies.sort(key=_place)
    return ReshardPlan(copies=tuple(copies))


def _place(copy: Copy) -> tuple[int, int, str]:
    ref = copy.ref
    return ref.writer, ref.chunk.at, ref.fqn


class SavedChunks:
    """The chunks of all writers by tensor; keeps each tensor's sorted chunks for later plans.

    With ``specs`` and ``aliases``, which then are those of the whole step, ``have`` are the chunks
    that meet the boxes that will be wanted, and perhaps others.
    """

    def __init__(
        self,
        have: Sequence[ShardIndex],
        *,
        specs: Mapping[str, TensorSpec] | None = None,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        """Raise ``CorruptError`` if writers contradict each other."""
        found = saved_specs(have)
        self.specs = found if specs is None else {**specs, **found}
        self.aliases = saved_aliases(have) if aliases is None else dict(aliases)
        self._are_all = specs is None
        self._writers: dict[str, list[int]] = {fqn: [] for fqn in self.specs}
        self._parts: dict[str, list[tuple[Chunk, ...]]] = {fqn: [] for fqn in self.specs}
        for index in have:
            for fqn, entry in index.tensors.items():
                if entry.chunks:
                    self._writers[fqn].append(index.writer)
                    self._parts[fqn].append(entry.chunks)
        self._tables: dict[str, _Table] = {}

    def table(self, fqn: str) -> _Table | None:
        """Return the chunks of one stored tensor, or None if there is none of that name.

        Raises ``CorruptError`` if they do not cover the whole tensor, each cell once; of a part of
        the chunks, if two overlap.
        """
        if fqn not in self.specs:
            return None
        if (table := self._tables.get(fqn)) is None:
            table = self._tables[fqn] = _Table(
                self.specs[fqn],
                self._writers[fqn],
                self._parts[fqn],
                are_all=self._are_all,
            )
        return table


Saved: TypeAlias = Sequence[ShardIndex] | SavedChunks
"""The saved chunks of a step: all indexes, or these in order."""


class _Table:
    """The chunks of one tensor; many are sorted along the dim that cuts it most."""

    def __init__(
        self,
        spec: TensorSpec,
        writers: Sequence[int],
        parts: Sequence[Sequence[Chunk]],
        *,
        are_all: bool,
    ) -> None:
        """Store the chunks of each writer; only wanted ones are visited again."""
        self._spec, self._writers = spec, writers
        self._chunks = chunks = list(chain.from_iterable(parts))
        self._ends = list(accumulate(map(len, parts)))
        self._sweep: _Sweep | None = None
        boxes = [chunk.box for chunk in chunks]
        if len(chunks) >= MANY:
            dims = len(spec.shape)
            spans = spans_of([b.offset for b in boxes], [b.shape for b in boxes], dims=dims)
            if spans is not None and dims and _fit(spec, spans, are_all=are_all):
                self._sweep = _Sweep(spans)
                return
        if not are_all:
            if two := fault_of_overlap(boxes):
                raise CorruptError(f"{spec.fqn}: {two}; use another restore point")
            return
        if fault := fault_of_cover(spec.shape, boxes):
            raise CorruptError(
                f"{spec.fqn}: the saved chunks are not the whole tensor: {fault}; "
                "use another restore point"
            )

    def copies(self, fqn: str, number: int, box: Box) -> Iterator[Copy]:
        """Yield the copies that fill ``box``."""
        if not box.size:
            return
        found = self._one_by_one(box) if self._sweep is None else self._sweep.meet(box)
        filled = 0
        for i, common in found:
            ref = self._ref(i)
            filled += common.size
            src, dst = common.within(ref.chunk.box), common.within(box)
            yield Copy(fqn=fqn, ref=ref, src=src, box=number, dst=dst)
        if filled != box.size:
            raise CorruptError(f"{fqn}: the saved chunks do not cover {box}")

    def _ref(self, number: int) -> ChunkRef:
        writer = self._writers[bisect_right(self._ends, number)]
        spec, chunk = self._spec, self._chunks[number]
        return ChunkRef(writer=writer, fqn=spec.fqn, dtype=spec.dtype, chunk=chunk)

    def _one_by_one(self, box: Box) -> Iterable[tuple[int, Box]]:
        found = []
        for i, chunk in enumerate(self._chunks):
            part = chunk.box.intersect(box)
            if part is None:
                continue
            if part.shape == box.shape:  # it holds the whole box: no other chunk overlaps it
                return [(i, part)]
            found.append((i, part))
        return found


def _fit(spec: TensorSpec, spans: Spans, *, are_all: bool) -> bool:
    """Say whether chunks hold the tensor exactly once; of a part of them, no element twice."""
    return covers(spec.shape, spans) if are_all else not overlap(spans)


class _Sweep:
    """Many boxes, sorted along the dim that cuts them most."""

    def __init__(self, spans: Spans) -> None:
        self._number = np.flatnonzero(spans.full)
        spans = spans.take(self._number)
        self._dim = spans.busiest_dim
        order = np.argsort(spans.lo[self._dim], kind="stable")
        self._number, self._spans = self._number[order], spans.take(order)
        self._reach: Ints = np.maximum.accumulate(self._spans.hi[self._dim])

    def meet(self, box: Box) -> Iterator[tuple[int, Box]]:
        """Yield the number of each box that meets ``box``, with their intersection."""
        start = np.array(box.offset, dtype=np.int64).reshape(-1, 1)
        stop = start + np.array(box.shape, dtype=np.int64).reshape(-1, 1)
        first = int(np.searchsorted(self._reach, start[self._dim, 0], side="right"))
        last = int(np.searchsorted(self._spans.lo[self._dim], stop[self._dim, 0], side="left"))
        lo = np.maximum(self._spans.lo[:, first:last], start)
        extent = np.minimum(self._spans.hi[:, first:last], stop) - lo
        hits = np.flatnonzero((extent > 0).all(axis=0))
        found = (self._number[first:last][hits], lo[:, hits].T, extent[:, hits].T)
        for i, offset, shape in zip(*(column.tolist() for column in found), strict=True):
            yield i, Box(offset=tuple(offset), shape=tuple(shape))
