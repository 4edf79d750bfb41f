"""Write a step's packs, then commit them: torch-free, so that sidecars can do it.

Writers may be many processes on many nodes; one of them commits, once it has every receipt. Until
the manifest is published nothing of the step is visible; saving a step again publishes a new
manifest over new files in one rename, and only then removes the old files.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import msgspec

from ckpt import pack
from ckpt.assemble import parts_of
from ckpt.catalog import check_size, load_index, load_manifest, open_store, step_folder
from ckpt.errors import CorruptError, FencedError, NotFoundError, StoreError
from ckpt.index import ShardIndex
from ckpt.manifest import MANIFEST, REFS, Manifest, PackIndex, WriterRecord, seal
from ckpt.merge import MERGED, check_cover, describe, merge
from ckpt.source import PackSource
from ckpt.store.base import Store
from ckpt.types import learn
from ckpt.zarr_view import group_metadata, hierarchy, references

_log = logging.getLogger(__name__)

_FILE: Final = re.compile(r"[a-z0-9]+-g(\d+)-[0-9a-f]+\.(?:pack|json)")


class WriterReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """Proof that one writer's pack and index of a step are durable; JSON, to be sent along."""

    run: str
    generation: int
    step: int
    world_size: int
    files: WriterRecord


def write_pack(
    root: str | Path, *, step: int, index: ShardIndex, payload: memoryview
) -> WriterReceipt:
    """Write one writer's shard of ``step``; every chunk is checked before it is written.

    Writing the same shard again is harmless. Raises ``CorruptError`` when ``payload`` is not what
    ``index`` says, ``StoreError`` when the store refuses.
    """
    index = msgspec.structs.replace(index, step=step)
    return write_parts(
        root,
        index=index,
        payload=lambda ref: payload[ref.chunk.at : ref.chunk.at + ref.chunk.nbytes],
        tag=pack.content_tag(index),
        verify=True,
    )


def new_tag() -> str:
    """Return a tag for the files of one save whose content is not known beforehand."""
    return secrets.token_hex(6)


def write_parts(
    root: str | Path, *, index: ShardIndex, payload: pack.Payload, tag: str, verify: bool
) -> WriterReceipt:
    """Write one writer's shard, asking ``payload`` for one chunk after the other."""
    record = pack.write(
        open_store(root),
        index,
        payload,
        folder=step_folder(index.step),
        stem=_stem(f"{index.writer:05d}", index.generation, tag),
        verify=verify,
    )
    return WriterReceipt(
        run=index.run,
        generation=index.generation,
        step=index.step,
        world_size=index.world_size,
        files=record,
    )


def _stem(name: str, generation: int, tag: str) -> str:
    return f"{name}-g{generation}-{tag}"


def commit(
    root: str | Path,
    *,
    run: str,
    step: int,
    generation: int,
    receipts: Sequence[WriterReceipt],
    mesh: Mapping[str, int],
) -> None:
    """Publish a step whose packs are all written; atomic, and harmless to repeat.

    Raises ``CorruptError`` unless the packs hold every tensor exactly once, ``FencedError`` when a
    newer generation of the run has committed this step, ``StoreError`` when the store refuses.
    """
    store, folder = open_store(root), step_folder(step)
    origin = store.where(folder)
    writers = _writers(receipts, run=run, step=step, generation=generation, origin=origin)
    with store.locked(folder):
        before = _standing(store, folder)
        if before is not None:
            _fence(before, run=run, generation=generation, origin=origin)
            if (before.run, before.generation, before.writers) == (run, generation, writers):
                _tidy(store, folder, before)
                return
        packs = {record.writer: load_index(store, folder, record) for record in writers}
        for record in writers:
            check_size(store, folder, record.pack)
        manifest = _describe(store, folder, packs, writers=writers, mesh=mesh)
        _publish(store, folder, manifest, replaces=before is not None)
        _tidy(store, folder, manifest)


