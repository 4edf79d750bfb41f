"""The remains of saves that failed, or whose processes were killed, in a directory.

The process that will commit holds the step's folder from before the first file is written until it
has committed or given up: it keeps a locked file there, and a lock ends with its process. So files
that no manifest lists, in a folder that nobody holds, are of no use to anyone. Only saves without a
run take part: those of a run are fenced by their generation
(`holdfast.ckpt.checkpoints.commit`). An object store has no locks: nothing is removed there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Final

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
            remove_remains(self._store, only=self._step)
            if MANIFEST not in self._store.names(step_folder(self._step)):
                self._store.remove(step_folder(self._step))
        except CkptError as error:
            _log.warning("files of failed saves of step %d stay: %s", self._step, error)


def remove_remains(store: Store, *, only: int | None = None) -> None:
    """Remove what failed and killed saves have left, of one step or of all.

    A folder that may not be read or changed is passed over.
    """
    if not isinstance(store, LocalStore):
        return
    for step in [info.step for info in folders(store)] if only is None else [only]:
        try:
            _clean(store, step_folder(step))
        except StoreError as error:
            _log.warning("files of failed saves of step %d stay: %s", step, error)


def _clean(store: LocalStore, folder: str) -> None:
    if not any(_remains(store, folder)):
        store.sweep(folder)  # the mark of a saver that was killed after it had published
        return
    with store.alone(folder) as alone:
        if not alone:
            return
        found = {f"{folder}/{path}" for path in _remains(store, folder)}
        indexes = {name for name in found if name.startswith(f"{folder}/index/")}
        store.delete(sorted(indexes))  # these pin packs of other steps
        if (needed := needed_packs(store)) is not None:
            store.delete(sorted(found - needed))
    store.remove(folder)


def _remains(store: Store, folder: str) -> Iterator[str]:
    """Yield the files of a step's folder that a save without a run wrote, and no manifest lists."""
    names = [f"{part}/{name}" for part in _PARTS for name in store.names(f"{folder}/{part}")]
    names = [name for name in names if written_by(name.rpartition("/")[2]) == _WITHOUT_RUN]
    kept: set[str] = set()
    try:
        kept = {file.path for file in load_manifest(store, folder).files()}
    except CorruptError:
        return
    except NotFoundError:
        names += [name for name in store.names(folder) if name == REFS and names]
    if (going := noted(store, folder)) is None:
        return
    yield from (name for name in names if name not in kept and name not in going)
