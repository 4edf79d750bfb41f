"""Ranged reads of a register: the writers, the chunks and the values that a reader wants."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Final, NoReturn, TypeVar

import msgspec
import numpy as np

from holdfast.ckpt.errors import CorruptError
from holdfast.ckpt.format import codecs
from holdfast.ckpt.format.manifest import (
    FORMAT,
    BlockRecord,
    Manifest,
    PackedChunk,
    PackedTensor,
    PackIndex,
    RegisterRecord,
    WriterRecord,
    fault_of_chunk,
)
from holdfast.ckpt.format.wellformed import fault_of_shape, fault_of_values
from holdfast.ckpt.geometry.element_types import dtype_of
from holdfast.ckpt.geometry.shard_index import owner_of
from holdfast.ckpt.native.isal import crc32c
from holdfast.ckpt.register.records import (
    CHUNKS,
    CODEC,
    MOST_BLOCK_BYTES,
    NO_NAME,
    PAGE,
    ROOT,
    VALUES,
    WRITERS,
    Corner,
    ListedBlock,
    ListedChunk,
    Named,
    RankValue,
    RegisterRoot,
    Want,
    is_wanted,
    needed,
    numbers,
)
from holdfast.ckpt.store.base import Readable
from holdfast.ckpt.types import Json

_THREADS: Final = 8
_FEW: Final = 4
"""So many ranges are read one after the other."""

_RUN_BYTES: Final = 4 << 20
"""Neighbouring blocks are read together up to this size."""

_Item = TypeVar("_Item")
_Parts = dict[str, list[ListedChunk]]


class Register:
    """The register of a step; opening it reads the root. Safe to share between threads.

    ``open_file`` opens the file anew for each question. Raises ``CorruptError``, which names the
    file and the block, for bytes that are not those that were written.
    """

    def __init__(
        self, manifest: Manifest, open_file: Callable[[], Readable], *, origin: str
    ) -> None:
        assert manifest.register is not None
        self._manifest, self._open_file, self.origin = manifest, open_file, origin
        self.record: RegisterRecord = manifest.register
        self.bytes_read = 0
        """The bytes that were read of the file so far."""
        with closing(open_file()) as file:
            if file.nbytes != self.record.file.nbytes:
                raise CorruptError(
                    f"{origin}: {file.nbytes} bytes, {self.record.file.nbytes} were written: it "
                    "was cut off or changed; load another step, or restore the file from a copy"
                )
            (body,) = self._bodies(file, [self.record.root])
        self._root: RegisterRoot = self._decoded(ROOT, body, self.record.root)

    @property
    def ranks(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """Per path of values that belong to one rank: the ranges of ranks that have one."""
        return self._root.ranks

    def check(self) -> None:
        """Read the whole file and compare its checksum with that in the manifest."""
        found, room = 0, memoryview(bytearray(_RUN_BYTES))
        with closing(self._open_file()) as file:
            for at in range(0, file.nbytes, _RUN_BYTES):
                got = file.read_into([room], at)
                found = crc32c(room[:got], found)
        if found != self.record.file.crc32c:
            raise CorruptError(
                f"{self.origin}: checksum {found:08x}, the manifest has "
                f"{self.record.file.crc32c:08x}; load another step, or restore the file from a copy"
            )

    # -- records ---------------------------------------------------------------------------------

    def writers(self, which: Iterable[int] | None = None) -> dict[int, WriterRecord]:
        """Return the records of some writers, or of all, by number."""
        wanted = {*(range(self._manifest.world_size) if which is None else which)}
        found: dict[int, WriterRecord] = {}
        for _, named in self._records(self._root.writers, WRITERS, {NO_NAME: numbers(wanted)}):
            found |= {each.writer: each for each in named.records if each.writer in wanted}
        if lacking := sorted(wanted - found.keys()):
            raise CorruptError(f"{self.origin}: lists no writers {lacking[:20]}; load another step")
        return dict(sorted(found.items()))

    def trees(self, path: str, ranks: Iterable[int] | None = None) -> dict[int, RankValue]:
        """Return the values of one path that belong to some ranks, or to all, by rank."""
        if ranks is None:
            spans = self.ranks.get(path, ())
            ranks = [rank for low, high in spans for rank in range(low, high)]
        wanted = [*ranks]
        found = {value.rank: value for value in self._values({path: numbers(wanted)})}
        if lacking := sorted({*wanted} - found.keys()):
            raise CorruptError(
                f"{self.origin}: lists no value {path} of ranks {lacking[:20]}; load another step"
            )
        return found

    def packs(self, want: Want | None) -> dict[int, PackIndex]:
        """Return what the wanted boxes of tensors need of each writer's index; None: all of it.

        ``values`` and ``aliases`` are those of the manifest, at the first writer of a whole. A
        writer of a part has neither them nor values of ranks.
        """
        parts: dict[int, _Parts] = {}
        for place, named in self._records(self._root.chunks, CHUNKS, want):
            if named.name not in self._manifest.tensors:
                self._refuse(
                    place, f"lists a tensor {named.name!r} that the manifest does not have"
                )
            for listed in named.records:
                if is_wanted(named.name, listed.offset, _end_of(listed), want):
                    own = parts.setdefault(listed.writer, {})
                    own.setdefault(named.name, []).append(listed)
        records = self.writers(parts if want is not None else None)
        found = {
            writer: self._index(record, parts.get(writer, {})) for writer, record in records.items()
        }
        if want is None:
            self._complete(found)
        return found

    def tensors(self, names: Iterable[str]) -> dict[int, PackIndex]:
        """Return what whole tensors need of each writer's index; ``names`` may be tied ones.

        The first of these writers has the tied names, and the tensors without elements. Names that
        were not saved are left out.
        """
        names, aliases, known = {*names}, self._manifest.aliases, self._manifest.tensors
        tied = {name: aliases[name] for name in names if name in aliases}
        stored = {*tied.values(), *(name for name in names if name in known)}
        found = self.packs(dict.fromkeys(stored))
        if not found:
            found = {0: self._index(self.writers([0])[0], {})}
        self._add_names(found, min(found), stored=stored, aliases=tied)
        return found

    def _complete(self, found: dict[int, PackIndex]) -> None:
        """Add the values, and the tensors without elements, that no chunk leads to."""
        manifest, owned = self._manifest, dict[int, dict[str, Json]]()
        for value in self._values(None):
            owned.setdefault(value.writer, {})[value.name] = value.tree
        for writer, trees in owned.items():
            found[writer] = msgspec.structs.replace(found[writer], rank_values=trees)
        found[0] = msgspec.structs.replace(found[0], values=manifest.values)
        self._add_names(found, 0, stored=manifest.tensors, aliases=manifest.aliases)

    def _add_names(
        self,
        found: dict[int, PackIndex],
        writer: int,
        *,
        stored: Iterable[str],
        aliases: dict[str, str],
    ) -> None:
        """Add to a writer the tied names, and those of the tensors that no writer has."""
        held = {fqn for index in found.values() for fqn in index.tensors}
        records = {fqn: self._manifest.tensors[fqn] for fqn in stored if fqn not in held}
        empty = {
            fqn: PackedTensor(dtype=record.dtype, shape=record.shape, cell=record.cell, chunks=())
            for fqn, record in records.items()
        }
        found[writer] = msgspec.structs.replace(
            found[writer], tensors=found[writer].tensors | empty, aliases=aliases
        )

    def _index(self, record: WriterRecord, parts: _Parts) -> PackIndex:
        """Return a writer's index with some of its chunks, each of them checked."""
        manifest = self._manifest
        index = PackIndex(
            format=FORMAT,
            run=manifest.run,
            step=manifest.step,
            generation=manifest.generation,
            writer=record.writer,
            world_size=manifest.world_size,
            pack=record.pack.path,
            pack_bytes=record.pack.nbytes,
            tensors={fqn: self._tensor(fqn, listed) for fqn, listed in parts.items()},
            bases=record.bases,
        )
        for fqn, tensor in index.tensors.items():
            itemsize = dtype_of(tensor.dtype, origin=f"{self.origin}: tensor {fqn}").itemsize
            fault = fault_of_shape(tensor.shape, tensor.cell, itemsize=itemsize)
            faults = (fault_of_chunk(chunk, tensor, itemsize, index) for chunk in tensor.chunks)
            if fault := fault or next(filter(None, faults), None):
                raise CorruptError(
                    f"{self.origin}: tensor {fqn}: a chunk of writer {record.writer}: {fault}; "
                    "load another step"
                )
        return index

    def _tensor(self, fqn: str, listed: Sequence[ListedChunk]) -> PackedTensor:
        record = self._manifest.tensors[fqn]
        cells = {each.cell for each in listed if each.cell is not None}
        chunks: list[PackedChunk] = []
        try:
            chunks = sorted((each.packed() for each in listed), key=lambda chunk: chunk.at)
        except ValueError as error:
            raise CorruptError(
                f"{self.origin}: tensor {fqn}: {error}; load another step"
            ) from error
        if len(cells) > 1:
            raise CorruptError(
                f"{self.origin}: tensor {fqn}: one writer padded it to {sorted(cells)}; load "
                "another step"
            )
        return PackedTensor(
            dtype=record.dtype,
            shape=record.shape,
            cell=next(iter(cells), record.cell),
            chunks=tuple(chunks),
            codec=record.codec,
        )

    def _values(self, want: Want | None) -> Iterator[RankValue]:
        for place, named in self._records(self._root.values, VALUES, want):
            for value in named.records:
                if owner_of(value.name, writer=value.writer) != (named.name, value.rank):
                    self._refuse(place, f"{value.name!r} is no value {named.name!r}")
                if not 0 <= value.writer < self._manifest.world_size:
                    self._refuse(place, f"{value.name!r} is of writer {value.writer}")
                if fault := fault_of_values({value.name: value.tree}):
                    self._refuse(place, fault)
                if is_wanted(named.name, (value.rank,), (value.rank + 1,), want):
                    yield value

    # -- blocks ----------------------------------------------------------------------------------

    def _records(
        self,
        pages: Sequence[ListedBlock],
        decoder: msgspec.json.Decoder[tuple[Named[_Item], ...]],
        want: Want | None,
    ) -> Iterator[tuple[BlockRecord, Named[_Item]]]:
        """Yield the records, by name, of the blocks that may hold wanted ones."""
        with closing(self._open_file()) as file:
            some = [page.place for page in needed(pages, want)]
            for page, body in zip(some, self._bodies(file, some), strict=True):
                listed = self._decoded(PAGE, body, page)
                blocks = [block.place for block in needed(listed, want)]
                for block, data in zip(blocks, self._bodies(file, blocks), strict=True):
                    for named in self._decoded(decoder, data, block):
                        if want is None or named.name in want:
                            yield block, named

    def _bodies(self, file: Readable, places: Sequence[BlockRecord]) -> Iterator[memoryview]:
        """Yield the decompressed bytes of blocks, in order; neighbours are read at once."""
        runs = list(self._runs(places))
        self.bytes_read += sum(place.stored for place in places)
        if len(runs) <= _FEW:
            for run in runs:
                yield from self._read(file, run)
            return
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="ckpt-register") as pool:
            for at in range(0, len(runs), 2 * _THREADS):
                some = runs[at : at + 2 * _THREADS]
                for found in pool.map(lambda run: self._read(file, run), some):
                    yield from found

    def _runs(self, places: Sequence[BlockRecord]) -> Iterator[list[BlockRecord]]:
        """Yield blocks that follow each other in the file."""
        run: list[BlockRecord] = []
        size = 0
        for place in places:
            if not 0 < place.stored <= self.record.file.nbytes - place.at or place.at < 0:
                self._refuse(place, "lies outside of the file")
            if not 0 < place.nbytes <= MOST_BLOCK_BYTES:
                self._refuse(place, f"cannot have {place.nbytes} bytes")
            follows = run and place.at == run[-1].at + run[-1].stored
            if run and (not follows or size + place.stored > _RUN_BYTES):
                yield run
                run, size = [], 0
            run.append(place)
            size += place.stored
        if run:
            yield run

    def _read(self, file: Readable, run: Sequence[BlockRecord]) -> list[memoryview]:
        """Return the decompressed bytes of blocks that follow each other."""
        start, end = run[0].at, run[-1].at + run[-1].stored
        data = np.empty(end - start, dtype=np.uint8).data
        got = file.read_into([data], start)
        found = []
        for place in run:
            stored = data[place.at - start : place.at - start + place.stored]
            if got < place.at - start + place.stored:
                self._refuse(place, f"the file ends after {start + got} bytes")
            if (value := crc32c(stored)) != place.crc32c:
                self._refuse(place, f"checksum {value:08x}, {place.crc32c:08x} was written")
            try:
                found.append(codecs.decode(CODEC, stored, nbytes=place.nbytes))
            except CorruptError as error:
                self._refuse(place, str(error))
        return found

    def _decoded(
        self, decoder: msgspec.json.Decoder[_Item], body: memoryview, place: BlockRecord
    ) -> _Item:
        try:
            return decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError, RecursionError) as error:
            self._refuse(place, f"not what a register has there: {error}")

    def _refuse(self, place: BlockRecord, found: str) -> NoReturn:
        raise CorruptError(
            f"{self.origin}: the block of {place.stored} bytes at offset {place.at} was damaged "
            f"({found}); load another step, or restore the file from a copy"
        )


def _end_of(listed: ListedChunk) -> Corner:
    return tuple(o + n for o, n in zip(listed.offset, listed.shape, strict=False))
