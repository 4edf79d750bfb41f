"""Slices of a tensor as ranges per dim, and their cutting into boxes that fit in memory. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from types import EllipsisType
from typing import Final, TypeAlias

from holdfast.ckpt.geometry.layout import Box

Key: TypeAlias = int | slice | EllipsisType

_INTEGER: Final = re.compile(r"[+-]?\d{1,18}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The elements of a tensor at ``ranges``, one per dim, steps positive.

    ``dropped`` dims were indexed with an integer: they have one element and are left out of
    ``shape``.
    """

    ranges: tuple[range, ...]
    dropped: frozenset[int] = frozenset()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the selection, without the dropped dims."""
        return tuple(len(r) for dim, r in enumerate(self.ranges) if dim not in self.dropped)

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(map(len, self.ranges))

    @property
    def box(self) -> Box:
        """The smallest box of the tensor that holds the selection."""
        full = all(self.ranges)
        return Box(
            offset=tuple(r.start if full else 0 for r in self.ranges),
            shape=tuple(r[-1] + 1 - r.start if r else 0 for r in self.ranges),
        )

    @property
    def within_box(self) -> tuple[slice, ...]:
        """The index that selects the elements from the array of ``box``."""
        return tuple(slice(None, None, r.step) for r in self.ranges)

    def at(self, flat: int) -> tuple[int, ...]:
        """Return the tensor's index of the ``flat``-th selected element, in C order."""
        index: list[int] = []
        for r in reversed(self.ranges):
            flat, place = divmod(flat, len(r))
            index.append(r[place])
        return tuple(reversed(index))


def everything(shape: Sequence[int]) -> Selection:
    """Return the selection of a whole tensor."""
    return Selection(ranges=tuple(range(n) for n in shape))


def parse(text: str) -> tuple[Key, ...]:
    """Parse the text between the brackets of a slice: integers, ``a:b:c`` and ``...``.

    Raises ``ValueError`` naming the part that is none of these.
    """
    if not text.strip():
        raise ValueError("the brackets are empty; write a slice as in [0:2, ::3]")
    return tuple(_key(part.strip()) for part in text.split(","))


def _key(part: str) -> Key:
    if part == "...":
        return ...
    words = [word.strip() for word in part.split(":")]
    bad = [word for word in words if not _INTEGER.fullmatch(word) and (word or len(words) == 1)]
    if bad or len(words) > 3:
        raise ValueError(
            f"{part!r} is neither an integer, a slice nor '...'; write it as in 0:2 or ::3"
        )
    if len(words) == 1:
        return int(words[0])
    return slice(*(int(word) if word else None for word in words))


def select(keys: Sequence[Key], shape: Sequence[int]) -> Selection:
    """Return the selection by ``keys`` of a tensor of ``shape``, as numpy's basic indexing does.

    Raises ``IndexError`` for too many keys, an index out of range or a step below 1.
    """
    given = [key for key in keys if key is not ...]
    if len(keys) - len(given) > 1 or len(given) > len(shape):
        raise IndexError(f"{len(keys)} indices for a tensor of shape {list(shape)}")
    at = list(keys).index(...) if len(given) < len(keys) else len(keys)
    fill = [slice(None)] * (len(shape) - len(given))
    ranges: list[range] = []
    dropped: set[int] = set()
    for dim, (key, size) in enumerate(
        zip([*keys[:at], *fill, *keys[at + 1 :]], shape, strict=True)
    ):
        if isinstance(key, slice):
            if key.step is not None and key.step < 1:
                raise IndexError(f"dim {dim}: step {key.step}; only positive steps are read")
            ranges.append(range(size)[key])
        elif isinstance(key, int):
            if not -size <= key < size:
                raise IndexError(f"dim {dim}: index {key} is out of range for size {size}")
            ranges.append(range(key % size, key % size + 1))
            dropped.add(dim)
        else:
            raise IndexError(f"dim {dim}: cannot index with {key!r}; use integers and slices")
    return Selection(ranges=tuple(ranges), dropped=frozenset(dropped))


def tiles(
    selection: Selection, *, itemsize: int, most_bytes: int, cell: Sequence[int] | None = None
) -> Iterator[Selection]:
    """Cut a selection, in C order of its first uncut dim, into parts that are read one by one.

    The box of each part is at most ``most_bytes`` long, unless it is a single element. Cuts lie
    at multiples of ``cell`` where possible, so that a chunk of that shape is read once.
    """
    if not selection.size:
        return
    left = [selection]
    while left:
        part = left.pop()
        dim = next((d for d, r in enumerate(part.ranges) if len(r) > 1), None)
        if dim is None or prod(part.box.shape) * itemsize <= most_bytes:
            yield part
            continue
        at = _cut(part.ranges[dim], cell[dim] if cell else 1)
        for piece in (part.ranges[dim][at:], part.ranges[dim][:at]):
            ranges = (*part.ranges[:dim], piece, *part.ranges[dim + 1 :])
            left.append(Selection(ranges=ranges, dropped=part.dropped))


def _cut(along: range, cell: int) -> int:
    """Return where to halve a range of more than one: at a cell's border if one lies inside."""
    middle = along[len(along) // 2]
    border = round(middle / cell) * cell
    if not along[0] < border <= along[-1]:
        return len(along) // 2
    return len(range(along.start, border, along.step))


def split_name(text: str) -> tuple[str, str | None]:
    """Split ``name[slice]`` into the name and the text between the last brackets."""
    if text.endswith("]") and (start := text.rfind("[")) > 0:
        return text[:start], text[start + 1 : -1]
    return text, None
