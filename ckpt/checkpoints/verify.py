"""Search for all damage in a checkpoint: file by file, then chunk by chunk, on several threads.

A deep check reads each pack once, in runs small enough to be checksummed while they are in the
cache, into one buffer per thread; adjacent small chunks are read together. Chunks in packs of other
steps, to which the step refers, are checked too.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import msgspec

from holdfast.ckpt.checkpoints.catalog import (
    check_size,
    head_of,
    load_index,
    read_record,
    register_of,
    step_folder,
    whole,
)
from holdfast.ckpt.errors import CorruptError, NotFoundError
from holdfast.ckpt.format.coherence import check_packs, fault_of_listing
from holdfast.ckpt.format.manifest import (
    MANIFEST,
    Manifest,
    PackedChunk,
    PackedTensor,
    PackIndex,
    WriterRecord,
    from_root,
    path_of,
    stored_bytes,
)
from holdfast.ckpt.format.unpack import ChunkReader, Pack, ends_of
from holdfast.ckpt.geometry.layout import Box
from holdfast.ckpt.native import crc, isal
from holdfast.ckpt.store.base import Store
from holdfast.ckpt.store.parallel import parallel
from holdfast.ckpt.types import learn

Progress: TypeAlias = Callable[[int], None]

THREADS: Final = 4
_TASK_BYTES: Final = 8 << 20


class Damage(msgspec.Struct, frozen=True, kw_only=True):
    """One damage: the file, and inside a pack the tensor, the chunk's box and its offset."""

    file: str
    tensor: str | None = None
    chunk: Box | None = None
    offset: int | None = None
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredChunk:
    """A chunk of an index, and the name of its pack."""

    pack: str
    fqn: str
    tensor: PackedTensor
    chunk: PackedChunk

    @property
    def nbytes(self) -> int:
        """The chunk's bytes in the pack, without its checksum."""
        return stored_bytes(self.chunk, self.tensor)


@dataclass(slots=True, kw_only=True)
class Examination:
    """The faults that a quick check of a step found, and the chunks for a deep check to read."""

    faults: list[Damage] = field(default_factory=list)
    chunks: list[StoredChunk] = field(default_factory=list)
    ends: dict[str, dict[int, int]] = field(default_factory=dict)
    """Per pack of the step itself, the end of each chunk including the zeros behind it."""

    @property
    def nbytes(self) -> int:
        """The bytes that a deep check reads."""
        return sum(stored.nbytes for stored in self.chunks)

    @contextlib.contextmanager
    def noting(self, file: str) -> Iterator[None]:
        """Record a ``CorruptError`` about ``file`` as a fault."""
        try:
            yield
        except CorruptError as error:
            self.faults.append(Damage(file=file, message=str(error)))


def examine(store: Store, step: int) -> Examination:
    """Check manifest, indexes, reference map and the sizes of all files of a step.

    Raises ``NotFoundError`` if the step was never committed.
    """
    folder, found = step_folder(step), Examination()
    with found.noting(store.where(f"{folder}/{MANIFEST}")):
        manifest = head_of(store, step)
    if found.faults:
        return found
    listed: dict[int, PackIndex] = {}
    if manifest.register is not None:
        with found.noting(store.where(f"{folder}/{manifest.register.file.path}")):
            register = register_of(store, folder, manifest)
            register.check()
            manifest, listed = whole(manifest, register), register.packs(None)
        if found.faults:
            return found
    if manifest.refs is not None:
        with found.noting(store.where(f"{folder}/{manifest.refs.path}")):
            read_record(store, folder, manifest.refs)
    for base in manifest.bases().values():
        with found.noting(store.where(from_root(folder, base.path))):
            check_size(store, folder, base)
    packs: dict[int, PackIndex] = {}
    for record in manifest.records():
        _examine_writer(store, folder, record, found, packs)
    if all(record.writer in packs for record in manifest.writers):
        origin = store.where(f"{folder}/{MANIFEST}")
        with found.noting(origin):
            writers = {record.writer: packs[record.writer] for record in manifest.writers}
            check_packs(manifest, writers, origin=origin)
    _compare(manifest, listed, packs, found, store.where(f"{folder}/"))
    return found


