"""Write a step's packs, then commit them; without torch, so that sidecars can do it.

Writers may be many processes on many nodes; one of them commits, once it has every receipt. Until
the manifest is published, nothing of the step is visible. To save a step again publishes a new
manifest over new files in one rename, and only then removes the old files.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import msgspec

from holdfast.ckpt.checkpoints import fence, refmap
from holdfast.ckpt.checkpoints.assemble import parts_of
from holdfast.ckpt.checkpoints.attempts import fenced_tags
from holdfast.ckpt.checkpoints.bases import known_chunks, require_bases
from holdfast.ckpt.checkpoints.catalog import (
    check_size,
    load_index,
    noted,
    parse_index,
    read_record,
    register_of,
    run_tag,
    step_folder,
    whole,
    written_by,
)
from holdfast.ckpt.checkpoints.merge import check_cover, describe, merge
from holdfast.ckpt.checkpoints.retention import note, sweep
from holdfast.ckpt.checkpoints.source import PackSource
from holdfast.ckpt.errors import CkptError, CorruptError, FencedError, NotFoundError, StoreError
from holdfast.ckpt.format import codecs, pack
from holdfast.ckpt.format.coherence import check_packs
from holdfast.ckpt.format.manifest import (
    FORMAT,
    MANIFEST,
    MERGED,
    REFS,
    REGISTER_ENDING,
    RETAINED,
    BaseStep,
    FileRecord,
    Manifest,
    PackIndex,
    WriterRecord,
    read_manifest,
)
from holdfast.ckpt.format.sealed import seal
from holdfast.ckpt.format.wellformed import fault_of_aliases
from holdfast.ckpt.format.zarr_metadata import group_metadata
from holdfast.ckpt.geometry.element_types import dtype_of
from holdfast.ckpt.geometry.shard_index import ShardIndex
from holdfast.ckpt.native.isal import crc32c
from holdfast.ckpt.register.committing import write_register
from holdfast.ckpt.store.base import Store
from holdfast.ckpt.store.local import DirectStore, LocalStore
from holdfast.ckpt.store.places import open_store
from holdfast.ckpt.types import learn

_log = logging.getLogger(__name__)

_ATTEMPTS: Final = 5

MANY_WRITERS: Final = 256
"""From this number of writers on, a rank reads its part of a register, not all writers' indexes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackOptions:
    """Options of writing packs: compression by ``compression``, against the earlier step ``base``.

    At most ``ahead_bytes`` are held in memory before they are written. ``threads`` compute
    checksums and compress; with 0 the writing thread does so, for the least processor time.
    ``watch`` is called after every few pieces, and sets the pace. ``around_cache`` keeps bytes for
    a local disk out of the page cache, which is cheaper where they are not read soon. Uncompressed
    bytes are then checksummed as they are written, and never by the threads.
    """

    compression: codecs.Rules = field(default_factory=dict)
    base: int | None = None
    ahead_bytes: int = pack.AHEAD_BYTES
    threads: int = pack.THREADS
    watch: pack.Watch | None = None
    around_cache: bool = False

    def __post_init__(self) -> None:
        codecs.check(self.compression)


PLAIN: Final = PackOptions()


class WriterReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """Proof that one writer's pack and index of a step are durable; JSON, for sending."""

    run: str
    generation: int
    step: int
    world_size: int
    files: WriterRecord


def write_pack(
    root: str | Path,
    *,
    step: int,
    index: ShardIndex,
    payload: memoryview,
    options: PackOptions = PLAIN,
) -> WriterReceipt:
    """Write one writer's shard of ``step``; every chunk is checked before it is published.

    To write the same shard again is harmless. Raises ``CorruptError`` when ``payload`` does not
    match ``index``, ``StoreError`` when the store refuses.
    """
    index = msgspec.structs.replace(index, step=step)
    return write_parts(
        root,
        index=index,
        payload=lambda ref: payload[ref.chunk.at : ref.chunk.at + ref.chunk.nbytes],
        tag=pack.content_tag(index),
        verify=True,
        options=options,
    )


def new_tag() -> str:
    """Return a tag for the files of one save whose content is not known beforehand."""
    return secrets.token_hex(6)


