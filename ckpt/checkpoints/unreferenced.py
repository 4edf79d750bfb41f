"""What lies among the steps below a root and no committed step needs; found, not removed.

Some of it may stay by design until somebody comes by: what a save that did not finish has written
goes when the step is saved again, an upload whose writer may live when it is a day old. Each find
says which of these it is, so that who knows more (all writers have ended, say) can judge.
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
    """What an unreferenced thing is: its value says it in words.

    ``FILE``: a file beside a committed step's, or of a removed step, that nothing refers to.
    ``SAVE``: a file of a save that did not finish. ``ABANDONED``: a temporary file or upload that a
    sweep would remove. ``BEGUN``: one whose writer may live, for all that the store knows.
    """

    FILE = "no committed step refers to it"
    SAVE = "of a save that did not finish"
    ABANDONED = "begun and not published, its writer is gone"
    BEGUN = "begun and not published"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreferenced:
    """A find: ``where`` people see it, and the ``step`` in whose folder it lies."""

    where: str
    step: int
    kind: UnreferencedKind


def unreferenced(store: Store) -> Iterator[Unreferenced]:
    """Yield what no committed step needs, step by step. What lies beside the steps is not judged.

    What cannot be known is left out: all files of a step whose manifest or note is damaged, and
    while an index is damaged all packs. Raises ``StoreError`` when the store refuses.
    """
    needed = needed_packs(store)
    for info in folders(store):
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
    """Yield the files of a step's folder; with ``beside`` also such as no saver writes there.

    A folder without manifest and note may belong to a checkpoint of another kind.
    """
    names = (name for name in store.names(folder) if name not in _PARTS)
    yield from (name for name in names if beside or name == REFS)
    for part in _PARTS:
        yield from (f"{part}/{name}" for name in store.names(f"{folder}/{part}"))
