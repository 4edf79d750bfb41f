"""Find every damage in a checkpoint: file by file, then chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

import msgspec

from ckpt.catalog import check_size, load_index, load_manifest, read_record, step_folder
from ckpt.errors import CorruptError, NotFoundError
from ckpt.manifest import MANIFEST, Manifest, WriterRecord
from ckpt.pack import PackReader
from ckpt.store.base import Store


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One damage: the file, and inside a pack the tensor and the offset of its chunk."""

    file: str
    tensor: str | None = None
    offset: int | None = None
    message: str


def faults(
    store: Store, step: int, *, deep: bool, progress: Callable[[int], None] = lambda _: None
) -> Iterator[Fault]:
    """Yield what is damaged. ``deep`` reads every byte; ``progress`` hears of bytes read.

    Raises ``NotFoundError`` where the step was never committed.
    """
    folder = step_folder(step)
    try:
        manifest = load_manifest(store, folder)
        if manifest.step != step:
            raise CorruptError(f"{store.where(folder)}: holds step {manifest.step}")
    except CorruptError as error:
        yield Fault(file=store.where(f"{folder}/{MANIFEST}"), message=str(error))
        return
    try:
        read_record(store, folder, manifest.refs)
    except CorruptError as error:
        yield Fault(file=store.where(f"{folder}/{manifest.refs.path}"), message=str(error))
    for record in _writers(manifest):
        yield from _faults_of(store, folder, record, deep=deep, progress=progress)


def _writers(manifest: Manifest) -> tuple[WriterRecord, ...]:
    return (*manifest.writers, *((manifest.merged,) if manifest.merged else ()))


def deep_bytes(store: Store, step: int) -> int:
    """Return how many bytes a deep check reads; 0 where the manifest itself is damaged."""
    try:
        manifest = load_manifest(store, step_folder(step))
    except CorruptError:
        return 0
    return sum(record.pack.nbytes for record in _writers(manifest))


def _faults_of(
    store: Store,
    folder: str,
    record: WriterRecord,
    *,
    deep: bool,
    progress: Callable[[int], None],
) -> Iterator[Fault]:
    pack = f"{folder}/{record.pack.path}"
    try:
        check_size(store, folder, record.pack)
    except CorruptError as error:
        yield Fault(file=store.where(pack), message=str(error))
    try:
        index = load_index(store, folder, record)
    except CorruptError as error:
        yield Fault(file=store.where(f"{folder}/{record.index.path}"), message=str(error))
        return
    if not deep:
        return
    try:
        file = store.open(pack)
    except NotFoundError:
        return  # reported above
    with closing(PackReader(file, index, origin=store.where(pack))) as reader:
        for fqn, tensor in index.tensors.items():
            for chunk in tensor.chunks:
                try:
                    reader.read(fqn, chunk, memoryview(bytearray(chunk.nbytes)))
                except CorruptError as error:
                    yield Fault(
                        file=store.where(pack), tensor=fqn, offset=chunk.at, message=str(error)
                    )
                progress(chunk.nbytes)
