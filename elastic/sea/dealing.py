"""The dealing of samples to islands: blocks of an endless sequence of positions. Pure.

Position ``g`` stands for position ``g % n`` in the order of epoch ``g // n``, of ``n`` samples. A
member is dealt blocks, which it trains in the order in which it got them: that is its *hand*. So it
finds the same samples whenever it executes a step again, whatever was dealt meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import msgspec

from holdfast.ckpt.types import learn

Block: TypeAlias = tuple[int, int]
"""Positions from the first number up to the second, which is not among them."""

Blocks: TypeAlias = tuple[Block, ...]


class Supply(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Positions that nobody has: those from ``fresh`` up to ``end``, and what was given back.

    ``end`` None: epochs follow each other without end. ``is_open``: the founders were dealt theirs.
    """

    fresh: int = 0
    end: int | None = None
    returned: Blocks = ()
    is_open: bool = False

    @property
    def left(self) -> int | None:
        """The number of positions; None: without end."""
        return None if self.end is None else self.end - self.fresh + count(self.returned)

    def take(self, wanted: int) -> tuple[Blocks, Supply]:
        """Return so many positions, or all that are left, those given back first; and the rest."""
        before, returned = cut(self.returned, wanted)
        most = wanted - count(before)
        stop = self.fresh + most if self.end is None else min(self.end, self.fresh + most)
        found = joined((*before, (self.fresh, stop)))
        return found, msgspec.structs.replace(self, fresh=stop, returned=returned)

    def give_back(self, blocks: Iterable[Block]) -> Supply:
        """Return the supply with blocks that an island did not need, or lost."""
        returned = joined(sorted((*self.returned, *blocks)))
        return msgspec.structs.replace(self, returned=returned)


def count(blocks: Iterable[Block]) -> int:
    """Return the number of positions in blocks."""
    return sum(stop - start for start, stop in blocks)


def cut(blocks: Sequence[Block], first: int) -> tuple[Blocks, Blocks]:
    """Return the first positions of blocks, at most so many, and the others."""
    before: list[Block] = []
    for at, (start, stop) in enumerate(blocks):
        middle = min(start + first, stop)
        if middle > start:
            before.append((start, middle))
        first -= middle - start
        if middle < stop:
            return tuple(before), ((middle, stop), *blocks[at + 1 :])
    return tuple(before), ()


def joined(blocks: Iterable[Block]) -> Blocks:
    """Return blocks in their order without empty ones, neighbours that adjoin as one."""
    found: list[Block] = []
    for start, stop in blocks:
        if start == stop:
            continue
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
    return tuple(found)


def shares(wanted: Sequence[int], available: int | None) -> list[int]:
    """Return what everybody gets: all, or parts in proportion where there is less than all want."""
    total = sum(wanted)
    if available is None or total <= available:
        return list(wanted)
    found = [each * available // total for each in wanted]
    rest = available - sum(found)
    for at, each in enumerate(wanted):
        if rest and found[at] < each:
            found[at] += 1
            rest -= 1
    return found


learn(globals())
