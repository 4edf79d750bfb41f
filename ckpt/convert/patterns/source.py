"""A source of tensors seen through patterns: the pieces of another source, put together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

import numpy as np

from holdfast.ckpt.closing import Closing
from holdfast.ckpt.convert.interchange import PIECE_BYTES, TensorSource, cut
from holdfast.ckpt.convert.patterns.choice import Patterns
from holdfast.ckpt.convert.patterns.expressions import Array, EqualCopies, Expression, StoredTensor
from holdfast.ckpt.convert.patterns.plan import PaddingCheck, chosen_pattern, left_out, make_plan
from holdfast.ckpt.errors import MismatchError
from holdfast.ckpt.geometry.element_types import dtype_of
from holdfast.ckpt.geometry.grid import whole
from holdfast.ckpt.geometry.layout import Box, TensorSpec
from holdfast.ckpt.types import Json


class PatternedSource(Closing):
    """Shows the tensors that patterns make of another source's tensors.

    ``told`` lists in words what was left out. Plain values keep their names, except those that a
    pattern of whole tensors renames. Replicas are compared whenever a box of them is read, padding
    at once. Raises ``MismatchError`` before any tensor is read if names or shapes do not fit.
    """

    def __init__(self, source: TensorSource, patterns: Patterns) -> None:
        self._source, self.origin = source, source.origin
        self.parallel = bool(getattr(source, "parallel", False))
        self._plan = plan = make_plan(
            patterns.file,
            source.specs,
            aliases=source.aliases,
            sizes=patterns.sizes,
            reverse=patterns.reverse,
            origin=source.origin,
        )
        self.specs: Mapping[str, TensorSpec] = plan.specs
        self.aliases: Mapping[str, str] = plan.aliases
        self._dropped: list[str] = []
        self.values: Mapping[str, Json] = self._values(patterns)
        self.told: tuple[str, ...] = (*getattr(source, "told", ()), *plan.told)
        if self._dropped:
            self.told = (*self.told, left_out(self._dropped, "values", patterns.file))
        for check in plan.checks:
            self._check_padding(check)

    @property
    def step(self) -> int | None:
        """The step of the source, if it has one."""
        return getattr(self._source, "step", None)

    def read(self, fqn: str, box: Box) -> memoryview:
        """Return a box's elements. Raises ``MismatchError`` if replicas differ."""
        made = self._plan.expressions[fqn]
        if not box.size:
            return memoryview(b"")
        if isinstance(made, StoredTensor):
            return self._source.read(made.name, box)
        elements = made.read(box, self._stored)
        return np.ascontiguousarray(elements).reshape(-1).view(np.uint8).data

    def check_replicas(self, *, rank: int = 0, ranks: int = 1) -> None:
        """Compare the replicas of every tensor, or of one rank's share of the tensors.

        Raises ``MismatchError`` naming two that differ.
        """
        for number, (fqn, made) in enumerate(self._plan.expressions.items()):
            itemsize = dtype_of(self.specs[fqn].dtype, origin=fqn).itemsize
            for copies in _replicas(made) if number % ranks == rank else ():
                for box in cut(whole(copies.shape), itemsize=itemsize, most_bytes=PIECE_BYTES):
                    copies.read(box, self._stored)

    def _stored(self, name: str, box: Box) -> Array:
        data = self._source.read(name, box)
        dtype = dtype_of(self._source.specs[name].dtype, origin=f"tensor {name}")
        found = np.frombuffer(data, np.dtype((np.void, dtype.itemsize)), count=prod(box.shape))
        return (found if self.parallel else found.copy()).reshape(box.shape)

    def _check_padding(self, check: PaddingCheck) -> None:
        offset, shape = [0] * len(check.of.shape), list(check.of.shape)
        offset[check.axis], shape[check.axis] = check.start, check.extent
        padding = Box(offset=tuple(offset), shape=tuple(shape))
        itemsize = dtype_of(check.dtype, origin=check.at).itemsize
        for box in cut(padding, itemsize=itemsize, most_bytes=PIECE_BYTES):
            if any(check.of.read(box, self._stored).tobytes()):
                raise MismatchError(
                    f"{check.at}: from {check.start} on along axis {check.axis} there should be "
                    f"padding, and {box} is not zero; correct the size, or use "
                    'padding = "drop" to give up what is there'
                )

    def _values(self, patterns: Patterns) -> dict[str, Json]:
        found: dict[str, Json] = {}
        whence: dict[str, str] = {}
        for name, value in self._source.values.items():
            if (renamed := self._value_name(patterns, name)) is None:
                self._dropped.append(name)
                continue
            new = self._renamed(name, value)
            if renamed in found and found[renamed] != new:
                raise MismatchError(
                    f"{self.origin}: the values {whence[renamed]} and {name} would both be "
                    f"{renamed}, and they differ; drop one of them"
                )
            found[renamed], whence[renamed] = new, name
        return found

    def _value_name(self, patterns: Patterns, name: str) -> str | None:
        """Return the new name of a plain value; None if it is dropped."""
        try:
            chosen = chosen_pattern(
                patterns.file, name, reverse=patterns.reverse, origin=self.origin
            )
        except MismatchError:  # no pattern is about it
            return name
        if chosen is None:
            return None
        pattern, holes = chosen
        if patterns.reverse or not pattern.keeps_shape:
            return name
        return pattern.whole.fill(holes)

    def _renamed(self, name: str, value: Json) -> Json:
        """Return a value with the references to tensors in it renamed."""
        if isinstance(value, list):
            return [self._renamed(name, item) for item in value]
        if not isinstance(value, dict):
            return value
        for tag in ("$tensor", "$array"):
            if value.keys() == {tag}:
                return {tag: self._reference(name, value[tag])}
        return {key: self._renamed(name, item) for key, item in value.items()}

    def _reference(self, name: str, stored: str) -> str:
        first = self._source.aliases.get(stored, stored)
        for new in self._plan.used.get(first, ()):
            made = self._plan.expressions.get(self.aliases.get(new, new))
            if isinstance(made, StoredTensor | EqualCopies):
                return new
        raise MismatchError(
            f"{self.origin}: the value {name} refers to the tensor {stored}, which the patterns "
            "change or leave out; drop the value, or keep the tensor as it is"
        )

    def close(self) -> None:
        """Close the source."""
        self._source.close()


def _replicas(made: Expression) -> Iterator[EqualCopies]:
    """Yield the replicas in an expression, the outermost ones."""
    if isinstance(made, EqualCopies):
        yield made
        return
    for part in made.parts():
        yield from _replicas(part)
