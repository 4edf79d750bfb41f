"""A source and a sink of tensors in memory, for tests of bridges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from holdfast.ckpt.convert.interchange import TensorSource, itemsize_of
from holdfast.ckpt.geometry.layout import Box, TensorSpec
from holdfast.ckpt.types import Json

Array: TypeAlias = npt.NDArray[Any]


def part(array: Array, box: Box) -> Array:
    """Return a box of an array."""
    return array[box.slices]


class ArraySource:
    """Arrays with torch's names of their dtypes, as a ``TensorSource``.

    Each `read` uses the same buffer, so a view is valid until the next call only, as the protocol
    allows.
    """

    origin = "arrays in memory"

    def __init__(
        self,
        arrays: Mapping[str, tuple[Array, str]],
        *,
        aliases: Mapping[str, str] | None = None,
        values: Mapping[str, Json] | None = None,
    ) -> None:
        self._arrays = {fqn: array for fqn, (array, _) in arrays.items()}
        self.specs = {
            fqn: TensorSpec(fqn=fqn, dtype=dtype, shape=array.shape)
            for fqn, (array, dtype) in arrays.items()
        }
        self.aliases, self.values = dict(aliases or {}), dict(values or {})
        self._room = bytearray()
        self.closed = False

    def read(self, fqn: str, box: Box) -> memoryview:
        """Return the box's bytes."""
        data = np.ascontiguousarray(part(self._arrays[fqn], box)).tobytes()
        if len(data) > len(self._room):
            self._room = bytearray(len(data))
        self._room[:] = b"\xee" * len(self._room)
        self._room[: len(data)] = data
        return memoryview(self._room)[: len(data)]

    def close(self) -> None:
        """Record the call."""
        self.closed = True


class ArraySink:
    """Collects tensors in memory; ``published`` is True once `finish` was called."""

    def __init__(self) -> None:
        self.specs: Mapping[str, TensorSpec] = {}
        self.raw: dict[str, Array] = {}
        self.written: dict[str, Array] = {}
        self.largest = 0
        self.published = False

    def begin(
        self,
        specs: Mapping[str, TensorSpec],
        *,
        aliases: Mapping[str, str],
        values: Mapping[str, Json],
        step: int | None,
    ) -> None:
        """Allocate the arrays."""
        self.specs, self.aliases, self.values, self.step = specs, aliases, values, step
        for fqn, spec in specs.items():
            self.raw[fqn] = np.zeros(spec.shape, np.dtype((np.void, itemsize_of(spec))))
            self.written[fqn] = np.zeros(spec.shape, np.int64)

    def write(self, fqn: str, box: Box, data: memoryview) -> None:
        """Store a box at its position, and count."""
        kind = self.raw[fqn].dtype
        part(self.raw[fqn], box)[...] = np.frombuffer(data, kind).reshape(box.shape)
        part(self.written[fqn], box)[...] += 1
        self.largest = max(self.largest, data.nbytes)

    def finish(self) -> None:
        """Publish."""
        self.published = True

    def close(self) -> None:
        """Do nothing."""


def read_all(source: TensorSource) -> dict[str, bytes]:
    """Return the bytes of every tensor, tied ones under each name."""
    found = {
        fqn: bytes(source.read(fqn, Box(offset=(0,) * len(spec.shape), shape=spec.shape)))
        for fqn, spec in source.specs.items()
    }
    return found | {name: found[stored] for name, stored in source.aliases.items()}
