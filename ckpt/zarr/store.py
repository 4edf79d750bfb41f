"""A checkpoint behind zarr-python's store interface: read-only, chunks verified by codec."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

from zarr.abc.store import (
    ByteRequest,
    OffsetByteRequest,
    RangeByteRequest,
    Store,
    SuffixByteRequest,
)
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype

from holdfast.ckpt.errors import CorruptError, ImmutableError
from holdfast.ckpt.format.zarr_metadata import Stored
from holdfast.ckpt.native.isal import crc32c

if TYPE_CHECKING:
    from holdfast.ckpt.checkpoints.source import StoreSource

_REFUSAL = (
    "store was opened in read-only mode and does not support writing: a checkpoint is immutable; "
    "save another step, or copy the group elsewhere"
)


class Ranges(Protocol):
    """A server of ranges of the packs."""

    origin: str

    def read_range(self, path: str, at: int, nbytes: int) -> bytes | memoryview:
        """Return raw bytes of a pack. Raises ``CorruptError`` when some of them are missing."""


class SourceRanges:
    """The packs of a source; a process that unpickles it opens them again."""

    def __init__(self, source: StoreSource) -> None:
        self._source, self.origin = source, source.origin
        self._state = source.store.root, source.manifest.step, _digest(source)

    def read_range(self, path: str, at: int, nbytes: int) -> bytes | memoryview:
        """Return raw bytes of a pack. Raises ``CorruptError`` when some of them are missing."""
        return self._source.read_range(path, at, nbytes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SourceRanges) and self._state == other._state

    def __hash__(self) -> int:
        return hash(self._state)

    def __reduce__(self) -> tuple[object, ...]:
        return _reopened, self._state


def _digest(source: StoreSource) -> int:
    """Return a number that changes when the same step is saved again."""
    files = [f"{record.path} {record.crc32c}" for record in source.manifest.files()]
    return crc32c("\n".join(files).encode())


def _reopened(root: str, step: int, digest: int) -> SourceRanges:
    from holdfast.ckpt.checkpoints.source import StoreSource

    source = StoreSource(root, step)
    if _digest(source) != digest:
        raise CorruptError(
            f"{source.origin}: the step was saved again after the Zarr store was opened; open it "
            "again"
        )
    return SourceRanges(source)


class CheckpointStore(Store):
    """Documents from memory, chunks from packs. Read-only; safe to share and to pickle.

    A chunk that an array must have and no pack holds raises ``CorruptError``; it is never filled.
    """

    def __init__(
        self,
        ranges: Ranges,
        documents: Mapping[str, bytes],
        places: Mapping[str, Stored],
        *,
        read_only: bool = True,
    ) -> None:
        if not read_only:
            raise ImmutableError(f"{ranges.origin}: {_REFUSAL}")
        super().__init__(read_only=True)
        self._ranges, self._documents, self._places = ranges, documents, places

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CheckpointStore) and (
            (self._ranges, self._documents, self._places)
            == (other._ranges, other._documents, other._places)
        )

    def __hash__(self) -> int:
        return hash((self._ranges.origin, len(self._documents), len(self._places)))

    def __repr__(self) -> str:
        return f"CheckpointStore({self._ranges.origin!r})"

    def with_read_only(self, read_only: bool = False) -> Store:
        """Return another read-only store of the same checkpoint; refuse a writable one."""
        if read_only:
            return type(self)(self._ranges, self._documents, self._places)
        raise NotImplementedError(
            f"with_read_only is not implemented for the {type(self)} store type. "
            f"{self._ranges.origin}: {_REFUSAL}"
        )

    def get_sync(
        self,
        key: str,
        *,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        """Return a document or a chunk, or a part of it; None for a key that is neither."""
        make = (prototype or default_buffer_prototype()).buffer.from_bytes
        if (document := self._documents.get(key)) is not None:
            start, stop = _bounds(byte_range, len(document))
            return make(document[start:stop])
        if (place := self._place(key)) is None:
            return None
        start, stop = _bounds(byte_range, place.nbytes)
        data = self._ranges.read_range(place.path, place.at + start, stop - start)
        if len(data) == place.nbytes and place.is_other(data):
            raise CorruptError(
                f"{self._ranges.origin}: {place.path}: the bytes at offset {place.at} are not "
                f"those of chunk {key}; load another step"
            )
        return make(data)

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """Return a document or a chunk, or a part of it; None for a key that is neither."""
        if self._place(key) is None:
            return self.get_sync(key, prototype=prototype, byte_range=byte_range)
        return await asyncio.to_thread(
            self.get_sync, key, prototype=prototype, byte_range=byte_range
        )

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """Return several parts, in the order of the request."""
        return list(
            await asyncio.gather(*(self.get(key, prototype, part) for key, part in key_ranges))
        )

    def _place(self, key: str) -> Stored | None:
        """Return a chunk's position. Raises ``CorruptError`` for a missing chunk."""
        if (place := self._places.get(key)) is not None:
            return place
        name, _, rest = key.partition("/")
        if f"{name}/zarr.json" in self._documents and rest.partition("/")[0] == "c":
            raise CorruptError(
                f"{self._ranges.origin}: array {name}: no pack holds its chunk {rest}; load "
                "another step"
            )
        return None

    async def exists(self, key: str) -> bool:
        """Say whether there is such a document or chunk."""
        return key in self._documents or key in self._places

    async def getsize(self, key: str) -> int:
        """Return the size of a document or chunk in bytes, without reading it."""
        if (document := self._documents.get(key)) is not None:
            return len(document)
        if (place := self._places.get(key)) is None:
            raise FileNotFoundError(key)
        return place.nbytes

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

    def _check_writable(self) -> None:
        raise ImmutableError(f"{self._ranges.origin}: {_REFUSAL}")

    async def set(self, key: str, value: Buffer) -> None:
        """Raise ``ImmutableError``."""
        self._check_writable()

    async def set_if_not_exists(self, key: str, value: Buffer) -> None:
        """Raise ``ImmutableError``."""
        self._check_writable()

    async def delete(self, key: str) -> None:
        """Raise ``ImmutableError``."""
        self._check_writable()

    async def list(self) -> AsyncIterator[str]:
        """Yield every key."""
        for key in (*self._documents, *self._places):
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """Yield the keys that start with ``prefix``."""
        for key in (*self._documents, *self._places):
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
    """Return the first byte and the one behind the last, limited to the end."""
    match request:
        case None:
            return 0, nbytes
        case RangeByteRequest(start=start, end=end) if 0 <= start <= end:
            return min(start, nbytes), min(end, nbytes)
        case OffsetByteRequest(offset=offset) if offset >= 0:
            return min(offset, nbytes), nbytes
        case SuffixByteRequest(suffix=suffix) if suffix >= 0:
            return max(nbytes - suffix, 0), nbytes
    raise ValueError(f"Unexpected byte_range, got {request!r}; use the requests of zarr.abc.store")