def write_parts(
    root: str | Path,
    *,
    index: ShardIndex,
    payload: pack.Payload,
    tag: str,
    verify: bool,
    options: PackOptions = PLAIN,
) -> WriterReceipt:
    """Write one writer's shard, calling ``payload`` for one chunk after the other."""
    store, folder = open_store(root), step_folder(index.step)
    base, known = _known(store, index, options.base)
    writer = pack.PackWriter(
        index,
        payload,
        verify=verify,
        codecs=_codecs(index, options.compression),
        bases=known,
        ahead_bytes=options.ahead_bytes,
        threads=options.threads,
    )
    stem = _fresh_stem(store, folder, index, tag=tag)
    if options.around_cache and isinstance(store, LocalStore):
        store = DirectStore(store.root)
    files = pack.write(store, writer, index, folder=folder, stem=stem, watch=options.watch)
    if files.bases:
        files = msgspec.structs.replace(files, base=base)
    return WriterReceipt(
        run=index.run,
        generation=index.generation,
        step=index.step,
        world_size=index.world_size,
        files=files,
    )


def _codecs(index: ShardIndex, rules: codecs.Rules) -> dict[str, codecs.Codec | None]:
    return {
        fqn: codecs.choose(rules, fqn, itemsize=dtype_of(entry.dtype, origin=fqn).itemsize)
        for fqn, entry in (index.tensors.items() if rules else ())
    }


def _known(store: Store, index: ShardIndex, step: int | None) -> tuple[BaseStep | None, pack.Bases]:
    """Return the base's chunks; without a readable base nothing is saved, and nothing is lost."""
    if step is None or step == index.step:
        return None, {}
    try:
        return known_chunks(store, step, writer=index.writer, into=index.step)
    except (NotFoundError, CorruptError) as error:
        _log.warning("step %d is saved in full: %s", index.step, error)
        return None, {}


def _fresh_stem(store: Store, folder: str, index: ShardIndex, *, tag: str) -> str:
    """Return a stem that is not noted for removal there, or its files would be removed too."""
    going = noted(store, folder) or ()
    while True:
        stem = _stem(f"{index.writer:05d}", index.run, index.generation, tag=tag)
        if f"data/{stem}.pack" not in going:
            return stem
        tag = sha256(tag.encode()).hexdigest()[:12]


def _stem(name: str, run: str, generation: int, *, tag: str) -> str:
    return f"{name}-g{generation}-{run_tag(run)}-{tag}"


def commit(
    root: str | Path,
    *,
    run: str,
    step: int,
    generation: int,
    receipts: Sequence[WriterReceipt],
    mesh: Mapping[str, int],
    right: fence.RightToPublish | None = None,
    register_from: int = MANY_WRITERS,
) -> None:
    """Publish a step whose packs are all written; atomic, and harmless to repeat.

    From ``register_from`` writers on, a register lists their chunks (`holdfast.ckpt.register`), and
    there is no reference map. A ``right`` to publish is compared with the root's fence. Raises
    ``CorruptError`` unless the packs hold every tensor exactly once, ``FencedError`` when a newer
    generation of the run has committed this step or a newer run has taken the fence, ``StoreError``
    when the store refuses.
    """
    store, folder = open_store(root), step_folder(step)
    writers = _writers(
        receipts, run=run, step=step, generation=generation, origin=store.where(folder)
    )
    try:
        for _ in range(_ATTEMPTS):
            if _published(
                store,
                folder,
                writers,
                run=run,
                generation=generation,
                mesh=mesh,
                right=right,
                register_from=register_from,
            ):
                return
        raise StoreError(
            f"{store.where(folder)}: {_ATTEMPTS} times another process committed first; let one "
            "process at a time save a step"
        )
    except CkptError:
        refmap.heal(store, folder)
        raise


