"""Plan how saved chunks become wanted boxes: every wanted cell exactly once. Pure.

Chunks of a tensor are sorted along the dim that cuts it most, and a wanted box looks only at
those that can meet it, all at once: work grows with chunks plus copies, not with their product.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod

import msgspec
import numpy as np
from numpy.typing import NDArray

from ckpt.errors import CorruptError, MismatchError
from ckpt.grid import fault_of_cover
from ckpt.index import ChunkRef, ShardIndex
from ckpt.layout import Box, TensorSpec

SHOWN_PROBLEMS = 6

Wanted = Mapping[str, tuple[TensorSpec, tuple[Box, ...]]]
Ints = NDArray[np.int64]


class Copy(msgspec.Struct, frozen=True, kw_only=True):
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
    """All copies, grouped by chunk in the order the chunks lie at their writers."""

    copies: tuple[Copy, ...]

    def refs(self) -> list[ChunkRef]:
        """Return every chunk that is needed, once, in order."""
        return [copies[0].ref for copies in self.by_chunk()]

    def by_chunk(self) -> Iterator[tuple[Copy, ...]]:
        """Yield the copies of one chunk after another."""
        at = 0
        while at < len(self.copies):
            end, first = at + 1, chunk_key(self.copies[at].ref)
            while end < len(self.copies) and chunk_key(self.copies[end].ref) == first:
                end += 1
            yield self.copies[at:end]
            at = end

    @property
    def bytes(self) -> int:
        """Bytes that will be read."""
        return sum(ref.chunk.nbytes for ref in self.refs())


def chunk_key(ref: ChunkRef) -> tuple[int, str, int]:
    """Return what tells a chunk from all others of a step."""
    return (ref.writer, ref.fqn, ref.chunk.at)


def saved_specs(have: Sequence[ShardIndex]) -> dict[str, TensorSpec]:
    """Return every saved tensor. Raises ``CorruptError`` where writers contradict each other."""
    specs: dict[str, TensorSpec] = {}
    for index in have:
        for fqn, entry in index.tensors.items():
            spec = TensorSpec(fqn=fqn, dtype=entry.dtype, shape=entry.shape)
            if specs.setdefault(fqn, spec) != spec:
                raise CorruptError(
                    f"{fqn}: writer {index.writer} saved {spec.dtype} {spec.shape}, another writer "
                    f"{specs[fqn].dtype} {specs[fqn].shape}; use another restore point"
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
    extra = [f"extra: {fqn} was saved and is not wanted" for fqn in sorted(saved.keys() - used)]
    return differs + missing + extra


def mismatch(problems: Sequence[str], *, origin: str = "the saved state") -> MismatchError:
    """Return the error that lists the first few problems."""
    shown = "; ".join(problems[:SHOWN_PROBLEMS])
    more = f"; and {len(problems) - SHOWN_PROBLEMS} more" if len(problems) > SHOWN_PROBLEMS else ""
    return MismatchError(
        f"{origin} does not fit this state ({len(problems)} differences): {shown}{more}. Build "
        "the model and optimizer that were saved, choose another checkpoint, or pass "
        "strict=False to restore what has the same name and shape"
    )


def plan(
    have: Sequence[ShardIndex],
    want: Wanted,
    *,
    strict: bool = True,
    ignore: Collection[str] = (),
) -> ReshardPlan:
    """Return the copies that fill every wanted box, each cell exactly once.

    Raises ``MismatchError`` listing missing, extra and different tensors (where not ``strict``:
    different ones only; missing ones are then left out) and ``CorruptError`` where the saved
    chunks of a wanted tensor do not cover it exactly once.
    """
    aliases = saved_aliases(have)
    specs = {fqn: spec for fqn, (spec, _) in want.items()}
    saved = saved_specs(have)
    if problems := differences(saved, specs, aliases=aliases, strict=strict, ignore=ignore):
        raise mismatch(problems)
    stored_names = {aliases.get(fqn, fqn) for fqn in want}
    refs: dict[str, list[ChunkRef]] = {fqn: [] for fqn in stored_names}
    for index in have:
        for fqn in stored_names & index.tensors.keys():
            entry = index.tensors[fqn]
            refs[fqn].extend(
                ChunkRef(writer=index.writer, fqn=fqn, dtype=entry.dtype, chunk=chunk)
                for chunk in entry.chunks
            )
    tables = {fqn: _Table(saved[fqn], refs[fqn]) for fqn in stored_names if fqn in saved}
    copies: list[Copy] = []
    for fqn, (_, boxes) in want.items():
        table = tables.get(aliases.get(fqn, fqn))
        if table is not None:
            for number, box in enumerate(boxes):
                copies += table.copies(fqn, number, box)
    copies.sort(key=lambda copy: (copy.ref.writer, copy.ref.chunk.at, copy.ref.fqn))
    return ReshardPlan(copies=tuple(copies))


class _Table:
    """The chunks of one tensor, sorted along the dim that cuts it most."""

    def __init__(self, spec: TensorSpec, refs: Sequence[ChunkRef]) -> None:
        self._alike = {ref.chunk.box: ref for ref in refs}
        self._spec, self._refs = spec, refs
        self._sorted = False
        if fault := fault_of_cover(spec.shape, [ref.chunk.box for ref in refs]):
            raise CorruptError(
                f"{spec.fqn}: the saved chunks are not the whole tensor: {fault}; "
                "use another restore point"
            )

    def _sort(self) -> None:
        refs = [ref for ref in self._refs if ref.chunk.box.size]
        dims = len(self._spec.shape)
        lo = np.array([ref.chunk.box.offset for ref in refs], dtype=np.int64)
        lo = lo.reshape(len(refs), dims)
        extent = np.array([ref.chunk.box.shape for ref in refs], dtype=np.int64)
        hi = lo + extent.reshape(len(refs), dims)
        self._dim = max(range(dims), key=lambda d: len(np.unique(lo[:, d])), default=-1)
        if dims:
            order = np.argsort(lo[:, self._dim], kind="stable")
            refs, lo, hi = [refs[i] for i in order], lo[order], hi[order]
            self._reach: Ints = np.maximum.accumulate(hi[:, self._dim])
        self._refs, self._lo, self._hi = refs, lo, hi
        self._sorted = True

    def copies(self, fqn: str, number: int, box: Box) -> Iterator[Copy]:
        """Yield what fills ``box``."""
        if not box.size:
            return
        if (alike := self._alike.get(box)) is not None:
            region = Box(offset=(0,) * len(box.shape), shape=box.shape)
            yield Copy(fqn=fqn, ref=alike, src=region, box=number, dst=region)
            return
        if not self._sorted:
            self._sort()
        first, last = self._candidates(box)
        start = np.array(box.offset, dtype=np.int64)
        lo = np.maximum(self._lo[first:last], start)
        hi = np.minimum(self._hi[first:last], start + np.array(box.shape, dtype=np.int64))
        extent = hi - lo
        hits = np.flatnonzero((extent > 0).all(axis=1))
        if int(extent[hits].prod(axis=1).sum()) != prod(box.shape):
            raise CorruptError(f"{fqn}: the saved chunks do not cover {box}")
        chunk_lo = self._lo[first:last]
        for i in hits:
            shape = tuple(extent[i].tolist())
            yield Copy(
                fqn=fqn,
                ref=self._refs[first + int(i)],
                src=Box(offset=tuple((lo[i] - chunk_lo[i]).tolist()), shape=shape),
                box=number,
                dst=Box(offset=tuple((lo[i] - start).tolist()), shape=shape),
            )

    def _candidates(self, box: Box) -> tuple[int, int]:
        if self._dim < 0:
            return 0, len(self._refs)
        begin = box.offset[self._dim]
        end = begin + box.shape[self._dim]
        first = int(np.searchsorted(self._reach, begin, side="right"))
        return first, int(np.searchsorted(self._lo[:, self._dim], end, side="left"))
