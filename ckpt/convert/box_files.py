"""Helpers that several bridges share: find a file's store, and read boxes of raw elements."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from holdfast.ckpt.errors import CorruptError
from holdfast.ckpt.geometry.layout import Box
from holdfast.ckpt.store.base import Readable, Store
from holdfast.ckpt.store.places import open_store, scheme_of

_SLAB_BYTES: Final = 4 << 20
"""Bytes between a box's rows are read along, up to this many at a time."""


def split_place(path: str | Path) -> tuple[Store, str]:
    """Return the store of a file, and the file's name there; ``path`` may be a URL."""
    text = str(path)
    if scheme_of(text):
        folder, _, name = text.rstrip("/").rpartition("/")
        return open_store(folder), name
    place = Path(text).absolute()
    return open_store(place.parent), place.name


class RawTensor:
    """A tensor whose elements lie in C order in a file, from byte ``start`` on."""

    def __init__(
        self, file: Readable, *, start: int, shape: tuple[int, ...], itemsize: int
    ) -> None:
        self._file, self._start, self._shape = file, start, shape
        self._kind = np.dtype((np.void, itemsize))

    def read(self, box: Box, *, origin: str) -> memoryview:
        """Return a box's elements. Raises ``CorruptError`` if the file ends before them."""
        out = np.empty(box.shape, dtype=self._kind)
        if box.size:
            self._fill(box, out, origin)
        return out.reshape(-1).view(np.uint8).data

    def _fill(self, box: Box, out: npt.NDArray[Any], origin: str) -> None:
        first, last = self._span(box)
        if (last - first) == box.size and out.flags.c_contiguous:
            self._take(first, out.reshape(-1).view(np.uint8).data, origin)
        elif (last - first) * self._kind.itemsize <= _SLAB_BYTES:
            room = np.empty(last - first, dtype=self._kind)
            self._take(first, room.view(np.uint8).data, origin)
            strides = [prod(self._shape[d + 1 :]) * room.itemsize for d in range(out.ndim)]
            out[...] = np.ndarray(box.shape, self._kind, buffer=room.data, strides=strides)
        else:
            dim = next(d for d, extent in enumerate(box.shape) if extent > 1)
            at = box.shape[dim] // 2
            before = (slice(None),) * dim
            for low, high in ((0, at), (at, box.shape[dim])):
                self._fill(_narrow(box, dim, low, high), out[(*before, slice(low, high))], origin)

    def _span(self, box: Box) -> tuple[int, int]:
        """Return the positions, in elements, of a box's first element and behind its last one."""
        first = last = 0
        for o, n, extent in zip(box.offset, box.shape, self._shape, strict=True):
            first, last = first * extent + o, last * extent + o + n - 1
        return first, last + 1

    def _take(self, element: int, into: memoryview, origin: str) -> None:
        at = self._start + element * self._kind.itemsize
        got = self._file.read_into([into], at)
        if got != into.nbytes:
            raise CorruptError(
                f"{origin}: the file ends at byte {at + got}, {at + into.nbytes} are needed: it "
                "was cut off; fetch it again"
            )


def _narrow(box: Box, dim: int, low: int, high: int) -> Box:
    offset, shape = list(box.offset), list(box.shape)
    offset[dim] += low
    shape[dim] = high - low
    return Box(offset=tuple(offset), shape=tuple(shape))
