"""Which checkpoints lie below a root, and which of them can be trusted."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ckpt.errors import CorruptError, NotFoundError, StoreError
from ckpt.isal import crc32c
from ckpt.manifest import (
    MANIFEST,
    FileRecord,
    Manifest,
    PackIndex,
    WriterRecord,
    read_index,
    read_manifest,
)
from ckpt.store.base import Store
from ckpt.store.local import LocalStore

_log = logging.getLogger(__name__)

_STEP: Final = re.compile(r"step-(\d{12})")
_URL: Final = re.compile(r"([a-z][a-z0-9+.-]*)://")


def open_store(root: str | Path) -> LocalStore:
    """Return the store at ``root``. Raises ``StoreError`` for a kind this version does not know."""
    if scheme := _URL.match(str(root)):
        raise StoreError(
            f"{root}: checkpoints at {scheme[1]}:// are not supported by this version; "
            "use a directory"
        )
    return LocalStore(root)


def step_folder(step: int) -> str:
    """Return the name of a step's directory."""
    if not 0 <= step < 10**12:
        raise NotFoundError(f"step {step} is not a step number; use 0 … 999999999999")
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
    """Return the error about a file that the manifest lists and that is not there."""
    return CorruptError(
        f"{store.where(name)}: missing, the manifest lists it; load another step, or restore the "
        "file from a copy"
    )


def load_manifest(store: Store, folder: str) -> Manifest:
    """Read the manifest of a step's folder. Raises ``NotFoundError`` where there is none."""
    name = f"{folder}/{MANIFEST}"
    return read_manifest(store.read(name), origin=store.where(name))


def load_index(store: Store, folder: str, record: WriterRecord) -> PackIndex:
    """Read and check a writer's index."""
    data = read_record(store, folder, record.index)
    origin = store.where(f"{folder}/{record.index.path}")
    index = read_index(data, origin=origin)
    if (index.writer, index.pack, index.pack_bytes) != (
        record.writer,
        record.pack.path,
        record.pack.nbytes,
    ):
        raise CorruptError(f"{origin}: belongs to another pack than the manifest says")
    return index


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInfo:
    """A step's directory; without a manifest it is the rest of a save that did not finish."""

    step: int
    path: str
    committed: bool


def steps(root: str | Path) -> list[StepInfo]:
    """List the steps below ``root``, oldest first, unfinished ones included."""
    store = open_store(root)
    return [
        StepInfo(
            step=int(match[1]),
            path=store.where(name),
            committed=store.size(f"{name}/{MANIFEST}") is not None,
        )
        for name in store.names("")
        if (match := _STEP.fullmatch(name))
    ]


def committed_steps(root: str | Path) -> list[int]:
    """List the steps that were committed, oldest first."""
    return [info.step for info in steps(root) if info.committed]


def locate(path: str | Path) -> tuple[Path, int | None]:
    """Split what a user points at into the root and, where it names one step, the step."""
    place = Path(path).absolute()
    if match := _STEP.fullmatch(place.name):
        return place.parent, int(match[1])
    return place, None


def choose(root: str | Path, step: int | None) -> int:
    """Return ``step`` if it is committed, the newest verified step for None.

    Raises ``NotFoundError`` listing what there is.
    """
    there = committed_steps(root)
    if step is not None:
        if step in there:
            return step
        raise NotFoundError(f"{root}: no checkpoint of step {step}; {_listing(root, there)}")
    if (newest := next(verified(root), None)) is None:
        raise NotFoundError(f"{root}: no checkpoint; {_listing(root, [])}")
    return newest


def _listing(root: str | Path, there: list[int]) -> str:
    if there:
        shown = ", ".join(map(str, there[-20:]))
        return f"steps there: {'… ' if len(there) > 20 else ''}{shown}"
    place = Path(root)
    if not place.is_dir():
        return "there is no such directory; check the path"
    if unfinished := [info.step for info in steps(root)]:
        return f"only saves that did not finish (steps {unfinished}); use another root"
    return "the directory holds none; check the path"


def verified(root: str | Path) -> Iterator[int]:
    """Yield the steps that pass the quick check, newest first.

    Damaged ones are passed over with a warning; raises ``CorruptError`` when all are.
    """
    store, found = open_store(root), 0
    there = committed_steps(root)
    faults: list[CorruptError] = []
    for step in reversed(there):
        try:
            quick_verify(store, step)
        except NotFoundError:
            continue  # removed since it was listed
        except CorruptError as error:
            _log.warning("step %d cannot be trusted, trying an older one: %s", step, error)
            faults.append(error)
            continue
        found += 1
        yield step
    if not found and faults:
        raise faults[0]


def latest(root: str | Path) -> int | None:
    """Return the newest step that passes the quick check, None when nothing was saved."""
    return choose(root, None) if committed_steps(root) else None


def quick_verify(store: Store, step: int) -> Manifest:
    """Check what can be checked without reading packs: manifest, indexes, sizes of all files."""
    folder = step_folder(step)
    manifest = load_manifest(store, folder)
    if manifest.step != step:
        raise CorruptError(
            f"{store.where(folder)}/{MANIFEST}: is of step {manifest.step}; the directory was "
            "renamed, name it as it was"
        )
    for record in manifest.writers:
        load_index(store, folder, record)
        check_size(store, folder, record.pack)
    return manifest


def check_size(store: Store, folder: str, record: FileRecord) -> None:
    """Raise ``CorruptError`` unless the file is there with the size it was written with."""
    name = f"{folder}/{record.path}"
    size = store.size(name)
    if size is None:
        raise missing(store, name)
    if size != record.nbytes:
        raise CorruptError(
            f"{store.where(name)}: {size} bytes, {record.nbytes} were written: it was cut off or "
            "changed; load another step, or restore the file from a copy"
        )
