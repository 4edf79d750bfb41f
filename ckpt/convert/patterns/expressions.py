"""Tensors made of parts of stored tensors, as values that are read box by box. Pure.

An expression knows its shape and how a box of it lies in the expressions that it is made of. The
functions below build expressions and simplify what is trivial; they check no shapes, which is the
part of ``steps``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, Protocol, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

from holdfast.ckpt.errors import MismatchError
from holdfast.ckpt.geometry.element_types import DTYPES
from holdfast.ckpt.geometry.layout import Box

Array: TypeAlias = npt.NDArray[Any]
Shape: TypeAlias = tuple[int, ...]

ReadElements: TypeAlias = Callable[[str, Box], Array]
"""Returns a box of a stored tensor as raw elements, which stay valid."""

_SMALL_FLOATS: Final = {
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float8_e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
}


class Expression(Protocol):
    """A tensor that can be read by boxes."""

    @property
    def shape(self) -> Shape: ...

    def read(self, box: Box, stored: ReadElements) -> Array:
        """Return a box's raw elements. Raises ``MismatchError`` if replicas differ."""

    def parts(self) -> Sequence[Expression]:
        """Return the expressions it is made of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor as the source stores it."""

    name: str
    shape: Shape

    def read(self, box: Box, stored: ReadElements) -> Array:
        """Return a box's elements."""
        return stored(self.name, box)

    def parts(self) -> Sequence[Expression]:
        """Return nothing: it is stored."""
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """Zeros."""

    shape: Shape
    itemsize: int

    def read(self, box: Box, stored: ReadElements) -> Array:
        """Return zeros."""
        return np.zeros(box.shape, np.dtype((np.void, self.itemsize)))

    def parts(self) -> Sequence[Expression]:
        """Return nothing."""
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Concatenation:
    """Parts one after the other along ``axis``; ``starts`` are their offsets there."""

    axis: int
    shape: Shape
    members: tuple[Expression, ...]
    starts: tuple[int, ...]

    def read(self, box: Box, stored: ReadElements) -> Array:
        """Return a box's elements, from each part that overlaps it."""
        first, end = box.offset[self.axis], box.offset[self.axis] + box.shape[self.axis]
        pieces: list[Array] = []
        number = max(bisect_right(self.starts, first) - 1, 0)
        while number < len(self.members) and self.starts[number] < end:
            start, extent = self.starts[number], self.members[number].shape[self.axis]
            low, high = max(first, start), min(end, start + extent)
            if high > low:
                part = _changed(box, self.axis, low - start, high - low)
                pieces.append(self.members[number].read(part, stored))
            number += 1
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=self.axis)

    def parts(self) -> Sequence[Expression]:
        """Return the parts in order."""
        return self.members


