"""A checkpoint as a source of verified shards: ranged reads by a few threads."""

from __future__ import annotations

import functools
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Final, Protocol, Self, TypeAlias

import numpy as np

from holdfast.ckpt.checkpoints.catalog import (
    check_sizes,
    choose,
    head_of,
    is_removed,
    load_index,
    open_listed,
    open_whole,
    register_of,
    step_folder,
    verified,
    whole,
)
from holdfast.ckpt.closing import Closing
from holdfast.ckpt.errors import CorruptError, NotFoundError
from holdfast.ckpt.format.apart import Regions, apart
from holdfast.ckpt.format.gathered import GatheredReads
from holdfast.ckpt.format.manifest import (
    Manifest,
    PackedChunk,
    PackIndex,
    files_of,
    from_root,
    path_of,
)
from holdfast.ckpt.format.unpack import ChunkReader, Pack, aligned_ends, ends_of
from holdfast.ckpt.geometry.layout import Box
from holdfast.ckpt.geometry.scatter import ByChunk
from holdfast.ckpt.geometry.shard_index import Chunk, ChunkRef, ShardIndex, TensorEntry
from holdfast.ckpt.register.outline import SavedOutline, outline_of
from holdfast.ckpt.register.reading import Register
from holdfast.ckpt.register.records import region_of
from holdfast.ckpt.store.base import Store
from holdfast.ckpt.store.places import open_store

THREADS: Final = max(2, min(8, os.cpu_count() or 1))
_WINDOW_BYTES: Final = 32 << 20
_WINDOW_CHUNKS: Final = 32
_TASK_BYTES: Final = 8 << 20
_CALL_BYTES: Final = 16 << 20
"""Read from a file of this machine in one call, which maps that part of it once."""
_BASE_BITS: Final = 48

ReadSoFar: TypeAlias = Callable[[int, int], None]
"""Called while a checkpoint is read: the bytes that are in place, and those that will be."""


def _place(chunk: PackedChunk) -> int:
    """Return a chunk's position in one number space for a writer's pack and its bases."""
    return chunk.at if chunk.base is None else chunk.at + ((chunk.base + 1) << _BASE_BITS)


