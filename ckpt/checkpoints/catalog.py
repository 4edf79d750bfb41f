"""The checkpoints below a root, and the checks by which they can be trusted."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final

from holdfast.ckpt.errors import CorruptError, NotFoundError, StoreError
from holdfast.ckpt.format.coherence import check_packs
from holdfast.ckpt.format.manifest import (
    MANIFEST,
    RETAINED,
    FileRecord,
    Manifest,
    PackIndex,
    WriterRecord,
    from_root,
    is_index_of,
    read_index,
    read_manifest,
    read_note,
    with_writers,
)
from holdfast.ckpt.native.isal import crc32c
from holdfast.ckpt.register.reading import Register
from holdfast.ckpt.store.base import Readable, Store
from holdfast.ckpt.store.local import LocalStore
from holdfast.ckpt.store.places import open_store, scheme_of

_log = logging.getLogger(__name__)

_THREADS: Final = 8
_MANY_THREADS: Final = 32
_FEW_NEAR: Final = 8
"""The files of a directory that are read one after the other: starting threads takes longer."""

_GROUP: Final = 8
"""The files of which one thread compares the sizes, one after the other."""

_LISTINGS: Final = 100

MAX_STEP: Final = 10**12 - 1
"""The largest step: a folder's name has twelve digits."""

_FILE: Final = re.compile(r"[a-z0-9]+-g([0-9]+)-([0-9a-f]{8})-[0-9a-f]+\.(?:pack|json|register)")
_STEP: Final = re.compile(r"step-([0-9]{12})")


def run_tag(run: str) -> str:
    """Return the part of the names of files by which a run is known."""
    return sha256(run.encode()).hexdigest()[:8]


def written_by(name: str) -> tuple[int, str] | None:
    """Return the generation and the tag of the run that wrote a pack or an index of this name."""
    match = _FILE.fullmatch(name)
    return (int(match[1]), match[2]) if match else None


def step_folder(step: int) -> str:
    """Return the name of a step's directory."""
    if not 0 <= step <= MAX_STEP:
        raise NotFoundError(f"step {step} is not a step number; use 0 … {MAX_STEP}")
    return f"step-{step:012d}"


def read_record(store: Store, folder: str, record: FileRecord) -> bytes:
    """Return a small file's bytes, checked against ``record``."""
    name = f"{folder}/{record.path}"
    try:
        data = store.read(name)
    except NotFoundError as error:
        raise missing(store, name) from error
    if len(data) != record.nbytes or crc32c(data) != record.crc32c:
        raise CorruptError(
            f"{store.where(name)}: damaged: {len(data)} bytes with checksum {crc32c(data):08x}, "
            f"the manifest has {record.nbytes} bytes with {record.crc32c:08x}; load another step, "
            "or restore the file from a copy"
        )
    return data


def missing(store: Store, name: str) -> CorruptError:
    """Return the error for a file that the manifest lists and that does not exist."""
    return CorruptError(
        f"{store.where(name)}: missing, the manifest lists it; load another step, or restore the "
        "file from a copy"
    )


def open_listed(store: Store, name: str) -> Readable:
    """Open a file that the manifest lists. Raises ``CorruptError`` if it does not exist."""
    try:
        return store.open(name)
    except NotFoundError as error:
        raise missing(store, name) from error


def load_head(store: Store, folder: str) -> Manifest:
    """Read the manifest of a step's folder, without the writers that a register lists.

    Raises ``NotFoundError`` if there is none.
    """
    name = f"{folder}/{MANIFEST}"
    return read_manifest(store.read(name), origin=store.where(name))


def load_manifest(store: Store, folder: str) -> Manifest:
    """Read the manifest of a step's folder, with all its writers.

    Raises ``NotFoundError`` if there is none, ``CorruptError`` if it or its register is damaged.
    """
    head = load_head(store, folder)
    return head if head.register is None else whole(head, register_of(store, folder, head))


def register_of(store: Store, folder: str, head: Manifest) -> Register:
    """Open the register that a manifest names."""
    assert head.register is not None
    name = f"{folder}/{head.register.file.path}"
    return Register(head, lambda: open_listed(store, name), origin=store.where(name))


def whole(head: Manifest, register: Register) -> Manifest:
    """Return a manifest with the writers that its register lists."""
    return with_writers(head, [*register.writers().values()], origin=register.origin)


def load_writer(store: Store, folder: str, head: Manifest, writer: int) -> WriterRecord:
    """Return the record of one writer of a manifest, with little more read than that."""
    if head.register is None:
        return head.writers[writer]
    return register_of(store, folder, head).writers([writer])[writer]


def load_index(store: Store, folder: str, record: WriterRecord) -> PackIndex:
    """Read and check a writer's index."""
    return parse_index(store, folder, record, read_record(store, folder, record.index))


