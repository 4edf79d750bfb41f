"""A sequence as stretches of an earlier one, with the new items between them. Pure."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Final, Generic, TypeVar

import msgspec

from holdfast.ckpt.types import learn

MOST_ITEMS: Final = 1 << 24
"""The most items of a sequence that is put together."""

_T = TypeVar("_T")


class Stretch(msgspec.Struct, Generic[_T], frozen=True, array_like=True):
    """The earlier items from ``start`` to ``start + count``, and then the items ``new``."""

    start: int = 0
    count: int = 0
    new: tuple[_T, ...] = ()


def _itself(item: Any) -> Hashable:
    return item  # type: ignore[no-any-return]


def stretches(
    old: Sequence[_T],
    new: Sequence[_T],
    *,
    key: Callable[[_T], Hashable] = _itself,
    same: Callable[[_T, _T], bool] = operator.eq,
) -> tuple[Stretch[_T], ...]:
    """Return ``new`` as stretches of ``old``; `joined` is the other way.

    An item may be taken over from an earlier one that is the ``same``; ``key`` finds it. The time
    is that of one pass over both.
    """
    places: dict[Hashable, int] = {}
    for place, item in enumerate(old):
        places.setdefault(key(item), place)

    def known(at: int) -> int | None:
        place = places.get(key(new[at]))
        return place if place is not None and same(old[place], new[at]) else None

    found, at = [], 0
    while at < len(new):
        start, count = known(at), 0
        if start is not None:
            most = min(len(old) - start, len(new) - at)
            while count < most and same(old[start + count], new[at + count]):
                count += 1
        at += count
        fresh = at
        while at < len(new) and known(at) is None:
            at += 1
        found.append(Stretch(start or 0, count, tuple(new[fresh:at])))
    return tuple(found)


def joined(old: Sequence[_T], found: Iterable[Stretch[_T]]) -> list[_T]:
    """Return the sequence of these stretches of ``old``.

    Raises ``ValueError`` if they are none of ``old``, or more than `MOST_ITEMS` items.
    """
    items: list[_T] = []
    for each in found:
        end = each.start + each.count
        if not 0 <= each.start <= end <= len(old):
            raise ValueError(f"items {each.start} to {end} of {len(old)}")
        items += old[each.start : end]
        items += each.new
        if len(items) > MOST_ITEMS:
            raise ValueError(f"a sequence of more than {MOST_ITEMS} items")
    return items


learn(globals())
