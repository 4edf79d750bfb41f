"""Slots made ahead, so that the first snapshots of a large state find them ready.

Filling fresh shared memory with pages costs more than copying into it, and the copy is what an
optimizer step waits for. One is made after each seal, when the ranks do not copy (both at once are
slower than one after the other), until there are as many as needed in the long run; none where
shared memory is scarce.
"""

from __future__ import annotations

import logging
import shutil

from ckpt.errors import CapacityError
from ckpt.sidecar.core import Core, Work
from ckpt.world import SnapshotWorld

_log = logging.getLogger(__name__)


class Spares:
    """Makes the slots of a generation ahead; called under the lock."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._size_bytes = self._coming_bytes = 0
        self._making = False
        core.on.adopt.append(self._adopt)

    def _adopt(self, _world: SnapshotWorld) -> None:
        self._size_bytes = 0

    def is_coming(self, size_bytes: int) -> bool:
        """Return whether a slot of that size is being made just now: it is worth waiting for."""
        return self._coming_bytes >= size_bytes

    def sealed(self, size_bytes: int) -> None:
        """Note that a block is sealed: make a slot for the next snapshot, if one is missing."""
        self._size_bytes = max(self._size_bytes, size_bytes)
        if not self._making and self._is_short():
            self._making = True
            self._core.submit(None, self._make, kind=Work.STORE)

    def _is_short(self) -> bool:
        core = self._core
        if (world := core.book.world) is None or not self._size_bytes:
            return False
        ranks = world.rank_nodes.count(core.node)
        if len(core.slots.all()) >= ranks * (world.keep + 1):
            return False
        free = shutil.disk_usage(core.arena.directory).free
        return free >= (ranks + 1) * self._size_bytes  # room for what is asked for meanwhile

    def _make(self) -> None:
        core = self._core
        with core.lock:
            if not self._is_short():
                self._making = False
                return
            self._coming_bytes = size_bytes = self._size_bytes
        file = None
        try:
            file = core.arena.create(size_bytes)
        except CapacityError as error:
            _log.info("%s: no slot is made ahead: %s", core.node, error)
        finally:
            with core.lock:
                self._coming_bytes, self._making = 0, False
                if file is not None:
                    core.slots.add(file)
                core.changed()