def parse_index(store: Store, folder: str, record: WriterRecord, data: bytes) -> PackIndex:
    """Parse and check the bytes of a writer's index."""
    origin = store.where(f"{folder}/{record.index.path}")
    index = read_index(data, origin=origin)
    if not is_index_of(index, record):
        raise CorruptError(f"{origin}: it belongs to another pack than the one in the manifest")
    return index


def noted(store: Store, folder: str) -> list[str] | None:
    """Return the paths of the files noted as removable; None where the note is damaged."""
    name = f"{folder}/{RETAINED}"
    try:
        return read_note(store.read(name), origin=store.where(name))
    except NotFoundError:
        return []  # there is no note
    except CorruptError as error:
        _log.warning("files of a removed step cannot be deleted: %s", error)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInfo:
    """A step's directory.

    Without a manifest it is the remainder of a save that did not finish. If it is ``retained``,
    it is the remainder of a removed step, of which later steps need some packs. If there is a
    ``fault``, this process may not list it, and nothing else is known of it.
    """

    step: int
    path: str
    committed: bool
    retained: bool = False
    fault: str = ""


def folders(store: Store) -> list[StepInfo]:
    """List the steps' directories, oldest first, unfinished and removed ones included.

    One that may not be listed is in the list with its fault; a file of such a name is not. Raises
    ``StoreError`` for any other trouble: it may hide the newest step.
    """

    def look(name: str) -> StepInfo | None:
        step, path = int(name.removeprefix("step-")), store.where(name)
        try:
            there = store.names(name)
        except StoreError as error:
            if isinstance(error.__cause__, NotADirectoryError):
                _log.warning("%s is a file, not the directory of a step: left out", path)
                return None
            if not isinstance(error.__cause__, PermissionError):
                raise
            _log.warning("step %d is left out: %s", step, error)
            return StepInfo(step=step, path=path, committed=False, fault=str(error))
        return StepInfo(
            step=step,
            path=path,
            committed=MANIFEST in there,
            retained=RETAINED in there,
        )

    found = [name for name in store.names("") if _STEP.fullmatch(name)]
    if len(found) < _THREADS:
        return [info for info in map(look, found) if info is not None]
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="ckpt-list") as pool:
        return [info for info in pool.map(look, found) if info is not None]


def steps(root: str | Path) -> list[StepInfo]:
    """List the steps below ``root``, oldest first, unfinished ones included."""
    return [
        info
        for info in folders(open_store(root))
        if not info.fault and (info.committed or not info.retained)
    ]


def committed(store: Store) -> list[int]:
    """List the steps that were committed, oldest first."""
    return [info.step for info in folders(store) if info.committed]


def committed_steps(root: str | Path) -> list[int]:
    """List the steps that were committed below ``root``, oldest first."""
    return committed(open_store(root))


def named_after(store: Store, step: int) -> list[int]:
    """Return the steps after ``step`` that have a directory, newest first, committed or not."""
    there = (int(match[1]) for name in store.names("") if (match := _STEP.fullmatch(name)))
    return sorted((each for each in there if each > step), reverse=True)


def choose(root: str | Path, step: int | None) -> int:
    """Return ``step`` if it is committed, the newest verified step for None.

    Raises ``NotFoundError`` listing the existing steps.
    """
    there = committed_steps(root)
    if step is not None:
        if step in there:
            return step
        raise NotFoundError(f"{root}: no checkpoint of step {step}; {_listing(root, there)}")
    if (newest := next(verified(root), None)) is None:
        raise NotFoundError(f"{root}: no checkpoint; {_listing(root, [])}")
    return newest


def newest_first(root: str | Path) -> Iterator[int]:
    """Return the committed steps, newest first, unchecked.

    Those that were committed meanwhile follow: another process may remove all that were listed
    while it writes new ones. Raises ``NotFoundError`` if there is none at first.
    """
    store = open_store(root)
    if not (there := committed(store)):
        raise NotFoundError(f"{root}: no checkpoint; {_listing(root, [])}")
    return _listed_anew(store, there)


def _listed_anew(store: Store, there: Sequence[int]) -> Iterator[int]:
    known = set[int]()
    for _ in range(_LISTINGS):
        fresh = [step for step in reversed(there) if step not in known]
        if not fresh:
            return
        known.update(fresh)
        yield from fresh
        there = committed(store)


def _listing(root: str | Path, there: list[int]) -> str:
    if there:
        shown = ", ".join(map(str, there[-20:]))
        return f"steps there: {'… ' if len(there) > 20 else ''}{shown}"
    found = folders(open_store(root))
    if closed := [info for info in found if info.fault]:
        return f"step {closed[-1].step} cannot be read: {closed[-1].fault}"
    if unfinished := [info.step for info in found if not info.retained]:
        return f"only saves that did not finish (steps {unfinished}); use another root"
    if not scheme_of(root) and not Path(root).is_dir():
        return "there is no such directory; check the path"
    return "it holds none; check the path"