def _writers(
    receipts: Sequence[WriterReceipt], *, run: str, step: int, generation: int, origin: str
) -> tuple[WriterRecord, ...]:
    for receipt in receipts:
        if (receipt.run, receipt.step, receipt.generation) != (run, step, generation):
            raise CorruptError(
                f"{origin}: a receipt of run {receipt.run!r} step {receipt.step} generation "
                f"{receipt.generation} cannot be committed with run {run!r} step {step} "
                f"generation {generation}; save again"
            )
    sizes = {receipt.world_size for receipt in receipts}
    found = sorted(receipt.files.writer for receipt in receipts)
    if len(sizes) != 1 or found != list(range(sizes.pop())):
        raise CorruptError(
            f"{origin}: receipts of writers {found} of {[r.world_size for r in receipts]}; every "
            "writer must be there once; save again"
        )
    return tuple(sorted((r.files for r in receipts), key=lambda record: record.writer))


def _standing(store: Store, folder: str) -> Manifest | None:
    """Return the step's present manifest, None where there is none to respect."""
    try:
        return load_manifest(store, folder)
    except (NotFoundError, CorruptError):
        return None


def _fence(before: Manifest, *, run: str, generation: int, origin: str) -> None:
    if before.run == run and before.generation > generation:
        raise FencedError(
            f"{origin}: generation {before.generation} of the run has committed this step, "
            f"generation {generation} may not any more"
        )


def _describe(
    store: Store,
    folder: str,
    packs: Mapping[int, PackIndex],
    *,
    writers: tuple[WriterRecord, ...],
    mesh: Mapping[str, int],
) -> Manifest:
    """Check the packs, add what Zarr needs beside them, and return the manifest."""
    with PackSource(store, folder, packs) as source:
        parts = parts_of(source.indexes(), origin=source.origin)
        check_cover(parts, origin=source.origin)
        tensors = describe(packs.values(), parts)
        first = source.indexes()[0]
        stem = _stem("merged", first.generation, new_tag())
        merged = merge(store, folder, source, tensors, like=first, stem=stem)
    group = group_metadata(run=first.run, step=first.step, values=first.values)
    everything = dict(packs) | ({MERGED: load_index(store, folder, merged)} if merged else {})
    documents, places = hierarchy(tensors, first.aliases, everything, group=group)
    refs = store.write(
        f"{folder}/{REFS}", [references(documents, places, root=store.where(folder))]
    )
    return Manifest(
        run=first.run,
        step=first.step,
        generation=first.generation,
        world_size=first.world_size,
        mesh=dict(mesh),
        tensors=tensors,
        values=first.values,
        aliases=first.aliases,
        writers=writers,
        merged=merged,
        refs=msgspec.structs.replace(refs, path=REFS),
        created_by=_versions(),
    )


def _versions() -> dict[str, str]:
    found = {}
    for name in ("holdfast", "torch"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "unknown"
    return found


def _publish(store: Store, folder: str, manifest: Manifest, *, replaces: bool) -> None:
    """Make the step visible. This is the commit."""
    name, data = f"{folder}/{MANIFEST}", seal(manifest)
    if not replaces and store.create(name, data):
        return
    store.write(name, [data])


def _tidy(store: Store, folder: str, manifest: Manifest) -> None:
    """Remove what older saves of this step left; never a file that may belong to a newer one."""
    try:
        store.delete(_stale(store, folder, manifest))
        for part in ("", "/data", "/index"):
            store.sweep(f"{folder}{part}")
    except StoreError as error:
        _log.warning("step %d is committed, old files of it stay: %s", manifest.step, error)


def _stale(store: Store, folder: str, manifest: Manifest) -> Iterator[str]:
    keep = {record.path for record in manifest.files()}
    for part in ("data", "index"):
        for name in store.names(f"{folder}/{part}"):
            match = _FILE.fullmatch(name)
            old = match is not None and int(match[1]) <= manifest.generation
            if old and f"{part}/{name}" not in keep:
                yield f"{folder}/{part}/{name}"


learn(globals())
