"""The checkpoints in a store: whether they pass the quick check, and which are pinned."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import msgspec

from holdfast.ckpt.checkpoints import catalog, pins
from holdfast.ckpt.errors import CkptError, NotFoundError
from holdfast.ckpt.store.base import Store
from holdfast.ckpt.store.places import open_store

_EVERY_S: Final = 15.0
_SHOWN: Final = 24


class StoredStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step's directory in the store. ``state`` is ``sound``, ``damaged`` or ``unfinished``."""

    step: int
    state: str
    size_bytes: int | None = None
    pinned: bool = False
    why: str = ""


class StoredCheckpoints(msgspec.Struct, frozen=True, kw_only=True):
    """The newest steps, the newest first, and the number of all that are committed."""

    root: str
    committed: int = 0
    newest: tuple[StoredStep, ...] = ()
    error: str = ""


class Shelf:
    """Lists a store now and then; each step is checked once, without its packs being read."""

    def __init__(self, root: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._root, self._clock = root, clock
        self._store: Store | None = None
        self._checked: dict[int, StoredStep] = {}
        self._looked_s = float("-inf")
        self.found = StoredCheckpoints(root=root, error="not looked at yet")

    def look(self) -> None:
        """List the store if the last time is long enough ago."""
        if self._clock() - self._looked_s < _EVERY_S:
            return
        try:
            self.found = self._list()
        except (CkptError, OSError) as error:
            self.found = StoredCheckpoints(root=self._root, error=str(error))
        self._looked_s = self._clock()

    def _list(self) -> StoredCheckpoints:
        if self._store is None:
            self._store = open_store(self._root)
        store = self._store
        there = [each for each in catalog.folders(store) if each.committed or not each.retained]
        pinned = set(pins.load(store).pins)
        shown = there[: -_SHOWN - 1 : -1]
        self._checked = {
            each.step: self._checked.get(each.step) or self._check(store, each.step)
            for each in shown
            if each.committed
        }
        return StoredCheckpoints(
            root=self._root,
            committed=sum(each.committed for each in there),
            newest=tuple(
                msgspec.structs.replace(
                    self._checked.get(each.step)
                    or StoredStep(step=each.step, state="unfinished", why=each.fault),
                    pinned=each.step in pinned,
                )
                for each in shown
            ),
        )

    def _check(self, store: Store, step: int) -> StoredStep:
        try:
            manifest = catalog.quick_verify(store, step)
        except NotFoundError:
            return StoredStep(step=step, state="unfinished", why="removed meanwhile")
        except CkptError as error:
            return StoredStep(step=step, state="damaged", why=str(error))
        size = sum(record.pack.nbytes + record.index.nbytes for record in manifest.writers)
        return StoredStep(step=step, state="sound", size_bytes=size)