def _published(
    store: Store,
    folder: str,
    writers: tuple[WriterRecord, ...],
    *,
    run: str,
    generation: int,
    mesh: Mapping[str, int],
    right: fence.RightToPublish | None,
    register_from: int,
) -> bool:
    """Publish the step, unless another saver is quicker; say whether it is published."""
    origin = store.where(folder)
    before, version = _standing(store, folder)
    if right is not None:  # after the step was read: one that a newer run writes now stays
        fence.require(store, right)
    if before is not None and before.run == run:
        if before.generation > generation:
            _withdraw(store, folder, writers, generation=generation, winner=before)
            raise FencedError(
                f"{origin}: generation {before.generation} of the run has committed this step, "
                f"so generation {generation} may not commit it"
            )
        if (before.generation, before.writers) == (generation, writers):
            _settle(store, folder, before)
            return True
    if len(writers) >= register_from:
        manifest, data = _registered(
            store, folder, writers, run=run, generation=generation, mesh=mesh
        )
    else:
        packs = _written(store, folder, writers)
        manifest = _describe(store, folder, packs, writers=writers, mesh=mesh)
        data = seal(manifest)
        check_packs(read_manifest(data, origin=origin), packs, origin=origin)
    if before is not None:
        kept = {file.path for file in manifest.files()}
        note(store, folder, (file.path for file in before.files() if file.path not in kept))
    if right is not None:
        fence.require(store, right)  # the description may have taken long
    if not store.replace(f"{folder}/{MANIFEST}", data, expected=version):
        return False
    _settle(store, folder, manifest)
    return True


def _written(store: Store, folder: str, writers: Sequence[WriterRecord]) -> dict[int, PackIndex]:
    """Return the indexes, after checking that all files they need exist, and stay."""
    origin = store.where(folder)
    _require_kept(store, folder, writers)
    for record in writers:
        _require_visible(store, folder, record)
    packs = {record.writer: load_index(store, folder, record) for record in writers}
    for record in writers:
        for file in (record.pack, *record.bases):
            check_size(store, folder, file)
    require_bases(store, writers, origin=origin)
    return packs


def _require_kept(store: Store, folder: str, writers: Sequence[WriterRecord]) -> None:
    going = noted(store, folder) or ()
    if gone := sorted({record.pack.path for record in writers} & {*going}):
        raise StoreError(
            f"{store.where(folder)}: it was just removed, with {gone[:20]}; save again"
        )


def _require_visible(store: Store, folder: str, record: WriterRecord) -> None:
    if store.size(f"{folder}/{record.index.path}") is None:
        raise StoreError(
            f"{store.where(folder)}: {record.index.path}, which writer {record.writer} wrote, is "
            "not visible here; give all ranks one root that all of them can read"
        )


def _registered(
    store: Store,
    folder: str,
    writers: tuple[WriterRecord, ...],
    *,
    run: str,
    generation: int,
    mesh: Mapping[str, int],
) -> tuple[Manifest, bytes]:
    """Write the register; return the manifest, with the writers, and its bytes, without them."""
    _require_kept(store, folder, writers)

    def load(record: WriterRecord) -> bytes:
        try:
            data = read_record(store, folder, record.index)
        except CorruptError:
            _require_visible(store, folder, record)
            raise
        for file in (record.pack, *record.bases):
            check_size(store, folder, file)
        return data

    stem = _stem_of("register", writers, generation, run=run)
    manifest, data = write_register(
        store,
        folder,
        writers,
        path=f"index/{stem}{REGISTER_ENDING}",
        load=load,
        parse=partial(parse_index, store, folder),
        mesh=mesh,
        created_by=_versions(),
    )
    require_bases(store, writers, origin=store.where(folder))
    return manifest, data


def _settle(store: Store, folder: str, manifest: Manifest) -> None:
    """Remove files that the published step replaced; repair the reference map of another saver."""
    refmap.heal(store, folder)
    try:
        _tidy(store, folder, manifest)
    except (StoreError, CorruptError) as error:
        _log.warning(
            ("step %d is committed, but old files of it cannot be deleted: %s"),
            manifest.step,
            error,
        )


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
            f"{origin}: receipts of writers {found} of {[r.world_size for r in receipts]}; "
            "exactly one of every writer is needed; save again"
        )
    return tuple(sorted((r.files for r in receipts), key=lambda record: record.writer))


def _standing(store: Store, folder: str) -> tuple[Manifest | None, str | None]:
    """Return the step's present manifest, unless it is damaged, and its version."""
    name = f"{folder}/{MANIFEST}"
    try:
        data, version = store.fetch(name)
    except NotFoundError:
        return None, None
    try:
        head = read_manifest(data, origin=store.where(name))
        if head.register is None:
            return head, version
        return whole(head, register_of(store, folder, head)), version
    except CorruptError:
        return None, version