def verified(root: str | Path) -> Iterator[int]:
    """Yield the steps that pass the quick check, newest first.

    Damaged steps are skipped with a warning; raises ``CorruptError`` when all are damaged.
    """
    store, found = open_store(root), 0
    faults: list[CorruptError] = []
    for step in _listed_anew(store, committed(store)):
        try:
            quick_verify(store, step)
        except NotFoundError:
            continue  # removed since it was listed
        except CorruptError as error:
            if is_removed(store, step):
                continue  # while it was read
            _log.warning("step %d cannot be trusted, trying an older one: %s", step, error)
            faults.append(error)
            continue
        found += 1
        yield step
    if not found and faults:
        raise faults[0]


def latest(root: str | Path) -> int | None:
    """Return the newest step that passes the quick check, None when nothing was saved."""
    return next(verified(root), None)


def is_removed(store: Store, step: int) -> bool:
    """Say whether a step is no longer committed: a fault that a reader then finds is no damage."""
    return store.size(f"{step_folder(step)}/{MANIFEST}") is None


def quick_verify(store: Store, step: int) -> Manifest:
    """Check a step without reading packs: manifest, indexes or register, sizes of all packs."""
    head = head_of(store, step)
    if head.register is None:
        return open_whole(store, head)[0]
    folder = step_folder(step)
    register = register_of(store, folder, head)
    register.check()
    manifest = whole(head, register)
    check_sizes(store, folder, _packs_of(manifest))
    return manifest


def open_step(store: Store, step: int) -> tuple[Manifest, dict[int, PackIndex]]:
    """Return a step's manifest and its writers' indexes, after all cheap checks.

    Raises ``NotFoundError`` if the step is not committed and ``CorruptError`` if a file is
    missing, cut off or changed.
    """
    return open_whole(store, head_of(store, step))


def open_whole(store: Store, manifest: Manifest) -> tuple[Manifest, dict[int, PackIndex]]:
    """Return the manifest of a head, and its writers' indexes, as `open_step` does."""
    folder = step_folder(manifest.step)
    if manifest.register is not None:
        return _opened(store, folder, manifest, register_of(store, folder, manifest))

    def load(record: WriterRecord) -> PackIndex:
        check_size(store, folder, record.pack)
        return load_index(store, folder, record)

    few = _FEW_NEAR if isinstance(store, LocalStore) else 1
    if len(manifest.writers) <= few:
        packs = [load(record) for record in manifest.writers]
    else:
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="ckpt-index") as pool:
            packs = list(pool.map(load, manifest.writers))
    for base in manifest.bases().values():
        check_size(store, folder, base)
    found = {index.writer: index for index in packs}
    check_packs(manifest, found, origin=store.where(f"{folder}/{MANIFEST}"))
    return manifest, found


def head_of(store: Store, step: int) -> Manifest:
    """Return the head of a step's manifest (`load_head`), after comparing the step."""
    folder = step_folder(step)
    head = load_head(store, folder)
    if head.step != step:
        raise CorruptError(
            f"{store.where(folder)}/{MANIFEST}: it contains step {head.step}; the directory was "
            "renamed, give it its old name again"
        )
    return head


def _opened(
    store: Store, folder: str, head: Manifest, register: Register
) -> tuple[Manifest, dict[int, PackIndex]]:
    """Open a step with a register; the writers' own indexes are not read."""
    manifest, packs = whole(head, register), register.packs(None)
    check_sizes(store, folder, _packs_of(manifest))
    check_packs(manifest, packs, origin=register.origin)
    return manifest, packs


def _packs_of(manifest: Manifest) -> list[FileRecord]:
    return [*(record.pack for record in manifest.writers), *manifest.bases().values()]


def check_sizes(store: Store, folder: str, records: Sequence[FileRecord]) -> None:
    """Compare the sizes of many files, several at once: an object store has each of them wait."""

    def check(some: Sequence[FileRecord]) -> None:
        for record in some:
            check_size(store, folder, record)

    groups = [records[at : at + _GROUP] for at in range(0, len(records), _GROUP)]
    if len(groups) <= 1:
        check(records)
        return
    with ThreadPoolExecutor(_MANY_THREADS, thread_name_prefix="ckpt-sizes") as pool:
        for _ in pool.map(check, groups):
            pass


def check_size(store: Store, folder: str, record: FileRecord) -> None:
    """Raise ``CorruptError`` unless the file exists with its recorded size."""
    name = from_root(folder, record.path)
    size = store.size(name)
    if size is None:
        raise missing(store, name)
    if size != record.nbytes:
        raise CorruptError(
            f"{store.where(name)}: {size} bytes, {record.nbytes} were written: it was cut off or "
            "changed; load another step, or restore the file from a copy"
        )
