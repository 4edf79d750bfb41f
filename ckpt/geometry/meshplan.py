"""Plans from one mesh to another for worlds of any size; no rank's boxes are listed. Pure.

Along each dim the saved and the wanted intervals are merged once; the overlaps of two partitions
are the products of those. So a rank finds its own part by visiting only the intervals that overlap
it, and the whole plan is a stream of tables. Work is proportional to overlaps, memory to one table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from math import prod
from typing import Final

import numpy as np

from holdfast.ckpt.geometry.layout import TensorSpec
from holdfast.ckpt.geometry.partition import DimCuts, MeshLayout, Partition, cut_like, cuts
from holdfast.ckpt.geometry.reshard import differences, mismatch
from holdfast.ckpt.geometry.spans import Ints, expand

ROWS: Final = 1 << 16
"""The default rows of a table: about 6 MB for a matrix."""

_CACHED: Final = 32
"""The number of merged dims that are cached, each at most 1 MB at 16,384 ranks."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Moves:
    """Rows of a plan for one tensor: cell ``cell`` of rank ``source`` goes to ``target``.

    Of the saved cell (numbered as in ``saved``) the region at ``src`` of extent ``shape`` goes to
    ``dst`` in cell ``box`` of ``wanted``. ``source`` is the rank that wrote the cell. Columns are
    int64 arrays of one entry per row; ``src``, ``dst`` and ``shape`` have shape (dims, rows).
    Tables of one plan share columns: do not write to them.
    """

    spec: TensorSpec
    saved: Partition
    wanted: Partition
    source: Ints
    target: Ints
    cell: Ints
    box: Ints
    src: Ints
    dst: Ints
    shape: Ints

    def __len__(self) -> int:
        return len(self.source)

    @property
    def sizes(self) -> Ints:
        """Elements that each row copies; int64."""
        return np.asarray(self.shape.prod(axis=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPlanSummary:
    """The totals of a plan: rows and bytes over all ranks, and the most rows for one tensor."""

    tensors: int
    sources: int
    targets: int
    overlaps: int
    wanted_bytes: int
    most_overlaps: int

    def __str__(self) -> str:
        each = self.overlaps / max(self.targets, 1)
        return (
            f"{self.tensors} tensors from {self.sources} to {self.targets} ranks: "
            f"{self.overlaps} copies, {each:.1f} a rank, of {self.wanted_bytes} bytes in all; "
            f"at most {self.most_overlaps} copies of one tensor"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPlan:
    """The copies that take every tensor from ``saved`` to ``wanted``; each wanted cell once.

    Every rank that makes this plan gets the same one. Raises ``MismatchError`` if the two hold
    different tensors; without ``strict`` only tensors that both hold are planned.
    """

    saved: MeshLayout
    wanted: MeshLayout
    strict: bool = True
    _turns: Mapping[str, int] = field(init=False, repr=False, compare=False)
    _groups: Sequence[Sequence[str]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        have = {fqn: placed.spec for fqn, placed in self.saved.tensors.items()}
        want = {fqn: placed.spec for fqn, placed in self.wanted.tensors.items()}
        if problems := differences(have, want, aliases={}, strict=self.strict):
            raise mismatch(problems)
        object.__setattr__(self, "_turns", self.saved.turns())
        groups: dict[tuple[object, ...], list[str]] = {}
        for fqn in want.keys() & have.keys():
            key = cut_like(self.saved.tensors[fqn]), cut_like(self.wanted.tensors[fqn])
            groups.setdefault(key, []).append(fqn)
        ordered = [sorted(names) for names in groups.values()]
        object.__setattr__(self, "_groups", sorted(ordered))

    def of(self, rank: int, *, rows: int = ROWS) -> Iterator[Moves]:
        """Yield the rows for one rank of the wanted mesh, in tables of at most ``rows`` rows.

        Visits only cells that overlap the rank's own. Raises ``ValueError`` for a rank that is not
        on the mesh.
        """
        for names in self._groups:
            pair = self._pair(names[0])
            holders = self.wanted.holders(pair.wanted, rank)
            merged = [
                _merge(saved, wanted, wanted.of(holder))
                for (saved, wanted), holder in zip(pair.dims(), holders, strict=True)
            ]
            yield from self._tables(names, pair, merged, np.array([rank - sum(holders)]), rows)

    def stream(self, *, rows: int = ROWS) -> Iterator[Moves]:
        """Yield the whole plan in tables of at most ``rows`` rows; tensors cut alike together."""
        for names in self._groups:
            pair = self._pair(names[0])
            yield from self._tables(names, pair, pair.merged(), pair.wanted.replicas, rows)

    def describe(self) -> MeshPlanSummary:
        """Return the plan's totals without making a single row."""
        overlaps = most = nbytes = 0
        for names in self._groups:
            pair = self._pair(names[0])
            rows = prod(map(len, pair.merged())) * len(pair.wanted.replicas)
            overlaps, most = overlaps + rows * len(names), max(most, rows)
            for fqn in names:
                placed = self.wanted.tensors[fqn]
                elements = prod(placed.spec.shape) * len(pair.wanted.replicas)
                nbytes += elements * placed.itemsize
        return MeshPlanSummary(
            tensors=sum(map(len, self._groups)),
            sources=self.saved.world_size,
            targets=self.wanted.world_size,
            overlaps=overlaps,
            most_overlaps=most,
            wanted_bytes=nbytes,
        )

    def _pair(self, fqn: str) -> _Pair:
        return _Pair(saved=self.saved.partition(fqn), wanted=self.wanted.partition(fqn))

    def _tables(
        self,
        names: Sequence[str],
        pair: _Pair,
        merged: Sequence[_Merged],
        replicas: Ints,
        rows: int,
    ) -> Iterator[Moves]:
        """Yield the products of the merged dims and of ``replicas``, for tensors cut alike."""
        for *spans, some in blocks([*map(len, merged), len(replicas)], rows):
            part = [dim.take(span) for dim, span in zip(merged, spans, strict=True)]
            first = _table(self.wanted.tensors[names[0]].spec, pair, part, replicas[some])
            for fqn in names:
                writer = pair.saved.replica(first.cell, turn=self._turns[fqn])
                source = first.source if writer is None else first.source + writer
                yield replace(first, spec=self.wanted.tensors[fqn].spec, source=source)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    saved: Partition
    wanted: Partition

    def dims(self) -> Iterator[tuple[DimCuts, DimCuts]]:
        return zip(self.saved.dims, self.wanted.dims, strict=True)

    def merged(self) -> list[_Merged]:
        return [_merged(saved, wanted) for saved, wanted in self.dims()]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Merged:
    """The overlaps of one dim: the two intervals, the start in each, and the length."""

    saved: Ints
    wanted: Ints
    src: Ints
    dst: Ints
    extent: Ints

    def __len__(self) -> int:
        return len(self.saved)

    def take(self, span: slice) -> _Merged:
        return _Merged(
            saved=self.saved[span],
            wanted=self.wanted[span],
            src=self.src[span],
            dst=self.dst[span],
            extent=self.extent[span],
        )


def _merge(saved: DimCuts, wanted: DimCuts, only: Ints) -> _Merged:
    """Find the intervals that overlap the intervals ``only`` of ``wanted``, by bisection."""
    start, stop = wanted.start[only], wanted.stop[only]
    first = saved.stop.searchsorted(start, side="right")
    last = saved.start.searchsorted(stop, side="left")
    ones, others = expand(first, last - first)
    lo = np.maximum(saved.start[others], start[ones])
    return _Merged(
        saved=others,
        wanted=only[ones],
        src=lo - saved.start[others],
        dst=lo - start[ones],
        extent=np.minimum(saved.stop[others], stop[ones]) - lo,
    )


@lru_cache(maxsize=_CACHED)
def _merged(saved: DimCuts, wanted: DimCuts) -> _Merged:
    return _merge(saved, wanted, np.arange(len(wanted)))


def blocks(sizes: Sequence[int], rows: int) -> Iterator[tuple[slice, ...]]:
    """Yield slices that cut an array of ``sizes`` into blocks of at most ``rows``, in C order.

    Raises ``ValueError`` for blocks without an element.
    """
    if rows < 1:
        raise ValueError(f"tables of {rows} rows hold nothing; ask for at least 1")
    room, steps = rows, []
    for size in reversed(sizes):
        steps.append(max(min(size, room), 1))
        room //= steps[-1]
    spans = [
        [slice(at, min(at + step, size)) for at in range(0, size, step)]
        for size, step in zip(sizes, reversed(steps), strict=True)
    ]
    return product(*spans)


_NOTHING: Final = np.int64(0)


def _table(spec: TensorSpec, pair: _Pair, merged: Sequence[_Merged], replicas: Ints) -> Moves:
    """Return the product of the dims; ``source`` is the first replica of each cell."""
    sizes = (*map(len, merged), len(replicas))
    total, dims = prod(sizes), len(merged)

    def laid(columns: Sequence[Ints]) -> list[Ints]:
        """Reshape each dim's column along its own direction of the product."""
        return [c.reshape(-1, *(1,) * (len(sizes) - 1 - d)) for d, c in enumerate(columns)]

    def summed(columns: Sequence[Ints]) -> Ints:
        found = sum(laid(columns), start=_NOTHING)
        return (found if found.size == total else np.broadcast_to(found, sizes)).reshape(-1)

    def side_by_side(columns: Sequence[Ints]) -> Ints:
        found = np.empty((dims, *sizes), dtype=np.int64)
        for row, column in zip(found, laid(columns), strict=True):
            row[...] = column
        return found.reshape(dims, total)

    saved, wanted = pair.saved, pair.wanted
    return Moves(
        spec=spec,
        saved=saved,
        wanted=wanted,
        source=summed([d.holder[m.saved] for d, m in zip(saved.dims, merged, strict=True)]),
        target=summed(
            [*(d.holder[m.wanted] for d, m in zip(wanted.dims, merged, strict=True)), replicas]
        ),
        cell=summed([m.saved * n for m, n in zip(merged, saved.strides, strict=True)]),
        box=summed([m.wanted * n for m, n in zip(merged, wanted.strides, strict=True)]),
        src=side_by_side([m.src for m in merged]),
        dst=side_by_side([m.dst for m in merged]),
        shape=side_by_side([m.extent for m in merged]),
    )


def forget() -> None:
    """Clear the caches that plans share, at most about 60 MB."""
    _merged.cache_clear()
    cuts.cache_clear()