def _withdraw(
    store: Store,
    folder: str,
    writers: Sequence[WriterRecord],
    *,
    generation: int,
    winner: Manifest,
) -> None:
    """Remove the files of a save that a newer generation has overtaken."""
    merged = _stem_of("merged", writers, generation, run=winner.run)
    listed = _stem_of("register", writers, generation, run=winner.run)
    own = {file.path for record in writers for file in (record.pack, record.index)}
    own |= {f"data/{merged}.pack", f"index/{merged}.json", f"index/{listed}{REGISTER_ENDING}"}
    own -= {file.path for file in winner.files()}
    try:
        store.delete(sorted(f"{folder}/{path}" for path in own))
    except StoreError as error:
        _log.warning(
            ("files of an older generation in step %d cannot be deleted: %s"), winner.step, error
        )


def _stem_of(name: str, writers: Sequence[WriterRecord], generation: int, *, run: str) -> str:
    """Return the stem of a file that the committer makes of these writers' files."""
    tag = sha256(msgspec.json.encode(writers)).hexdigest()[:12]
    return _stem(name, run, generation, tag=tag)


def _describe(
    store: Store,
    folder: str,
    packs: Mapping[int, PackIndex],
    *,
    writers: tuple[WriterRecord, ...],
    mesh: Mapping[str, int],
) -> Manifest:
    """Check the packs, write the files that Zarr needs beside them, and return the manifest."""
    with PackSource(store, folder, packs) as source:
        parts = parts_of(source.indexes(), origin=source.origin)
        check_cover(parts, origin=source.origin)
        tensors = describe(packs.values(), parts)
        first = source.indexes()[0]
        stem = _stem_of("merged", writers, first.generation, run=first.run)
        merged = merge(store, folder, source, tensors, like=first, stem=stem)
    values = {key: value for index in packs.values() for key, value in index.values.items()}
    aliases = {name: fqn for index in packs.values() for name, fqn in index.aliases.items()}
    if fault := fault_of_aliases(tensors, aliases):
        raise CorruptError(f"{store.where(folder)}: {fault}; nothing was committed: save again")
    everything = dict(packs) | ({MERGED: load_index(store, folder, merged)} if merged else {})
    group = group_metadata(run=first.run, step=first.step, values=values)
    refs = refmap.reference_map(
        store, folder, everything, tensors=tensors, aliases=aliases, group=group
    )
    store.write(f"{folder}/{REFS}", [refs])
    return Manifest(
        format=FORMAT,
        run=first.run,
        step=first.step,
        generation=first.generation,
        world_size=first.world_size,
        mesh=dict(mesh),
        tensors=tensors,
        values=values,
        aliases=aliases,
        writers=writers,
        merged=merged,
        refs=FileRecord(path=REFS, nbytes=len(refs), crc32c=crc32c(refs)),
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


def _tidy(store: Store, folder: str, manifest: Manifest) -> None:
    """Remove files that the manifest replaced, and files that fenced writers left.

    Never removes a file that may belong to another active saver, or that another step needs.
    """
    fenced = set(_fenced(store, folder, manifest)) - {file.path for file in manifest.files()}
    if fenced:
        note(store, folder, fenced)
    if store.size(f"{folder}/{RETAINED}") is not None:
        sweep(store, only=manifest.step)
    for part in ("", "/data", "/index"):
        store.sweep(f"{folder}{part}")


def _fenced(store: Store, folder: str, manifest: Manifest) -> Iterator[str]:
    """Yield files that may not be committed any more.

    These are of the run's older generations, and of runs that have lost the fence.
    """
    own, former = run_tag(manifest.run), None
    for part in ("data", "index"):
        for name in store.names(f"{folder}/{part}"):
            if (writer := written_by(name)) is None:
                continue
            generation, tag = writer
            if tag == own:
                is_over = generation < manifest.generation
            else:
                former = fenced_tags(store) if former is None else former
                is_over = tag in former
            if is_over:
                yield f"{part}/{name}"


learn(globals())
