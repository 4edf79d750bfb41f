"""Slots made ahead, so that the first snapshots of a large state find them ready.

To fill fresh shared memory with pages costs more than to copy into it, and an optimizer step waits
for the copy. One slot is made after each seal, while the ranks do not copy (both at once are slower
than one after the other), until there are enough for the long run; none where shared memory is
scarce. When the generation ends it stops at once: a recovery needs the processors, and the next
generation's blocks may have another length.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from holdfast.ckpt.errors import CapacityError, FencedError
from holdfast.ckpt.sidecar.core.core import Core, WaitingWork
from holdfast.ckpt.sidecar.core.slots import BlockSize
from holdfast.ckpt.sidecar.writing.room import SlotRoom

_log = logging.getLogger(__name__)


class Spares:
    """Makes the slots of a generation ahead; called under the lock.

    ``check`` raises ``FencedError`` when a generation is over.
    """

    def __init__(self, core: Core, room: SlotRoom, *, check: Callable[[int], None]) -> None:
        self._core, self._room, self._check = core, room, check
        self._coming: BlockSize | None = None
        self._making = False

    def is_coming(self, size: BlockSize) -> bool:
        """Return whether a slot of that size is being made now, so that waiting for it pays."""
        return self._coming is not None and size.is_like(self._coming)

    def sealed(self) -> None:
        """Make a slot for the next snapshot, if one is missing; called after a block is sealed."""
        if not self._making and self._missing():
            self._making = True
            self._core.submit(None, self._make, kind=WaitingWork.STORE)

    def _missing(self) -> BlockSize | None:
        """Return the blocks for which a slot is missing and can be made; None for none."""
        sizes = self._room.lengths().values()
        slots = self._core.slots.all()
        wanted = self._room.slots_per_rank - 1
        for size in sorted(set(sizes), key=lambda each: each.nbytes):
            ranks = sum(size.is_like(each) for each in sizes)
            if sum(size.fits(slot.file) for slot in slots) >= ranks * wanted:
                continue
            if not self._room.holds(size):
                continue
            # room for slots requested meanwhile
            requested = size.nbytes + sum(each.nbytes for each in sizes)
            if self._core.arena.free_bytes() >= requested:
                return size
        return None

    def _make(self) -> None:
        core = self._core
        with core.lock:
            size, world = self._missing(), core.book.world
            if size is None or world is None:
                self._making = False
                return
            self._coming = size
            self._room.begin(size)
        file = None
        try:
            file = core.arena.create(
                size.nbytes, fixed=size.fixed, check=lambda: self._check(world.generation)
            )
        except (CapacityError, FencedError) as error:
            _log.info("%s: no slot is made ahead: %s", core.node, error)
        finally:
            with core.lock:
                self._coming, self._making = None, False
                self._room.end(size)
                if file is not None:
                    core.slots.add(file)
                core.changed()
