"""A map of the boxes that each writer holds of each tensor, as a picture in text and as JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
from rich.text import Text

from holdfast.ckpt.format.manifest import PackedChunk, PackIndex, path_of, stored_bytes
from holdfast.ckpt.geometry.layout import Box
from holdfast.ckpt.types import Json
from holdfast.tools.terminal import shape_text

Array: TypeAlias = npt.NDArray[Any]

_LETTERS: Final = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_STYLES: Final = (
    "#000000 on #56b4e9",
    "#000000 on #e69f00",
    "#ffffff on #00775a",
    "#000000 on #f0e442",
    "#000000 on #cc79a7",
    "#ffffff on #0072b2",
    "#ffffff on #b04a00",
    "#000000 on #bbbbbb",
)
"""After Okabe and Ito (2008), safe for the colour blind; two are darkened for the letters."""

_COLUMNS: Final = 48
_ROWS: Final = 8
_NAMES: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkWriter:
    """A chunk and its writer."""

    writer: int
    chunk: PackedChunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """Tensors of equal shape and equal layout."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    chunks: tuple[ChunkWriter, ...]


def patterns(packs: Mapping[int, PackIndex], names: Sequence[str]) -> list[Pattern]:
    """Return the layouts of the tensors; tensors with equal layouts are in one pattern."""
    chunks: dict[str, list[ChunkWriter]] = {name: [] for name in names}
    shapes: dict[str, tuple[int, ...]] = {}
    for writer, index in packs.items():
        for name, tensor in index.tensors.items():
            if name in chunks:
                shapes[name] = tensor.shape
                chunks[name] += [ChunkWriter(writer=writer, chunk=chunk) for chunk in tensor.chunks]
    groups: dict[object, list[str]] = {}
    for name in names:
        boxes = tuple((each.writer, each.chunk.box) for each in chunks[name])
        groups.setdefault((shapes[name], boxes), []).append(name)
    return [
        Pattern(names=tuple(alike), shape=shapes[alike[0]], chunks=tuple(chunks[alike[0]]))
        for alike in groups.values()
    ]


def picture(pattern: Pattern) -> Text:
    """Return the names, the shape, and rows of cells, each with the letter of its writer."""
    boxes = [each.chunk.box for each in pattern.chunks]
    split = [
        dim for dim in range(len(pattern.shape)) if len({box.offset[dim] for box in boxes}) > 1
    ]
    writers = sorted({each.writer for each in pattern.chunks})
    drawn = Text.assemble((", ".join(_short(pattern.names)), "bold"))
    drawn.append(f"  {shape_text(pattern.shape)}", "cyan")
    drawn.append(f"  {_labels(split, boxes, writers)}\n", "dim")
    if not boxes:
        return drawn
    down, across = (split[0], split[1]) if len(split) > 1 else (None, (split or [None])[0])  # type: ignore[list-item]
    rows = _places(pattern.shape, down, _ROWS)
    columns = _places(pattern.shape, across, _COLUMNS)
    owners = _owners(pattern, down=down, across=across, rows=rows, columns=columns)
    for line in owners:
        drawn.append("  ")
        for writer in line:
            if writer < 0:
                drawn.append("·", "dim")
            else:
                drawn.append(_LETTERS[writer % len(_LETTERS)], _STYLES[writer % len(_STYLES)])
        drawn.append("\n")
    return drawn


def _labels(split: Sequence[int], boxes: Sequence[Box], writers: Sequence[int]) -> str:
    if not boxes:
        return "no elements"
    who = f"writer {writers[0]}" if len(writers) == 1 else f"{len(writers)} writers"
    chunks = "1 chunk" if len(boxes) == 1 else f"{len(boxes)} chunks"
    dims = ", ".join(map(str, split))
    how = f", cut along dim {dims}" if split else ""
    how += " (drawn: the first two, the others at 0)" if len(split) > 2 else ""
    return f"{who}, {chunks}{how}"


def _places(shape: Sequence[int], dim: int | None, most: int) -> list[int]:
    """Return the indices along a dim that represent the cells of the picture."""
    if dim is None:
        return [0] * (min(prod(shape), most) if most == _COLUMNS else 1)
    extent = shape[dim]
    count = min(extent, most)
    return [int((2 * cell + 1) * extent / (2 * count)) for cell in range(count)]


def _owners(
    pattern: Pattern,
    *,
    down: int | None,
    across: int | None,
    rows: Sequence[int],
    columns: Sequence[int],
) -> Array:
    """Return the writer at each cell, -1 for none; dims that are not drawn have index 0."""
    owners = np.full((len(rows), len(columns)), -1)
    y, x = np.array(rows), np.array(columns)
    for each in pattern.chunks:
        box = each.chunk.box
        if any(box.offset[dim] for dim in range(len(box.shape)) if dim not in (down, across)):
            continue
        inside_y, inside_x = _inside(box, down, y), _inside(box, across, x)
        owners[np.ix_(inside_y, inside_x)] = each.writer
    return owners


def _inside(box: Box, dim: int | None, places: Array) -> Array:
    if dim is None:
        return np.ones(len(places), dtype=bool)
    start = box.offset[dim]
    return np.asarray((places >= start) & (places < start + box.shape[dim]))


def _short(names: Sequence[str]) -> list[str]:
    """Return short names: those that differ only in numbers become one, with their count."""
    shapes: dict[str, list[str]] = {}
    for name in names:
        shapes.setdefault(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name), []).append(name)
    short = [
        alike[0] if len(alike) == 1 else f"{shape} ({len(alike)})"
        for shape, alike in shapes.items()
    ]
    if len(short) > _NAMES:
        return [*short[:_NAMES], f"… and {len(short) - _NAMES} more"]
    return short


def described(packs: Mapping[int, PackIndex], names: Sequence[str]) -> Json:
    """Return every chunk of every tensor as JSON: writer, box, and place of its bytes."""
    wanted = set(names)
    found: dict[str, list[Json]] = {name: [] for name in names}
    for writer, index in packs.items():
        for name, tensor in index.tensors.items():
            if name not in wanted:
                continue
            found[name] += [
                {
                    "writer": writer,
                    "offset": chunk.box.offset,
                    "shape": chunk.box.shape,
                    "pack": path_of(chunk, index),
                    "at": chunk.at,
                    "stored_bytes": stored_bytes(chunk, tensor),
                    "crc32c": f"{chunk.crc32c:08x}",
                }
                for chunk in tensor.chunks
            ]
    return found
