"""A checkpoint as a Zarr v3 hierarchy: metadata and where each chunk lies. Pure.

One array per tensor, named by its FQN, in one flat group; tied tensors appear under each name.
bfloat16 and float8 have Zarr data types of their own, or *portably* appear as unsigned integers.
Chunks are encoded by Zarr's own ``bytes`` and ``crc32c`` codecs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final
from urllib.parse import quote

import msgspec
from typing_extensions import Buffer

from holdfast.ckpt.format.manifest import (
    CRC_BYTES,
    FORMAT,
    PackedChunk,
    PackedTensor,
    PackIndex,
    TensorRecord,
    from_root,
    path_of,
    stored_bytes,
)
from holdfast.ckpt.geometry.element_types import dtype_of
from holdfast.ckpt.types import Json

_TEMPLATE: Final = "{{root}}"
_NAMES: Final = 16384
"""The number of names and documents that are cached: they are the same at every save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """The position of a Zarr chunk: a range of a pack, whose path is relative to the step's folder.

    Its last bytes are the CRC32C of those before. ``crc32c`` is the index's checksum of it, or None
    for a chunk that is padded or compressed, of which the index has another checksum.
    """

    path: str
    at: int
    nbytes: int
    crc32c: int | None = None

    def is_other(self, data: Buffer) -> bool:
        """Say whether the bytes of the whole chunk end with another checksum than the index's."""
        found = bytes(memoryview(data)[-CRC_BYTES:])
        return self.crc32c is not None and found != self.crc32c.to_bytes(CRC_BYTES, "little")


@lru_cache(_NAMES)
def array_name(fqn: str) -> str:
    """Return the Zarr name of a tensor: the FQN, with characters that Zarr forbids quoted."""
    name = quote(fqn, safe="=+,@[]()")
    if name.startswith("__"):
        return f"%5F{name[1:]}"
    return name if name.strip(".") else name.replace(".", "%2E")


def is_stored_cell(chunk: PackedChunk, tensor: PackedTensor, cell: tuple[int, ...]) -> bool:
    """Say whether a chunk is stored exactly as the Zarr chunk at its position."""
    shape = tensor.cell if chunk.padded else chunk.box.shape
    return shape == cell and all(o % c == 0 for o, c in zip(chunk.box.offset, cell, strict=True))


def chunk_key(chunk: PackedChunk, cell: tuple[int, ...]) -> str:
    """Return the key of the Zarr chunk whose low corner is the chunk's."""
    numbers = (o // c for o, c in zip(chunk.box.offset, cell, strict=True))
    return "/".join(("c", *map(str, numbers)))


def chunk_places(
    tensors: Mapping[str, TensorRecord], indexes: Mapping[int, PackIndex]
) -> Iterator[tuple[str, str, Stored]]:
    """Yield (FQN, chunk key, position) of every stored chunk that is a cell of ``tensors``."""
    for index in indexes.values():
        for fqn, tensor in index.tensors.items():
            if (record := tensors.get(fqn)) is None:
                continue
            cell = record.cell
            for chunk in tensor.chunks:
                if is_stored_cell(chunk, tensor, cell):
                    plain = chunk.stored is None and not chunk.padded
                    place = Stored(
                        path=path_of(chunk, index),
                        at=chunk.at,
                        nbytes=stored_bytes(chunk, tensor) + CRC_BYTES,
                        crc32c=chunk.crc32c if plain else None,
                    )
                    yield fqn, chunk_key(chunk, cell), place


def array_metadata(
    fqn: str,
    tensor: TensorRecord,
    *,
    portable: bool = True,
    dimensions: Sequence[str] | None = None,
) -> Json:
    """Return the ``zarr.json`` of a tensor, with the names of its ``dimensions`` if given."""
    dtype = dtype_of(tensor.dtype, origin=f"tensor {fqn}")
    endian = {"configuration": {"endian": "little"}} if dtype.itemsize > 1 else {}
    named = {} if dimensions is None else {"dimension_names": list(dimensions)}
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(tensor.shape),
        "data_type": dtype.zarr_name(portable=portable),
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(tensor.cell)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": dtype.fill(portable=portable),
        "codecs": [
            {"name": "bytes", **endian},
            *([tensor.codec.zarr()] if tensor.codec else []),
            {"name": "crc32c"},
        ],
        "attributes": {"torch_dtype": tensor.dtype},
        **named,
    }


@lru_cache(_NAMES)
def _document(tensor: TensorRecord, *, portable: bool) -> bytes:
    """Return a tensor's ``zarr.json``; cached, as tensors of one shape share it at every save."""
    return msgspec.json.encode(array_metadata("of this shape", tensor, portable=portable))


def group_metadata(*, run: str, step: int, values: Mapping[str, Json]) -> Json:
    """Return the ``zarr.json`` of the group; plain values are its attributes."""
    attributes = {"holdfast": {"format": FORMAT, "run": run, "step": step}, "values": dict(values)}
    return {"zarr_format": 3, "node_type": "group", "attributes": attributes}


def hierarchy(
    tensors: Mapping[str, TensorRecord],
    aliases: Mapping[str, str],
    indexes: Mapping[int, PackIndex],
    *,
    group: Json,
    portable: bool = True,
) -> tuple[dict[str, bytes], dict[str, Stored]]:
    """Return the whole hierarchy by Zarr key: documents, and positions of chunks."""
    names: dict[str, list[str]] = {fqn: [array_name(fqn)] for fqn in tensors}
    for alias, fqn in aliases.items():
        names[fqn].append(array_name(alias))
    documents = {"zarr.json": msgspec.json.encode(group)}
    for fqn, tensor in tensors.items():
        document = _document(tensor, portable=portable)
        documents.update({f"{name}/zarr.json": document for name in names[fqn]})
    places = {
        f"{name}/{key}": place
        for fqn, key, place in chunk_places(tensors, indexes)
        for name in names[fqn]
    }
    return documents, places


def references(
    documents: Mapping[str, bytes], places: Mapping[str, Stored], *, root: str, folder: str
) -> bytes:
    """Return a reference map (kerchunk, version 1) of the hierarchy in ``folder`` of ``root``.

    Paths use the template ``root``, which is the checkpoints' root at the time of writing. A reader
    of a root that was moved overrides it (``template_overrides={"root": …}``).
    """
    refs: dict[str, Json] = {key: data.decode() for key, data in documents.items()}
    for key, place in places.items():
        refs[key] = [f"{_TEMPLATE}/{from_root(folder, place.path)}", place.at, place.nbytes]
    return msgspec.json.encode({"version": 1, "templates": {"root": root}, "refs": refs})
