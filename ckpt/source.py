"""A checkpoint as a source of verified shards: ranged reads by a few threads, in order."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Final

from ckpt.catalog import check_size, load_index, load_manifest, missing, open_store, step_folder
from ckpt.closing import Closing
from ckpt.errors import CorruptError, NotFoundError
from ckpt.index import Chunk, ChunkRef, ShardIndex, TensorEntry
from ckpt.manifest import PackedChunk, PackIndex
from ckpt.pack import PackReader
from ckpt.store.base import Store

_THREADS: Final = 4
_WINDOW_BYTES: Final = 32 << 20
_WINDOW_CHUNKS: Final = 32


def _as_shard(index: PackIndex) -> ShardIndex:
    """Return a pack's index as the description every source of shards gives."""
    tensors = {
        fqn: TensorEntry(
            dtype=tensor.dtype,
            shape=tensor.shape,
            grid=tensor.cell,
            chunks=tuple(
                Chunk(box=c.box, at=c.at, nbytes=c.nbytes, crc32c=c.crc32c) for c in tensor.chunks
            ),
        )
        for fqn, tensor in index.tensors.items()
    }
    return ShardIndex(
        run=index.run,
        generation=index.generation,
        step=index.step,
        writer=index.writer,
        world_size=index.world_size,
        payload_bytes=index.pack_bytes,
        tensors=tensors,
        values=index.values,
        rank_values=index.rank_values,
        aliases=index.aliases,
    )


class PackSource(Closing):
    """The packs of one folder as a `ShardSource`; packs are opened when first read.

    Safe to share between threads.
    """

    def __init__(
        self, store: Store, folder: str, packs: Mapping[int, PackIndex], *, threads: int = _THREADS
    ) -> None:
        self._store, self._folder, self._threads = store, folder, threads
        self.origin = f"checkpoint {store.where(folder)}"
        self.packs = packs
        self._readers: dict[int, PackReader] = {}
        self._opening = threading.Lock()

    @functools.cached_property
    def _shards(self) -> tuple[ShardIndex, ...]:
        return tuple(_as_shard(index) for index in self.packs.values())

    @functools.cached_property
    def _chunks(self) -> Mapping[tuple[int, int], tuple[str, PackedChunk]]:
        """Chunks by writer and offset."""
        return {
            (writer, chunk.at): (fqn, chunk)
            for writer, index in self.packs.items()
            for fqn, tensor in index.tensors.items()
            for chunk in tensor.chunks
        }

    def indexes(self) -> Sequence[ShardIndex]:
        """Return what every writer holds; ``Chunk.at`` is the offset in its pack."""
        return self._shards

    def read(self, refs: Sequence[ChunkRef]) -> Iterator[tuple[ChunkRef, memoryview]]:
        """Yield the verified bytes of each chunk, in the order asked.

        A view is valid until the next one is asked for: its memory is used again.
        """
        spare: list[bytearray] = []
        ahead: deque[tuple[ChunkRef, bytearray, Future[memoryview]]] = deque()
        waiting = deque(refs)
        flying = 0
        with ThreadPoolExecutor(self._threads, thread_name_prefix="ckpt-read") as pool:
            try:
                while waiting or ahead:
                    while waiting and (
                        not ahead or (flying < _WINDOW_BYTES and len(ahead) < _WINDOW_CHUNKS)
                    ):
                        ref = waiting.popleft()
                        buffer = _take(spare, ref.chunk.nbytes)
                        ahead.append((ref, buffer, pool.submit(self._load, ref, buffer)))
                        flying += ref.chunk.nbytes
                    ref, buffer, future = ahead.popleft()
                    yield ref, future.result()
                    flying -= ref.chunk.nbytes
                    spare.append(buffer)
                    del spare[:-_WINDOW_CHUNKS]
            finally:
                for _, _, future in ahead:
                    future.cancel()

    def read_into(self, ref: ChunkRef, into: memoryview) -> None:
        """Read one chunk's verified bytes into ``into``."""
        fqn, chunk = self._chunks[ref.writer, ref.chunk.at]
        self._reader(ref.writer).read(fqn, chunk, into)

    def _load(self, ref: ChunkRef, buffer: bytearray) -> memoryview:
        into = memoryview(buffer)[: ref.chunk.nbytes]
        self.read_into(ref, into)
        return into

    def _reader(self, writer: int) -> PackReader:
        with self._opening:
            reader = self._readers.get(writer)
            if reader is None:
                index = self.packs[writer]
                name = f"{self._folder}/{index.pack}"
                try:
                    file = self._store.open(name)
                except NotFoundError as error:
                    raise missing(self._store, name) from error
                reader = PackReader(file, index, origin=self._store.where(name))
                self._readers[writer] = reader
            return reader

    def close(self) -> None:
        """Close the packs."""
        with self._opening:
            for reader in self._readers.values():
                reader.close()
            self._readers.clear()


class StoreSource(PackSource):
    """A committed checkpoint as a `ShardSource`; opening reads the manifest and all indexes.

    Raises ``NotFoundError`` where no checkpoint is committed and ``CorruptError`` where a file is
    missing, cut off or changed.
    """

    def __init__(self, root: str | Path, step: int, *, threads: int = _THREADS) -> None:
        store, folder = open_store(root), step_folder(step)
        self.store, self.folder = store, folder
        self.manifest = load_manifest(store, folder)
        packs = {
            record.writer: load_index(store, folder, record) for record in self.manifest.writers
        }
        for record in self.manifest.writers:
            check_size(store, folder, record.pack)
        super().__init__(store, folder, packs, threads=threads)

    def all_packs(self) -> dict[int, PackIndex]:
        """Return the indexes of all packs, that of the merged cells included (as writer -1)."""
        merged = self.manifest.merged
        extra = {-1: load_index(self.store, self.folder, merged)} if merged else {}
        return {**self.packs, **extra}

    def read_range(self, path: str, at: int, nbytes: int) -> bytes:
        """Return raw bytes of a pack, unverified. Raises ``CorruptError`` where they end early."""
        name = f"{self.folder}/{path}"
        data = bytearray(nbytes)
        try:
            with closing(self.store.open(name)) as file:
                got = file.read_into([data], at)
        except NotFoundError as error:
            raise missing(self.store, name) from error
        if got != nbytes:
            raise CorruptError(
                f"{self.store.where(name)}: ends after {at + got} bytes, {at + nbytes} are needed; "
                "load another step, or restore the file from a copy"
            )
        return bytes(data)


def _take(spare: list[bytearray], nbytes: int) -> bytearray:
    """Return a buffer of at least ``nbytes``: the smallest used one that will do, or a new one."""
    fitting = [buffer for buffer in spare if len(buffer) >= nbytes]
    if not fitting:
        return bytearray(nbytes)
    best = min(fitting, key=len)
    spare[:] = [buffer for buffer in spare if buffer is not best]
    return best
