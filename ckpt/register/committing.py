"""The part of a commit that writes the register, and the manifest that names it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from holdfast.ckpt.errors import CorruptError
from holdfast.ckpt.format.columns import read_indexes
from holdfast.ckpt.format.manifest import (
    REGISTER_FORMAT,
    FileRecord,
    Manifest,
    PackIndex,
    RegisterRecord,
    WriterRecord,
    read_manifest,
    with_writers,
)
from holdfast.ckpt.format.sealed import seal
from holdfast.ckpt.format.wellformed import fault_of_aliases
from holdfast.ckpt.register.writing import RegisterBuilder
from holdfast.ckpt.store.base import Store
from holdfast.ckpt.store.parallel import parallel

_THREADS: Final = 32
_QUICK_S: Final = 0.3e-3
"""If a file takes longer, the store has each reader wait, so many threads read ahead."""

_GROUP: Final = 32
_GROUP_BYTES: Final = 256 << 10
"""The indexes that one thread loads, and that are parsed together, have about so many bytes."""


def write_register(
    store: Store,
    folder: str,
    writers: Sequence[WriterRecord],
    *,
    path: str,
    load: Callable[[WriterRecord], bytes],
    parse: Callable[[WriterRecord, bytes], PackIndex],
    mesh: Mapping[str, int],
    created_by: Mapping[str, str],
) -> tuple[Manifest, bytes]:
    """Write the register of ``writers`` at ``path`` in a step's ``folder``.

    ``load`` returns the bytes of a writer's index; several threads call it. ``parse`` reads and
    checks them. Returns the manifest with the writers, and its bytes without them, which are yet to
    be published. Raises ``CorruptError`` unless the indexes together hold every tensor exactly
    once.
    """
    origin = store.where(folder)
    with RegisterBuilder(origin=origin) as register:
        for records, files in _loaded(writers, load):
            columns = read_indexes(records, files, read=parse)
            register.add(records, columns)
        nbytes = store.write(f"{folder}/{path}", register.parts())
    index = columns.indexes[0]
    if fault := fault_of_aliases(register.tensors, register.aliases):
        raise CorruptError(f"{origin}: {fault}; nothing was committed: save again")
    head = Manifest(
        format=REGISTER_FORMAT,
        run=index.run,
        step=index.step,
        generation=index.generation,
        world_size=index.world_size,
        mesh=dict(mesh),
        tensors=register.tensors,
        values=register.values,
        aliases=register.aliases,
        writers=(),
        merged=None,
        refs=None,
        created_by=dict(created_by),
        register=RegisterRecord(
            file=FileRecord(path=path, nbytes=nbytes, crc32c=register.checksum),
            root=register.root,
            chunks=register.chunks,
        ),
    )
    data = seal(head)
    return with_writers(read_manifest(data, origin=origin), writers, origin=origin), data


def _loaded(
    writers: Sequence[WriterRecord], load: Callable[[WriterRecord], bytes]
) -> Iterator[tuple[Sequence[WriterRecord], list[bytes]]]:
    """Yield writers in groups, with the bytes of their indexes.

    Threads that read a quick disk would only take the interpreter from the parsing.
    """

    def loaded(records: Sequence[WriterRecord]) -> tuple[Sequence[WriterRecord], list[bytes]]:
        return records, [load(record) for record in records]

    groups = _groups(writers)
    began_s = time.perf_counter()
    first = loaded(next(groups))
    is_quick = time.perf_counter() - began_s < _QUICK_S * len(first[0])
    yield first
    yield from map(loaded, groups) if is_quick else parallel(loaded, groups, threads=_THREADS)


def _groups(writers: Sequence[WriterRecord]) -> Iterator[Sequence[WriterRecord]]:
    """Yield writers together, few enough that threads share the rest."""
    start = size = 0
    for number, record in enumerate(writers):
        size += record.index.nbytes
        if size >= _GROUP_BYTES or number + 1 - start == _GROUP:
            yield writers[start : number + 1]
            start, size = number + 1, 0
    if start < len(writers):
        yield writers[start:]
