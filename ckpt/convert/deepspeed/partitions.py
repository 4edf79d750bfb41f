"""The arithmetic of ZeRO's flat partitions. Pure.

ZeRO lays the parameters of a group one after the other into a flat vector and gives each rank a
part. Stages 1 and 2 cut the whole vector into equal parts (`packed`), so a parameter may lie across
ranks. Stage 3 cuts each parameter by itself (`sharded`), padded to a multiple of the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatPart:
    """A run of one parameter's elements: ``count`` of them from ``start`` on in a rank's vector."""

    rank: int
    start: int
    count: int


Parts: TypeAlias = tuple[FlatPart, ...]
"""All runs of one parameter, in the order of its elements."""


def sharded_size(count: int, ranks: int) -> int:
    """Return the elements that a parameter of ``count`` takes in the vector of each rank."""
    return -(-count // ranks)


def sharded(counts: Sequence[int], *, ranks: int) -> list[Parts]:
    """Return the parts of each parameter where every parameter is cut by itself (stage 3)."""
    found, at = [], 0
    for count in counts:
        size = sharded_size(count, ranks)
        parts = []
        for rank in range(ranks):
            here = min(max(count - rank * size, 0), size)
            if here:
                parts.append(FlatPart(rank=rank, start=at, count=here))
        found.append(tuple(parts))
        at += size
    return found


def packed(counts: Sequence[int], *, size: int, gaps: Sequence[int] | None = None) -> list[Parts]:
    """Return the parts of each parameter where the whole vector is cut (stages 1 and 2).

    ``size`` is the number of elements of each rank, padding included. ``gaps`` are elements that
    lie unused behind each parameter.
    """
    found, at = [], 0
    for count, gap in zip(counts, gaps or [0] * len(counts), strict=True):
        parts, end = [], at + count
        while at < end:
            here = min(end, (at // size + 1) * size) - at
            parts.append(FlatPart(rank=at // size, start=at % size, count=here))
            at += here
        found.append(tuple(parts))
        at += gap
    return found


def recorded(names: Sequence[str], ranks: Sequence[Mapping[str, tuple[int, int]]]) -> list[Parts]:
    """Return the parts that the ranks recorded, each as the start and the count of a name."""
    return [
        tuple(
            FlatPart(rank=rank, start=found[name][0], count=found[name][1])
            for rank, found in enumerate(ranks)
            if name in found and found[name][1]
        )
        for name in names
    ]


def fault_of_parts(
    counts: Mapping[str, int], parts: Sequence[Parts], *, lengths: Sequence[int]
) -> str | None:
    """Say why ``parts`` do not hold each parameter once within vectors of ``lengths``, or None."""
    taken: dict[int, list[tuple[int, int, str]]] = {}
    for (name, count), runs in zip(counts.items(), parts, strict=True):
        if sum(run.count for run in runs) != count:
            return (
                f"parameter {name} has {count} elements, and its partitions have "
                f"{sum(run.count for run in runs)}"
            )
        for run in runs:
            if run.start < 0 or run.count < 0 or run.rank >= len(lengths):
                return f"parameter {name} lies at {run.start} of rank {run.rank}"
            if run.start + run.count > lengths[run.rank]:
                return (
                    f"parameter {name} ends at element {run.start + run.count} of rank "
                    f"{run.rank}, whose partition has {lengths[run.rank]}"
                )
            taken.setdefault(run.rank, []).append((run.start, run.start + run.count, name))
    for rank, spans in taken.items():
        for (_, end, name), (start, _, other) in pairwise(sorted(spans)):
            if start < end:
                return f"parameters {name} and {other} overlap in the partition of rank {rank}"
    return None
