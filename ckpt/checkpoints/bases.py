"""References to unchanged tensors of an earlier step, which need not be written again.

A chunk counts as unchanged when dtype, shape, box, codec, CRC32C *and* CRC64 are those of the base:
two different polynomials, so together a checksum of 96 bits. References lead to the pack where the
bytes lie, never to another reference, so no chain has to be followed.

Savers and removers do not lock each other out; each publishes its intent before it checks. A saver
writes its index, which names the packs it refers to, and then makes sure that the base is still
committed unchanged. A remover removes the base's manifest, and then looks for references, also in
the indexes of unfinished saves. In any order, one of them sees the other.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from hashlib import sha256
from typing import Final

import msgspec

from holdfast.ckpt.checkpoints.catalog import (
    check_size,
    folders,
    load_index,
    load_manifest,
    load_writer,
    noted,
    step_folder,
)
from holdfast.ckpt.errors import CorruptError, NotFoundError, StoreError
from holdfast.ckpt.format.manifest import (
    MANIFEST,
    REGISTER_ENDING,
    BaseStep,
    FileRecord,
    WriterRecord,
    from_root,
    read_index,
    read_manifest,
)
from holdfast.ckpt.format.pack import Bases
from holdfast.ckpt.store.base import Store

_log = logging.getLogger(__name__)

_ATTEMPTS: Final = 5


def known_chunks(
    store: Store, step: int, *, writer: int, into: int
) -> tuple[BaseStep | None, Bases]:
    """Return the chunks that ``writer`` had in ``step``, with the pack of each one.

    Returns none where the step had fewer writers. Chunks in the folder of step ``into``, which is
    to be saved, are left out: no step refers to itself. Raises ``NotFoundError`` if the step is
    not committed, ``CorruptError`` if it is damaged.
    """
    folder = step_folder(step)
    data = store.read(f"{folder}/{MANIFEST}")
    origin = store.where(f"{folder}/{MANIFEST}")
    manifest = read_manifest(data, origin=origin)
    if manifest.step != step:
        raise CorruptError(
            f"{origin}: the directory contains step {manifest.step}; give it its old name again"
        )
    base = BaseStep(step=step, digest=sha256(data).hexdigest())
    if writer >= manifest.world_size:
        return base, {}
    record = load_writer(store, folder, manifest, writer)
    index = load_index(store, folder, record)
    own = msgspec.structs.replace(record.pack, path=f"../{folder}/{record.pack.path}")
    usable = [file for file in (own, *index.bases) if not _lies_in(file, step_folder(into))]
    for file in usable:
        check_size(store, folder, file)
    return base, {
        (fqn, chunk.box): (file, tensor, chunk)
        for fqn, tensor in index.tensors.items()
        for chunk in tensor.chunks
        if chunk.crc64 is not None
        and (file := own if chunk.base is None else index.bases[chunk.base]) in usable
    }


def _lies_in(file: FileRecord, folder: str) -> bool:
    return from_root("", file.path).startswith(f"{folder}/")


def require_bases(store: Store, writers: Iterable[WriterRecord], *, origin: str) -> None:
    """Raise ``StoreError`` unless the steps that these writers refer to are unchanged."""
    for base in {record.base for record in writers if record.base is not None}:
        home = step_folder(base.step)
        try:
            found = sha256(store.read(f"{home}/{MANIFEST}")).hexdigest()
        except NotFoundError:
            found = ""
        if found != base.digest:
            raise StoreError(
                f"{origin}: {store.where(home)}, which holds unchanged tensors of this step, was "
                "removed or saved again meanwhile; save again"
            )


def needed_packs(store: Store) -> set[str] | None:
    """Return the names, below the root, of all packs that steps need of other steps.

    Unfinished saves count. Returns None when an index is damaged, so that the needed packs are
    unknown: then nothing may be removed.
    """
    found: set[str] = set()
    for info in folders(store):
        if info.fault:
            _log.warning("no pack of a removed step is deleted for now: %s", info.fault)
            return None
        needed = _needed_by(store, step_folder(info.step))
        if needed is None:
            return None
        found |= needed
    return found


def _needed_by(store: Store, folder: str) -> set[str] | None:
    """Return the packs that one step needs.

    Looks again if the step was saved again meanwhile.
    """
    for _ in range(_ATTEMPTS):
        records: tuple[WriterRecord, ...] = ()
        with contextlib.suppress(NotFoundError, CorruptError):  # then every index there counts
            records = load_manifest(store, folder).records()
        bases = [base for record in records for base in record.bases]
        try:
            settled = {record.index.path for record in records} | {*(noted(store, folder) or ())}
            bases += _unlisted(store, folder, but=settled)
        except NotFoundError:
            continue
        except CorruptError as error:
            _log.warning("no pack of a removed step is deleted for now: %s", error)
            return None
        return {from_root("", base.path) for base in bases}
    return None


def _unlisted(store: Store, folder: str, *, but: set[str]) -> list[FileRecord]:
    """Return the packs to which the indexes of unfinished saves refer."""
    found: list[FileRecord] = []
    for name in store.names(f"{folder}/index"):
        if (path := f"index/{name}") not in but and not name.endswith(REGISTER_ENDING):
            data = store.read(f"{folder}/{path}")
            found += read_index(data, origin=store.where(f"{folder}/{path}")).bases
    return found
