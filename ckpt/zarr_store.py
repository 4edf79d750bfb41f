"""A checkpoint behind zarr-python's store interface: read-only, chunks verified by codec."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Protocol

from zarr.abc.store import (
    ByteRequest,
    OffsetByteRequest,
    RangeByteRequest,
    Store,
    SuffixByteRequest,
)
from zarr.core.buffer import Buffer, BufferPrototype

from ckpt.errors import StoreError
from ckpt.zarr_view import Stored

_REFUSAL = "a checkpoint is immutable; save another step, or copy the group elsewhere"


class Ranges(Protocol):
    """What serves ranges of the packs."""

    origin: str

    def read_range(self, path: str, at: int, nbytes: int) -> bytes:
        """Return raw bytes of a pack. Raises ``CorruptError`` when they are not all there."""


class CheckpointStore(Store):
    """Documents from memory, chunks from packs."""

    def __init__(
        self, ranges: Ranges, documents: Mapping[str, bytes], places: Mapping[str, Stored]
    ) -> None:
        super().__init__(read_only=True)
        self._ranges, self._documents, self._places = ranges, documents, places

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CheckpointStore) and self._ranges is other._ranges

    def __hash__(self) -> int:
        return id(self._ranges)

    def __repr__(self) -> str:
        return f"CheckpointStore({self._ranges.origin!r})"

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """Return a document or a chunk, or a part of it."""
        if (document := self._documents.get(key)) is not None:
            start, stop = _bounds(byte_range, len(document))
            return prototype.buffer.from_bytes(document[start:stop])
        if (place := self._places.get(key)) is None:
            return None
        start, stop = _bounds(byte_range, place.nbytes)
        data = await asyncio.to_thread(
            self._ranges.read_range, place.path, place.at + start, stop - start
        )
        return prototype.buffer.from_bytes(data)

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """Return several parts."""
        return [await self.get(key, prototype, byte_range) for key, byte_range in key_ranges]

    async def exists(self, key: str) -> bool:
        """Say whether there is such a document or chunk."""
        return key in self._documents or key in self._places

    @property
    def supports_writes(self) -> bool:
        """Checkpoints are immutable."""
        return False

    @property
    def supports_deletes(self) -> bool:
        """Checkpoints are immutable."""
        return False

    @property
    def supports_listing(self) -> bool:
        """All keys are known."""
        return True

    async def set(self, key: str, value: Buffer) -> None:
        """Refuse."""
        raise StoreError(f"{self._ranges.origin}: {_REFUSAL}")

    async def delete(self, key: str) -> None:
        """Refuse."""
        raise StoreError(f"{self._ranges.origin}: {_REFUSAL}")

    async def list(self) -> AsyncIterator[str]:
        """Yield every key."""
        for key in (*self._documents, *self._places):
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """Yield the keys that start with ``prefix``."""
        async for key in self.list():
            if key.startswith(prefix):
                yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """Yield the names directly below ``prefix``."""
        folder = f"{prefix.rstrip('/')}/" if prefix else ""
        seen = {
            key[len(folder) :].partition("/")[0]
            for key in (*self._documents, *self._places)
            if key.startswith(folder)
        }
        for name in sorted(seen):
            yield name


def _bounds(request: ByteRequest | None, nbytes: int) -> tuple[int, int]:
    match request:
        case None:
            return 0, nbytes
        case RangeByteRequest(start=start, end=end):
            return min(start, nbytes), min(end, nbytes)
        case OffsetByteRequest(offset=offset):
            return min(offset, nbytes), nbytes
        case SuffixByteRequest(suffix=suffix):
            return max(nbytes - suffix, 0), nbytes
    raise TypeError(f"unknown byte request {request!r}")