def _compare(
    manifest: Manifest,
    listed: Mapping[int, PackIndex],
    packs: Mapping[int, PackIndex],
    found: Examination,
    where: str,
) -> None:
    """Compare the register, if there is one, with the indexes that are not damaged."""
    if (register := manifest.register) is None:
        return
    origin = f"{where}{register.file.path}"
    for writer, own in packs.items():
        with found.noting(origin):
            if fault := fault_of_listing(listed[writer], own):
                raise CorruptError(f"{origin}: {fault}; load another step, or save again")


def _examine_writer(
    store: Store,
    folder: str,
    record: WriterRecord,
    found: Examination,
    packs: dict[int, PackIndex],
) -> None:
    """Check a writer's files; add its index to ``packs`` unless that is damaged."""
    with found.noting(store.where(f"{folder}/{record.pack.path}")):
        check_size(store, folder, record.pack)
    with found.noting(store.where(f"{folder}/{record.index.path}")):
        index = packs[record.writer] = load_index(store, folder, record)
        found.ends[f"{folder}/{index.pack}"] = ends_of(index)
        found.chunks += [
            StoredChunk(
                pack=from_root(folder, path_of(chunk, index)), fqn=fqn, tensor=tensor, chunk=chunk
            )
            for fqn, tensor in index.tensors.items()
            for chunk in tensor.chunks
        ]


def faults(
    store: Store,
    step: int,
    *,
    deep: bool,
    threads: int = THREADS,
    progress: Progress = lambda _: None,
) -> Iterator[Damage]:
    """Yield all damage. ``deep`` reads every byte; ``progress`` is called with the bytes read.

    Raises ``NotFoundError`` if the step was never committed.
    """
    found = examine(store, step)
    yield from found.faults
    if deep:
        yield from deep_faults(store, found, threads=threads, progress=progress)


