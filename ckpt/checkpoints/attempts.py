"""The remains of saves that failed, or whose processes were killed.

Such files are listed by no manifest. They are removed once their writer cannot publish them:

- A save without a run (`holdfast.save`) holds the step's folder from before the first file is
  written until it has committed or given up: it keeps a locked file there, and a lock ends with its
  process. An object store has no locks: there these files stay.
- A run can publish nothing more once another run has taken the root's fence
  (`holdfast.ckpt.checkpoints.fence`). Before that, only the run itself knows which of its
  checkpoints failed: it writes one at a time, in the order of (generation, step).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from holdfast.ckpt.checkpoints import fence, refmap
from holdfast.ckpt.checkpoints.bases import needed_packs
from holdfast.ckpt.checkpoints.catalog import (
    folders,
    load_manifest,
    noted,
    run_tag,
    step_folder,
    written_by,
)
from holdfast.ckpt.closing import Closing
from holdfast.ckpt.errors import CkptError, CorruptError, NotFoundError, StoreError
from holdfast.ckpt.format.manifest import MANIFEST, REFS
from holdfast.ckpt.store.base import Store
from holdfast.ckpt.store.local import FolderHold, LocalStore
from holdfast.ckpt.store.places import open_store

_PARTS: Final = ("data", "index")
_WITHOUT_RUN: Final = (0, run_tag(""))

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedSaves:
    """The saves of runs that can publish nothing more.

    ``fenced`` are the tags of runs that lost the root's fence. ``reached`` is, by tag, the
    (generation, step) that a run writes now: its saves before that have ended.
    """

    fenced: frozenset[str] = frozenset()
    reached: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def include(self, path: str, *, step: int) -> bool:
        """Say whether a file in the folder of ``step`` is of one of these saves."""
        if (writer := written_by(path.rpartition("/")[2])) is None:
            return False
        generation, tag = writer
        return tag in self.fenced or (generation, step) < self.reached.get(tag, (0, 0))


NONE_ENDED: Final = EndedSaves()


class SaveAttempt(Closing):
    """The hold of a step's folder during one save; other kinds of stores have none.

    ``close`` gives it up, and removes what failed saves of the step have left, this one's included.
    It never raises for that.
    """

    def __init__(self, root: str | Path, step: int) -> None:
        self._store, self._step = open_store(root), step
        self._hold: FolderHold | None = None
        if isinstance(self._store, LocalStore):
            self._hold = self._store.hold(step_folder(step))

    def close(self) -> None:
        """Give up the hold and clean the folder."""
        hold, self._hold = self._hold, None
        if hold is None:
            return
        hold.close()
        try:
            remove_remains(self._store, steps=[self._step], ended=NONE_ENDED)
            if MANIFEST not in self._store.names(step_folder(self._step)):
                self._store.remove(step_folder(self._step))
        except CkptError as error:
            _log.warning("files of failed saves of step %d stay: %s", self._step, error)


def remove_all_remains(store: Store) -> None:
    """Remove what failed and killed saves have left below a root. Raises as `remove_remains`."""
    steps = [info.step for info in folders(store) if not info.fault]
    remove_remains(store, steps=steps, ended=EndedSaves(fenced=fenced_tags(store)))


def remove_remains(store: Store, *, steps: Collection[int], ended: EndedSaves) -> None:
    """Remove what failed and killed saves of ``steps`` have left.

    Of the saves of runs, only those that have ``ended`` count. A folder that may not be read or
    changed is passed over. Raises ``StoreError`` for other trouble of the store.
    """
    for step in steps:
        try:
            _clean(store, step, ended)
        except StoreError as error:
            _log.warning("files of failed saves of step %d stay: %s", step, error)


def fenced_tags(store: Store) -> frozenset[str]:
    """Return the tags of the runs that had the fence before its holder; they publish no more."""
    try:
        holder = fence.load(store)
    except CorruptError as error:
        _log.warning("files of failed saves of earlier runs stay: %s", error)
        return frozenset()
    return frozenset(map(run_tag, holder.former if holder else ()))


def _clean(store: Store, step: int, ended: EndedSaves) -> None:
    folder = step_folder(step)
    found = list(_unlisted(store, folder))
    _delete(store, folder, [path for path in found if ended.include(path, step=step)])
    if isinstance(store, LocalStore) and any(map(_is_without_run, found)):
        with store.alone(folder) as alone:
            if not alone:
                return
            _delete(store, folder, filter(_is_without_run, _unlisted(store, folder)))
    store.sweep(folder)  # the mark of a saver that was killed after it had published
    if found and MANIFEST not in store.names(folder) and not any(_unlisted(store, folder)):
        store.delete([f"{folder}/{REFS}"])
        refmap.heal(store, folder)  # the step may have been saved meanwhile
        store.remove(folder)


def _delete(store: Store, folder: str, paths: Iterator[str] | list[str]) -> None:
    """Delete files of a step's folder, but no pack that another step needs."""
    if not (found := {f"{folder}/{path}" for path in paths}):
        return
    indexes = {name for name in found if name.startswith(f"{folder}/index/")}
    store.delete(sorted(indexes))  # these pin packs of other steps
    if (needed := needed_packs(store)) is not None:
        store.delete(sorted(found - indexes - needed))


def _is_without_run(path: str) -> bool:
    return written_by(path.rpartition("/")[2]) == _WITHOUT_RUN


def _unlisted(store: Store, folder: str) -> Iterator[str]:
    """Yield the packs and indexes of a step's folder that no manifest and no note lists."""
    names = [f"{part}/{name}" for part in _PARTS for name in store.names(f"{folder}/{part}")]
    kept: set[str] = set()
    try:
        kept = {file.path for file in load_manifest(store, folder).files()}
    except CorruptError:
        return
    except NotFoundError:
        pass
    if (going := noted(store, folder)) is None:
        return
    yield from (name for name in names if name not in kept and name not in going)
