"""The ranges of a data column that differ from the same column of an earlier step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from holdfast.ckpt.native.sums import SUM_BYTES, Flags, set_runs
from holdfast.ckpt.parity.stripes import Span

Range: TypeAlias = tuple[int, int]
"""Half-open, in bytes of a column."""


def changed_ranges(
    new: Sequence[Span], old: Sequence[Span], same: Mapping[int, Flags], *, length: int
) -> tuple[Range, ...]:
    """Return the ranges of a column's first ``length`` bytes that may have changed, in order.

    ``new`` and ``old`` fill the column in both steps; ``same[rank]`` says of each 128 KiB of a
    rank's block whether both blocks have the very same bytes there. Bytes at another position in
    their block count as changed; bytes that neither step fills do not.
    """
    equal = [part for one in new for other in old for part in _equal(one, other, same)]
    filled = [(span.into, span.into + span.nbytes) for span in (*new, *old)]
    return tuple(_gaps((*equal, *_gaps(filled, length)), length))


def _equal(one: Span, other: Span, same: Mapping[int, Flags]) -> Iterator[Range]:
    shift = one.into - one.at
    if one.rank != other.rank or one.rank not in same or shift != other.into - other.at:
        return
    lo = max(one.into, other.into)
    hi = min(one.into + one.nbytes, other.into + other.nbytes)
    for first, last in set_runs(same[one.rank]):
        begin, end = first * SUM_BYTES + shift, last * SUM_BYTES + shift
        if max(lo, begin) < min(hi, end):
            yield max(lo, begin), min(hi, end)


def _gaps(covered: Iterable[Range], length: int) -> Iterator[Range]:
    """Yield the uncovered ranges of ``0 … length``."""
    at = 0
    for lo, hi in sorted(covered):
        if at < min(lo, length):
            yield at, min(lo, length)
        at = max(at, hi)
    if at < length:
        yield at, length


def are_disjoint(ranges: Iterable[Range]) -> bool:
    """Return whether ranges are in order, disjoint, not empty, and nowhere negative."""
    at = 0
    for lo, hi in ranges:
        if not at <= lo < hi:
            return False
        at = hi
    return True


def batches(ranges: Iterable[Range], limit_bytes: int) -> list[tuple[Range, ...]]:
    """Cut ranges into requests of at most ``limit_bytes`` each, in order."""
    found: list[tuple[Range, ...]] = []
    batch: list[Range] = []
    room = limit_bytes
    for first, hi in ranges:
        at = first
        while at < hi:
            end = min(hi, at + room)
            batch.append((at, end))
            room -= end - at
            at = end
            if room == 0:
                found.append(tuple(batch))
                batch, room = [], limit_bytes
    if batch:
        found.append(tuple(batch))
    return found