def deep_faults(
    store: Store,
    found: Examination,
    *,
    threads: int = THREADS,
    progress: Progress = lambda _: None,
) -> Iterator[Damage]:
    """Read all chunks of ``found`` and yield those that are damaged, pack by pack, in order."""
    rooms = threading.local()
    with contextlib.ExitStack() as opened:
        tasks: list[tuple[Pack, list[StoredChunk]]] = []
        for name, chunks in _by_pack(found.chunks).items():
            try:
                file = store.open(name)
            except NotFoundError:
                continue  # the check of its size has recorded this fault already
            pack = Pack(file, origin=store.where(name), ends=found.ends.get(name, {}))
            opened.callback(pack.close)
            tasks += [(pack, task) for task in _tasks(chunks)]

        def check(task: tuple[Pack, list[StoredChunk]]) -> list[Damage]:
            wanted = max(task[0].file.run_bytes // crc.BLOCK_BYTES, 1) * crc.BLOCK_BYTES
            if len(getattr(rooms, "room", b"")) < wanted:
                rooms.room = memoryview(bytearray(wanted))
            bad = _check(*task, room=rooms.room)
            progress(sum(stored.nbytes for stored in task[1]))
            return bad

        for bad in parallel(check, tasks, threads=threads):
            yield from bad


def _by_pack(chunks: Sequence[StoredChunk]) -> dict[str, list[StoredChunk]]:
    """Return the chunks of each pack in the order of their offsets."""
    packs: dict[str, list[StoredChunk]] = {}
    for stored in sorted(chunks, key=lambda stored: stored.chunk.at):
        packs.setdefault(stored.pack, []).append(stored)
    return packs


def _tasks(chunks: Sequence[StoredChunk]) -> Iterator[list[StoredChunk]]:
    """Yield groups of chunks, each checked by one thread."""
    task: list[StoredChunk] = []
    nbytes = 0
    for stored in chunks:
        task.append(stored)
        nbytes += stored.nbytes
        if nbytes >= _TASK_BYTES:
            yield task
            task, nbytes = [], 0
    if task:
        yield task


def _check(pack: Pack, chunks: Sequence[StoredChunk], *, room: memoryview) -> list[Damage]:
    """Check chunks in the order of their offsets; neighbours that fit ``room`` are read at once."""
    found: list[Damage] = []
    checkers = [ChunkChecker(pack, stored) for stored in chunks]
    address = isal.address_of(room)
    for group in _neighbours(checkers, room.nbytes):
        first, end = group[0].at, group[-1].at + group[-1].extent
        data = room[: end - first] if len(group) > 1 else room[:0]
        if data and pack.file.read_into([data], first) < data.nbytes:
            data = room[:0]  # the file ends here: check each chunk by itself
        for checker in group:
            start = checker.at - first
            try:
                if data:
                    checker.check_bytes(data[start : start + checker.extent], address + start)
                else:
                    checker.check(room)
            except CorruptError as error:
                found.append(checker.fault(str(error)))
    return found


def _neighbours(checkers: Sequence[ChunkChecker], most_bytes: int) -> Iterator[list[ChunkChecker]]:
    """Yield groups of adjacent, unchanged chunks that fit in ``most_bytes`` together."""
    group: list[ChunkChecker] = []
    nbytes = 0
    for checker in checkers:
        joins = checker.direct and nbytes + checker.extent <= most_bytes
        if group and not (
            joins and group[-1].direct and checker.at == group[-1].at + group[-1].extent
        ):
            yield group
            group, nbytes = [], 0
        group.append(checker)
        nbytes += checker.extent
    if group:
        yield group


class ChunkChecker(ChunkReader):
    """Checks a chunk, and the bytes behind it up to the next one, without keeping its bytes."""

    def __init__(self, pack: Pack, stored: StoredChunk) -> None:
        super().__init__(pack, stored.fqn, stored.tensor, stored.chunk)
        self.at = stored.chunk.at
        self.extent = self._extent()
        """The chunk's length with its checksum and the zeros behind it."""
        self.direct = self._in_one_run()
        """True if its bytes lie in the pack unchanged."""

    def fault(self, message: str) -> Damage:
        """Return its damage as a value."""
        return Damage(
            file=self._pack.origin,
            tensor=self._fqn,
            chunk=self._chunk.box,
            offset=self._chunk.at,
            message=message,
        )

    def check_bytes(self, data: memoryview, address: int) -> None:
        """Check the ``extent`` bytes of the chunk, at ``address``. Raises ``CorruptError``."""
        nbytes = self._chunk.nbytes
        if blocks := self._blocks():
            self._compare(crc.block_checksums(address, nbytes), blocks, 0)
        found = self._chunk.crc32c if blocks else isal.crc32c_at(address, nbytes)
        self._finish(found, data[nbytes:])

    def check(self, room: memoryview) -> None:
        """Read and check the whole chunk through ``room``. Raises ``CorruptError``.

        ``room`` is a multiple of `holdfast.ckpt.native.crc.BLOCK_BYTES`. A compressed chunk, and
        one padded inside its rows, takes its own size in memory.
        """
        if not self.direct:
            self._unpacked(None)
            return
        blocks, address, found = self._blocks(), isal.address_of(room), 0
        nbytes, tail = self._chunk.nbytes, memoryview(bytearray(self.extent - self._chunk.nbytes))
        for at in range(0, nbytes, room.nbytes):
            size = min(room.nbytes, nbytes - at)
            parts = [room[:size], tail] if at + size == nbytes else [room[:size]]
            self._fill(parts, at, sum(part.nbytes for part in parts))
            if blocks:
                self._compare(crc.block_checksums(address, size), blocks, at)
            else:
                found = isal.crc32c(room[:size], found)
        self._finish(self._chunk.crc32c if blocks else found, tail)


learn(globals())
