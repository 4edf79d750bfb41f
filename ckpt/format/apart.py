"""Reading of chunks one by one: the compressed, the scattered, and those of stores by ranges.

`holdfast.ckpt.format.gathered` reads the others, many in one call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

from holdfast.ckpt.format.unpack import ChunkReader, Delivery

Regions: TypeAlias = tuple[ChunkReader, Sequence[Delivery]]
"""A chunk with the regions of it to read."""

_MOST_CHUNKS: Final = 64


class ReadApart:
    """Chunks that are read one by one; small ones that follow each other in one call."""

    def __init__(self, regions: Sequence[Regions]) -> None:
        self._regions = regions
        self.nbytes = sum(array.nbytes for _, some in regions for _, array in some)

    def read(self) -> int:
        """Read the regions into their arrays; return the bytes read."""
        read = 0
        run: list[Regions] = []
        for reader, regions in self._regions:
            small = reader.small_and_whole(regions)
            if run and not (small and reader.follows(run[-1][0])):
                read += _flush(run)
                run = []
            if small:
                run.append((reader, regions))
            else:
                read += reader.deliver(regions)
        return read + (_flush(run) if run else 0)


def apart(regions: Sequence[Regions], *, limit_bytes: int) -> Iterator[ReadApart]:
    """Divide chunks into groups of about ``limit_bytes`` for one thread each."""
    low = size = 0
    for number, (reader, _) in enumerate(regions, start=1):
        size += reader.nbytes
        if size >= limit_bytes or number - low >= _MOST_CHUNKS or number == len(regions):
            yield ReadApart(regions[low:number])
            low, size = number, 0


def _flush(run: Sequence[Regions]) -> int:
    rooms = [regions[0][1].reshape(-1).view("u1").data for _, regions in run]
    return ChunkReader.read_together([reader for reader, _ in run], rooms)
