"""The part of a commit that writes the register, and the manifest that names it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from holdfast.ckpt.errors import CorruptError
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

_GROUP: Final = 16
"""The indexes that one thread loads at a time."""

_AHEAD: Final = 2
"""The groups that are loaded beside those that threads are at."""


def write_register(
    store: Store,
    folder: str,
    writers: Sequence[WriterRecord],
    *,
    path: str,
    load: Callable[[WriterRecord], PackIndex],
    threads: int,
    mesh: Mapping[str, int],
    created_by: Mapping[str, str],
) -> tuple[Manifest, bytes]:
    """Write the register of ``writers`` at ``path`` in a step's ``folder``.

    ``load`` returns a writer's index, checked; so many ``threads`` call it. Returns the manifest
    with the writers, and its bytes without them, which are yet to be published. Raises
    ``CorruptError`` unless the indexes together hold every tensor exactly once.
    """
    origin = store.where(folder)
    with RegisterBuilder(origin=origin) as register:
        for record, index in _loaded(writers, load, threads=threads):
            register.add(record, index)
        nbytes = store.write(f"{folder}/{path}", register.parts())
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
    writers: Sequence[WriterRecord], load: Callable[[WriterRecord], PackIndex], *, threads: int
) -> Iterator[tuple[WriterRecord, PackIndex]]:
    """Yield the writers with their indexes; a few threads load some of them ahead."""
    with ThreadPoolExecutor(threads, thread_name_prefix="ckpt-index") as pool:
        ahead: deque[Future[list[PackIndex]]] = deque()
        groups = [writers[at : at + _GROUP] for at in range(0, len(writers), _GROUP)]
        try:
            for number, group in enumerate(groups):
                while len(ahead) < threads + _AHEAD and number + len(ahead) < len(groups):
                    following = groups[number + len(ahead)]
                    ahead.append(pool.submit(lambda some: list(map(load, some)), following))
                yield from zip(group, ahead.popleft().result(), strict=True)
        finally:
            for future in ahead:
                future.cancel()