@dataclass(frozen=True, slots=True, kw_only=True)
class Slab:
    """The indices from ``start`` on of another expression, along ``axis``."""

    axis: int
    start: int
    shape: Shape
    of: Expression

    def read(self, box: Box, stored: ReadElements) -> Array:
        """Return a box's elements."""
        offset = box.offset[self.axis] + self.start
        return self.of.read(_changed(box, self.axis, offset, box.shape[self.axis]), stored)

    def parts(self) -> Sequence[Expression]:
        """Return the one it is cut from."""
        return (self.of,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacking:
    """Parts of one shape, one per index of a new dim ``axis``."""

    axis: int
    shape: Shape
    members: tuple[Expression, ...]

    def read(self, box: Box, stored: ReadElements) -> Array:
        """Return a box's elements, from each part that overlaps it."""
        inner = _without(box, self.axis)
        first = box.offset[self.axis]
        layers = self.members[first : first + box.shape[self.axis]]
        return np.stack([layer.read(inner, stored) for layer in layers], axis=self.axis)

    def parts(self) -> Sequence[Expression]:
        """Return the parts in order."""
        return self.members


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOf:
    """Index ``index`` of dim ``axis`` of another expression, without that dim."""

    axis: int
    index: int
    shape: Shape
    of: Expression

    def read(self, box: Box, stored: ReadElements) -> Array:
        """Return a box's elements."""
        at = self.axis
        outer = Box(
            offset=(*box.offset[:at], self.index, *box.offset[at:]),
            shape=(*box.shape[:at], 1, *box.shape[at:]),
        )
        return self.of.read(outer, stored).reshape(box.shape)

    def parts(self) -> Sequence[Expression]:
        """Return the one it is taken from."""
        return (self.of,)


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualCopies:
    """Several copies of one tensor. ``label`` names the pattern for messages."""

    shape: Shape
    members: tuple[Expression, ...]
    label: str

    def read(self, box: Box, stored: ReadElements) -> Array:
        """Return a box's elements. Raises ``MismatchError`` if the copies differ."""
        first = self.members[0].read(box, stored)
        for other in self.members[1:]:
            if not same_bits(first, other.read(box, stored)):
                names = [next(stored_names(each)) for each in (self.members[0], other)]
                raise MismatchError(
                    f"{self.label}: the replicas {names[0]} and {names[1]} differ in {box}; drop "
                    'the one that is wrong, or use as = "average" if they drift by design'
                )
        return first

    def parts(self) -> Sequence[Expression]:
        """Return the copies."""
        return self.members


@dataclass(frozen=True, slots=True, kw_only=True)
class Average:
    """The mean of several tensors; where all have the same bits, those bits."""

    shape: Shape
    members: tuple[Expression, ...]
    dtype: str
    label: str

    def read(self, box: Box, stored: ReadElements) -> Array:
        """Return a box's elements. Raises ``MismatchError`` for integers that differ."""
        first = self.members[0].read(box, stored)
        kind = _SMALL_FLOATS.get(self.dtype) or np.dtype(DTYPES[self.dtype].numpy)
        total, equal = _floats(first, kind), True
        for member in self.members[1:]:
            other = member.read(box, stored)
            equal = equal and same_bits(first, other)
            total = total + _floats(other, kind)
        if equal:
            return first
        if self.dtype not in AVERAGED:
            raise MismatchError(
                f"{self.label}: {next(stored_names(self))} and its pieces differ and are "
                f"{self.dtype}, of which there is no mean; use "
                'as = "replicate" or drop the tensor'
            )
        mean = (total / len(self.members)).astype(kind)
        return mean.view(first.dtype).reshape(box.shape)

    def parts(self) -> Sequence[Expression]:
        """Return the tensors."""
        return self.members


AVERAGED: Final = frozenset({"float64", "float32", "float16", *_SMALL_FLOATS})
"""Element types that have a mean."""


def _floats(raw: Array, kind: Any) -> Array:
    found: Array = np.ascontiguousarray(raw).view(kind).reshape(raw.shape)
    return found.astype(np.float64) if np.dtype(kind).kind != "c" else found


def same_bits(one: Array, other: Array) -> bool:
    """Say whether two arrays of raw elements hold the same bytes."""
    return one.tobytes() == other.tobytes()


def _changed(box: Box, axis: int, offset: int, extent: int) -> Box:
    return Box(
        offset=(*box.offset[:axis], offset, *box.offset[axis + 1 :]),
        shape=(*box.shape[:axis], extent, *box.shape[axis + 1 :]),
    )


def _without(box: Box, axis: int) -> Box:
    return Box(
        offset=box.offset[:axis] + box.offset[axis + 1 :],
        shape=box.shape[:axis] + box.shape[axis + 1 :],
    )


def concatenation(members: Sequence[Expression], axis: int) -> Expression:
    """Return the parts one after the other; their other dims are equal."""
    if len(members) == 1:
        return members[0]
    ends = tuple(accumulate((each.shape[axis] for each in members), initial=0))
    first = members[0].shape
    shape = (*first[:axis], ends[-1], *first[axis + 1 :])
    return Concatenation(axis=axis, shape=shape, members=tuple(members), starts=ends[:-1])


def slab(of: Expression, axis: int, start: int, extent: int) -> Expression:
    """Return the indices ``start`` to ``start + extent`` along ``axis``."""
    if extent == of.shape[axis]:
        return of
    shape = (*of.shape[:axis], extent, *of.shape[axis + 1 :])
    if isinstance(of, Slab) and of.axis == axis:
        return Slab(axis=axis, start=of.start + start, shape=shape, of=of.of)
    return Slab(axis=axis, start=start, shape=shape, of=of)


def stacking(members: Sequence[Expression], axis: int) -> Expression:
    """Return the parts along a new dim ``axis``."""
    first = members[0].shape
    shape = (*first[:axis], len(members), *first[axis:])
    return Stacking(axis=axis, shape=shape, members=tuple(members))


def layer_of(of: Expression, axis: int, index: int) -> Expression:
    """Return one index of dim ``axis``, without the dim."""
    shape = of.shape[:axis] + of.shape[axis + 1 :]
    return LayerOf(axis=axis, index=index, shape=shape, of=of)


def stored_names(of: Expression) -> Iterator[str]:
    """Yield the names of all stored tensors in an expression."""
    if isinstance(of, StoredTensor):
        yield of.name
    for part in of.parts():
        yield from stored_names(part)
