"""Files below a root that no committed step needs; finds them and does not remove them.

Some of them stay by design until another process comes by. Files of a save that did not finish go
when the step is saved again, and as `holdfast.ckpt.checkpoints.attempts` says; an upload whose
writer may be alive goes when it is a day old. Each find names its kind, so that a caller who knows
more (that all writers have ended, say) can judge.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from holdfast.ckpt.checkpoints.bases import needed_packs
from holdfast.ckpt.checkpoints.catalog import StepInfo, folders, load_manifest, noted, step_folder
from holdfast.ckpt.errors import CorruptError, NotFoundError
from holdfast.ckpt.format.manifest import MANIFEST, REFS, RETAINED
from holdfast.ckpt.store.base import Store

_PARTS: Final = ("data", "index")
_PACK: Final = ".pack"


class UnreferencedKind(StrEnum):
    """The kind of an unreferenced file; its value says it in words.

    ``FILE``: a file beside a committed step's, or of a removed step, that nothing refers to.
    ``SAVE``: a file of a save that did not finish. ``ABANDONED``: a temporary file or upload that a
    sweep would remove. ``BEGUN``: one whose writer may be alive, for all that the store knows.
    """

    FILE = "no committed step refers to it"
    SAVE = "of a save that did not finish"
    ABANDONED = "begun and not published, its writer is gone"
    BEGUN = "begun and not published"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreferenced:
    """A find: its path or URL ``where``, and the ``step`` in whose folder it lies."""

    where: str
    step: int
    kind: UnreferencedKind


def unreferenced(store: Store) -> Iterator[Unreferenced]:
    """Yield the files that no committed step needs, step by step; only steps' folders are searched.

    Uncertain files are left out: all files of a step whose manifest or note is damaged, and all
    packs while an index is damaged. Raises ``StoreError`` when the store refuses.
    """
    needed = needed_packs(store)
    for info in folders(store):
        if info.fault:
            continue
        yield from _files(store, info, needed)
        for part in ("", *(f"/{part}" for part in _PARTS)):
            for each in store.unpublished(f"{step_folder(info.step)}{part}"):
                kind = UnreferencedKind.ABANDONED if each.abandoned else UnreferencedKind.BEGUN
                yield Unreferenced(where=each.where, step=info.step, kind=kind)


def _files(store: Store, info: StepInfo, needed: set[str] | None) -> Iterator[Unreferenced]:
    folder = step_folder(info.step)
    kept: set[str] = set()
    try:
        kept = {MANIFEST, *(file.path for file in load_manifest(store, folder).files())}
    except NotFoundError:
        pass
    except CorruptError:
        return
    if (going := noted(store, folder)) is None:
        return
    paths = _paths(store, folder, beside=info.committed or info.retained)
    if needed is None:
        paths = (path for path in paths if not path.endswith(_PACK) and path != RETAINED)
    elif any(f"{folder}/{path}" in needed for path in going):
        kept.add(RETAINED)
    kind = UnreferencedKind.FILE if info.committed or info.retained else UnreferencedKind.SAVE
    for path in paths:
        if path not in kept and f"{folder}/{path}" not in (needed or ()):
            yield Unreferenced(where=store.where(f"{folder}/{path}"), step=info.step, kind=kind)


def _paths(store: Store, folder: str, *, beside: bool) -> Iterator[str]:
    """Yield the files of a step's folder; with ``beside`` also files that no saver writes there.

    A folder without manifest and note may belong to a checkpoint of another kind.
    """
    names = (name for name in store.names(folder) if name not in _PARTS)
    yield from (name for name in names if beside or name == REFS)
    for part in _PARTS:
        yield from (f"{part}/{name}" for name in store.names(f"{folder}/{part}"))
