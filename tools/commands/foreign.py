"""Checkpoints of other formats for the commands that otherwise read Holdfast's.

A `ForeignStep` shows a ``TensorSource`` as if it were a step of one rank, cut into boxes that fit
into memory. The formats have no checksums, so nothing that is read is verified.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from holdfast.ckpt.closing import Closing
from holdfast.ckpt.convert.interchange import PIECE_BYTES, TensorSource, cut, itemsize_of
from holdfast.ckpt.errors import CkptError
from holdfast.ckpt.format.manifest import FileRecord, Manifest, PackIndex, TensorRecord
from holdfast.ckpt.geometry.element_types import dtype_of
from holdfast.ckpt.geometry.grid import whole
from holdfast.ckpt.geometry.layout import Box, TensorSpec
from holdfast.ckpt.geometry.scatter import ByChunk
from holdfast.ckpt.geometry.shard_index import Chunk, ShardIndex, TensorEntry
from holdfast.elastic.errors import ConfigError
from holdfast.tools.commands.formats import FORMATS, SourceOptions

_OWN: Final = "holdfast"


def format_of(path: str) -> str | None:
    """Return the name of another format than Holdfast's own at ``path``; None if there is none."""
    for name, entry in FORMATS.items():
        try:
            if entry.found(path):
                return None if name == _OWN else name
        except CkptError:  # the command itself says what is wrong with the path
            return None
    return None


def open_foreign(path: str, step: int | None) -> ForeignStep | None:
    """Open a checkpoint of another format; None if ``path`` is none.

    Raises ``ConfigError`` if a step is chosen: such a path has one.
    """
    kind = format_of(path)
    if kind is None:
        return None
    if step is not None:
        raise ConfigError(
            f"{path} is a checkpoint of the format {kind}, with one step; leave it out"
        )
    return ForeignStep(FORMATS[kind].source(path, SourceOptions()), path=path, kind=kind)


class ForeignStep(Closing):
    """A source of another format, as the one step of one rank."""

    def __init__(self, source: TensorSource, *, path: str, kind: str) -> None:
        self.source, self.path, self.kind = source, path, kind
        self.origin, self.step = source.origin, int(getattr(source, "step", None) or 0)
        self.packs: Mapping[int, PackIndex] = {}
        self.manifest = Manifest(
            format=0,
            run="",
            step=self.step,
            generation=0,
            world_size=1,
            mesh={},
            tensors={
                fqn: TensorRecord(dtype=spec.dtype, shape=spec.shape, cell=spec.shape)
                for fqn, spec in source.specs.items()
            },
            values=dict(source.values),
            aliases=dict(source.aliases),
            writers=(),
            merged=None,
            refs=FileRecord(path="", nbytes=0, crc32c=0),
            created_by={},
        )

    def indexes(self) -> Sequence[ShardIndex]:
        """Return one index, with every tensor in pieces."""
        tensors = {fqn: _entry(spec) for fqn, spec in self.source.specs.items()}
        index = ShardIndex(
            run="",
            generation=0,
            step=self.step,
            writer=0,
            world_size=1,
            payload_bytes=0,
            tensors=tensors,
        )
        return [index]

    def scatter(self, deliveries: ByChunk) -> int:
        """Read regions of pieces into their destinations."""
        done = 0
        for ref, regions in deliveries:
            kind = dtype_of(ref.dtype, origin=self.origin).numpy
            for region, target in regions:
                offset = tuple(
                    at + start
                    for at, start in zip(ref.chunk.box.offset, region.offset, strict=True)
                )
                data = self.source.read(ref.fqn, Box(offset=offset, shape=region.shape))
                target[...] = np.frombuffer(data, kind).reshape(region.shape)
                done += data.nbytes
        return done

    def close(self) -> None:
        """Close the source."""
        self.source.close()


def _entry(spec: TensorSpec) -> TensorEntry:
    itemsize = itemsize_of(spec)
    boxes = cut(whole(spec.shape), itemsize=itemsize, most_bytes=PIECE_BYTES)
    chunks = tuple(Chunk(box=b, at=0, nbytes=b.size * itemsize, crc32c=0) for b in boxes)
    return TensorEntry(dtype=spec.dtype, shape=spec.shape, chunks=chunks)