def _as_shard(index: PackIndex) -> ShardIndex:
    """Return a pack's index as the shard index that every source of shards gives."""
    tensors = {
        fqn: TensorEntry(
            dtype=tensor.dtype,
            shape=tensor.shape,
            grid=tensor.cell,
            chunks=tuple(
                Chunk(box=c.box, at=_place(c), nbytes=c.nbytes, crc32c=c.crc32c)
                for c in tensor.chunks
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
    """The packs of one step as a `ShardSource`; a pack is opened at its first read.

    Safe to share between threads. ``progress`` is called by the thread that calls `scatter`.
    ``ends`` returns the ends of an index's chunks.
    """

    def __init__(
        self,
        store: Store,
        folder: str,
        packs: Mapping[int, PackIndex],
        *,
        threads: int = THREADS,
        progress: ReadSoFar = lambda done, total: None,
        ends: Callable[[PackIndex], dict[int, int]] = ends_of,
    ) -> None:
        self._store, self._folder, self._threads = store, folder, threads
        self._progress, self._ends_of = progress, ends
        self.origin = f"checkpoint {store.where(folder)}"
        self.packs = packs
        self._open: dict[str, Pack] = {}
        self._found: dict[tuple[int, int | None], Pack] = {}
        self._opening = threading.Lock()
        self._chunks: dict[tuple[int, str], dict[int, PackedChunk]] = {}

    @functools.cached_property
    def _shards(self) -> tuple[ShardIndex, ...]:
        return tuple(_as_shard(index) for index in self.packs.values())

    def indexes(self) -> Sequence[ShardIndex]:
        """Return the index of every writer; ``Chunk.at`` grows in the order of a pack's chunks."""
        return self._shards

    # -- reading ---------------------------------------------------------------------------------

    def scatter(self, deliveries: ByChunk) -> int:
        """Read regions of chunks into their destinations; return the bytes read.

        All bytes are verified, but only after they are in the targets: do not use the targets after
        a ``CorruptError``.
        """
        works = [*self._works(deliveries)]
        total = sum(work.nbytes for work in works)
        reading = _SharedReading(works, lambda done: self._progress(done, total))
        return reading.together(min(self._threads, len(works)))

    def _works(self, deliveries: ByChunk) -> Iterator[_Work]:
        """Yield groups of chunks, in the order of their positions; one thread reads each group.

        A pack is read in a few calls, as far as that can be.
        """
        gathered: dict[int, GatheredReads | None] = {}
        others: list[Regions] = []
        for ref, regions in sorted(deliveries, key=lambda item: (item[0].writer, item[0].chunk.at)):
            reader = self._reader(ref)
            pack = reader.pack
            if (key := id(pack)) not in gathered:
                gathered[key] = GatheredReads.of(pack)
            calls = gathered[key]
            if calls is None or not calls.add(reader, regions):
                others.append((reader, regions))
        for calls in gathered.values():
            if calls is not None:
                yield from calls.parts(_CALL_BYTES)
        yield from apart(others, limit_bytes=_TASK_BYTES)

    def read(self, refs: Sequence[ChunkRef]) -> Iterator[tuple[ChunkRef, memoryview]]:
        """Yield the verified bytes of each chunk, in the order of the request.

        A view is valid until the next one is requested: its memory is used again.
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
        self._reader(ref).read(into)

    def _load(self, ref: ChunkRef, buffer: bytearray) -> memoryview:
        into = memoryview(buffer)[: ref.chunk.nbytes]
        self.read_into(ref, into)
        return into

    def _reader(self, ref: ChunkRef) -> ChunkReader:
        tensor = self.packs[ref.writer].tensors[ref.fqn]
        chunks = tensor.chunks
        chunk = chunks[0] if len(chunks) == 1 else self._chunk(ref, chunks)
        return ChunkReader(self._pack(ref.writer, chunk), ref.fqn, tensor, chunk)

    def _chunk(self, ref: ChunkRef, chunks: Sequence[PackedChunk]) -> PackedChunk:
        key = (ref.writer, ref.fqn)
        if (known := self._chunks.get(key)) is None:
            known = self._chunks[key] = {_place(chunk): chunk for chunk in chunks}
        return known[ref.chunk.at]

    def _pack(self, writer: int, chunk: PackedChunk) -> Pack:
        known = self._found.get((writer, chunk.base))
        if known is not None:
            return known
        index = self.packs[writer]
        name = from_root(self._folder, path_of(chunk, index))
        with self._opening:
            if name not in self._open:
                file = open_listed(self._store, name)
                ends = self._ends_of(index) if chunk.base is None else {}
                self._open[name] = Pack(file, origin=self._store.where(name), ends=ends)
            return self._found.setdefault((writer, chunk.base), self._open[name])

    def close(self) -> None:
        """Close the packs."""
        with self._opening:
            for pack in self._open.values():
                pack.close()
            self._open.clear()
            self._found.clear()


class _Work(Protocol):
    """Something to read into its arrays, of which it fills ``nbytes``."""

    nbytes: int

    def read(self) -> int:
        """Read it; return the bytes read."""


class _SharedReading:
    """The reading of works by some threads, of which the caller's is one.

    ``progress`` is called by the caller's thread, for each one that is read, with the bytes of all
    that are.
    """

    def __init__(self, works: Sequence[_Work], progress: Callable[[int], None]) -> None:
        self._waiting = deque(works)
        self._progress, self._left, self._done = progress, len(works), 0
        self._finished = queue.SimpleQueue[tuple[int, int] | None]()  # None: a thread failed

    def together(self, threads: int) -> int:
        """Read all; return the bytes read. After an error no thread writes to any target."""
        if threads <= 1:
            read = 0
            while self._next():
                read += self._tell(wait=False)
            return read
        with ThreadPoolExecutor(threads - 1, thread_name_prefix="ckpt-read") as pool:
            others = [pool.submit(self._some) for _ in range(threads - 1)]
            try:
                read = 0
                while self._next():
                    read += self._tell(wait=False)
                while self._left:
                    read += self._tell(wait=True)
            finally:
                self._waiting.clear()
            for each in others:
                each.result()
        return read

    def _some(self) -> None:
        try:
            while self._next():
                pass
        except BaseException:  # the caller's thread stops waiting and raises it
            self._waiting.clear()
            self._finished.put(None)
            raise

    def _next(self) -> bool:
        """Read the next task; return False if there is none."""
        try:
            work = self._waiting.popleft()
        except IndexError:
            return False
        self._finished.put((work.read(), work.nbytes))
        return True

    def _tell(self, *, wait: bool) -> int:
        """Tell of the tasks that were read meanwhile; return the bytes read for them."""
        read = 0
        while self._left and (wait or not self._finished.empty()):
            if (found := self._finished.get()) is None:
                self._left = 0
                break
            self._left -= 1
            read, self._done = read + found[0], self._done + found[1]
            self._progress(self._done)
        return read


class _WhenAsked(Mapping[int, PackIndex]):
    """Indexes that are read when the first one is asked for."""

    def __init__(self, read: Callable[[], Mapping[int, PackIndex]]) -> None:
        self._read = read

    @functools.cached_property
    def _found(self) -> Mapping[int, PackIndex]:
        return self._read()

    def __getitem__(self, writer: int) -> PackIndex:
        return self._found[writer]

    def __iter__(self) -> Iterator[int]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


class StoreSource(PackSource):
    """A committed checkpoint as a `ShardSource`; opening reads the manifest and all indexes.

    Of a step with a register, opening reads the names of tensors and the values. Then `part` and
    `tensors` read the places of some tensors, and all others are read once they are asked for.
    ``head`` is the manifest; of a step with a register it lists no writers.

    Raises ``NotFoundError`` if no checkpoint is committed and ``CorruptError`` if a file is
    missing, cut off or changed.
    """

    def __init__(
        self,
        root: str | Path,
        step: int,
        *,
        threads: int = THREADS,
        progress: ReadSoFar = lambda done, total: None,
    ) -> None:
        store, folder = open_store(root), step_folder(step)
        self.store, self.folder = store, folder
        self.head = head_of(store, step)
        self._parts: list[PackSource] = []
        self._checked = set[str]()
        packs: Mapping[int, PackIndex]
        self.register: Register | None = None
        if self.head.register is None:
            packs = open_whole(store, self.head)[1]
        else:
            self.register = register_of(store, folder, self.head)
            packs = _WhenAsked(lambda: open_whole(store, self.head)[1])
        super().__init__(store, folder, packs, threads=threads, progress=progress)

    @functools.cached_property
    def manifest(self) -> Manifest:
        """The manifest, with the writers that a register lists."""
        register = self.register
        return self.head if register is None else whole(self.head, register)

    def outline(self) -> SavedOutline | None:
        """Return everything but the places of chunks; None where these were read, too."""
        return None if self.register is None else outline_of(self.head, self.register)

    def names(self) -> list[str]:
        """Return the names of all tensors, tied names among them."""
        return [*self.head.tensors, *self.head.aliases]

    def part(self, want: Mapping[str, Sequence[Box] | None]) -> PackSource:
        """Return a source of the chunks that meet boxes of tensors, of all chunks for None.

        It is closed with this one.
        """
        assert self.register is not None
        packs = self.register.packs(
            {
                fqn: None if boxes is None else [region_of(box) for box in boxes]
                for fqn, boxes in want.items()
            }
        )
        return self._part(packs)

    def tensors(self, names: Iterable[str]) -> PackSource:
        """Return a source of whole tensors, which may be named by tied names; it may have others.

        Names that were not saved are left out. It is closed with this one.
        """
        return self if self.register is None else self._part(self.register.tensors(names))

    def _part(self, packs: Mapping[int, PackIndex]) -> PackSource:
        files = {file.path: file for index in packs.values() for file in files_of(index)}
        fresh = [file for path, file in files.items() if path not in self._checked]
        check_sizes(self.store, self.folder, fresh)
        self._checked.update(file.path for file in fresh)
        part = PackSource(
            self.store,
            self.folder,
            packs,
            threads=self._threads,
            progress=self._progress,
            ends=aligned_ends,
        )
        self._parts.append(part)
        return part

    def close(self) -> None:
        """Close the packs, those of its parts included."""
        super().close()
        while self._parts:
            self._parts.pop().close()

    @classmethod
    def chosen(cls, root: str | Path, step: int | None, *, threads: int = THREADS) -> Self:
        """Open ``step``, or the newest verified one for None, whatever is removed meanwhile.

        Raises ``NotFoundError`` listing the existing steps.
        """
        store = open_store(root)
        for candidate in verified(root) if step is None else ():
            try:
                return cls(root, candidate, threads=threads)
            except (NotFoundError, CorruptError):
                if not is_removed(store, candidate):
                    raise
        return cls(root, choose(root, step), threads=threads)

    def all_packs(self) -> dict[int, PackIndex]:
        """Return the indexes of all packs, that of the merged cells included (as writer -1)."""
        merged = self.manifest.merged
        extra = {-1: load_index(self.store, self.folder, merged)} if merged else {}
        return {**self.packs, **extra}

    def read_range(self, path: str, at: int, nbytes: int) -> memoryview:
        """Return raw bytes of a pack, unverified. Raises ``CorruptError`` if they end early."""
        name = from_root(self.folder, path)
        data = np.empty(nbytes, dtype=np.uint8)
        with closing(open_listed(self.store, name)) as file:
            got = file.read_into([data.data], at)
        if got != nbytes:
            raise CorruptError(
                f"{self.store.where(name)}: ends after {at + got} bytes, {at + nbytes} are needed; "
                "load another step, or restore the file from a copy"
            )
        return data.data


def _take(spare: list[bytearray], nbytes: int) -> bytearray:
    """Return a buffer of at least ``nbytes``: the smallest spare one that fits, or a new one."""
    fitting = [buffer for buffer in spare if len(buffer) >= nbytes]
    if not fitting:
        return bytearray(nbytes)
    best = min(fitting, key=len)
    spare[:] = [buffer for buffer in spare if buffer is not best]
    return best
