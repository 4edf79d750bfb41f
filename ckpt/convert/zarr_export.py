"""A sink that writes tensors as a plain Zarr v3 directory.

A group with one array per tensor, each chunk a file, for readers that need a directory of files:
TensorStore's ``zarr3`` driver, zarr-python without fsspec, others. Tied tensors are stored once;
the group's attributes list the tied names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from secrets import token_hex
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from holdfast.ckpt.closing import Closing
from holdfast.ckpt.convert.dimension_names import dimension_names
from holdfast.ckpt.convert.interchange import Piece, cut, itemsize_of
from holdfast.ckpt.errors import StateError
from holdfast.ckpt.format.manifest import CRC_BYTES, TensorRecord
from holdfast.ckpt.format.zarr_metadata import (
    array_metadata,
    array_name,
    group_metadata,
)
from holdfast.ckpt.geometry.element_types import dtype_of
from holdfast.ckpt.geometry.grid import cells, split_grid, whole
from holdfast.ckpt.geometry.layout import Box, TensorSpec
from holdfast.ckpt.native.isal import crc32c
from holdfast.ckpt.store.new_folder import NewFolder
from holdfast.ckpt.types import Json

Array: TypeAlias = npt.NDArray[Any]

_GROUP: Final = "zarr.json"


def _count(shape: tuple[int, ...], cell: tuple[int, ...]) -> int:
    return prod(-(-n // c) for n, c in zip(shape, cell, strict=True))


def _group(
    run: str, step: int | None, *, values: Mapping[str, Json], aliases: Mapping[str, str]
) -> Json:
    document = group_metadata(run=run, step=step or 0, values=values)
    document["attributes"]["holdfast"] |= {"step": step, "aliases": dict(aliases)}
    return document


class ZarrDirectorySink(Closing):
    """Writes boxes of tensors as a plain Zarr v3 directory.

    A `holdfast.ckpt.convert.interchange.TensorSink`. Chunks are whole tensors or pieces of about 16
    MiB, or as ``cells`` says by FQN. ``portable`` writes bfloat16 and float8 as unsigned integers
    with their type in an attribute, which every reader opens; without it they have Zarr data types
    of these names, which TensorStore knows, and stock zarr-python cannot even list the group. Boxes
    may come in any order and cut chunks in any way: whole chunks are written at once, others into
    their chunk's file, so memory holds a box and a chunk. ``dimensions`` gives names to dimensions
    (`holdfast.ckpt.convert.dimension_names`). Call it from one thread at a time.
    """

    def __init__(
        self,
        target: str | Path,
        *,
        portable: bool = True,
        cells: Mapping[str, tuple[int, ...]] | None = None,
        dimensions: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self._folder = NewFolder(target, tag=f"sink-{token_hex(4)}")
        self._portable, self._cells, self._dimensions = portable, cells or {}, dimensions or {}
        self._arrays: dict[str, _Array] = {}

    def begin(
        self,
        specs: Mapping[str, TensorSpec],
        *,
        aliases: Mapping[str, str],
        values: Mapping[str, Json],
        step: int | None,
    ) -> None:
        """Declare the tensors to be written. Raises ``MismatchError`` if dimension names clash."""
        names = dimension_names(specs, self._dimensions)
        group = _group("", step, values=values, aliases=aliases)
        self._folder.write(_GROUP, [msgspec.json.encode(group)])
        for fqn, spec in specs.items():
            array = _Array(self._folder, self._record(spec), fqn=fqn)
            self._arrays[fqn] = array
            document = array_metadata(
                fqn, array.record, portable=self._portable, dimensions=names[fqn]
            )
            self._folder.write(f"{array_name(fqn)}/zarr.json", [msgspec.json.encode(document)])

    def _record(self, spec: TensorSpec) -> TensorRecord:
        cell = self._cells.get(spec.fqn)
        if cell is None:
            full = tuple(max(n, 1) for n in spec.shape)
            cell = split_grid(full, full, itemsize_of(spec))
        return TensorRecord(dtype=spec.dtype, shape=spec.shape, cell=cell)

    def pieces(self, most_bytes: int) -> Iterator[Piece]:
        """Yield every chunk, the larger ones in parts."""
        for fqn, array in self._arrays.items():
            for cell in cells(whole(array.record.shape), array.record.cell):
                for box in cut(cell, itemsize=array.itemsize, most_bytes=most_bytes):
                    yield fqn, box

    def write(self, fqn: str, box: Box, data: memoryview) -> None:
        """Write a box: its elements in C order, little-endian. Raises ``StateError``."""
        if fqn not in self._arrays:
            raise StateError(f"tensor {fqn}: was not announced to begin()")
        self._arrays[fqn].write(box, data)

    def finish(self) -> None:
        """Publish the directory. Raises ``StateError`` if a tensor is not whole."""
        for array in self._arrays.values():
            array.check_whole()
        self._folder.publish()

    def close(self) -> None:
        """Remove files that were not published."""
        self._folder.close()


class _Array:
    """One array in progress: its complete chunks, and the written boxes of the others."""

    def __init__(self, folder: NewFolder, record: TensorRecord, *, fqn: str) -> None:
        self._folder, self.record, self._fqn = folder, record, fqn
        self.itemsize = dtype_of(record.dtype, origin=f"tensor {fqn}").itemsize
        self._element = np.dtype((np.void, self.itemsize))
        self._complete: set[str] = set()
        self._boxes: dict[str, list[Box]] = {}

    def write(self, box: Box, data: memoryview) -> None:
        shape = self.record.shape
        if len(box.shape) != len(shape) or (box.size and box.intersect(whole(shape)) != box):
            raise StateError(f"tensor {self._fqn}: {box} is not a part of shape {shape}")
        if data.nbytes != box.size * self.itemsize:
            raise StateError(
                f"tensor {self._fqn}: {data.nbytes} bytes came for {box} of {self.record.dtype}, "
                f"{box.size * self.itemsize} are needed"
            )
        if box.size:
            elements = np.frombuffer(data, self._element).reshape(box.shape)
            for part in cells(box, self.record.cell):
                self._put(part, elements[part.within(box).slices])

    def _put(self, part: Box, elements: Array) -> None:
        """Write the part of a box that lies in one chunk."""
        cell = self.record.cell
        numbers = [o // c for o, c in zip(part.offset, cell, strict=True)]
        corner = tuple(n * c for n, c in zip(numbers, cell, strict=True))
        key = "/".join((array_name(self._fqn), "c", *map(str, numbers)))
        chunk = Box(offset=corner, shape=cell)
        known = self._boxes.setdefault(key, [])
        if key in self._complete or any(part.intersect(other) for other in known):
            raise StateError(f"tensor {self._fqn}: {part} is written twice")
        known.append(part)
        inside = chunk.intersect(whole(self.record.shape)) or part
        if inside == part:
            body = _padded(elements, cell)
            self._folder.write(key, [body, _checksum(body)])
        else:
            path = self._folder.room(key, prod(cell) * self.itemsize)
            room = np.memmap(path, self._element, "r+", shape=cell)
            room[part.within(chunk).slices] = elements
            if sum(each.size for each in known) < inside.size:
                return
            self._folder.append(key, _checksum(room.reshape(-1).view(np.uint8).data))
        self._complete.add(key)
        del self._boxes[key]

    def check_whole(self) -> None:
        wanted = _count(self.record.shape, self.record.cell)
        if len(self._complete) != wanted:
            raise StateError(
                f"tensor {self._fqn}: {len(self._complete)} of {wanted} chunks are complete; every "
                "element must be written once"
            )


def _padded(elements: Array, cell: tuple[int, ...]) -> memoryview:
    """Return the elements' bytes, padded with zeros to a whole cell."""
    if elements.shape != cell:
        full = np.zeros(cell, elements.dtype)
        full[tuple(slice(n) for n in elements.shape)] = elements
        elements = full
    return np.ascontiguousarray(elements).reshape(-1).view(np.uint8).data


def _checksum(body: memoryview) -> bytes:
    return crc32c(body).to_bytes(CRC_BYTES, "little")
