"""Which blocks are what their checksums say: looked at by several threads, and ahead of time.

The end of a generation is known before its workers have left it, and an inventory is taken once
they have. All ranks wait for it, so the blocks are looked at from the first moment on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from time import monotonic
from typing import Final

from ckpt.block import verify_block
from ckpt.errors import CkptError, CorruptError
from ckpt.sidecar.core import Core, Work
from ckpt.sidecar.slots import Slot
from ckpt.world import BlockEntry

_FRESH_S: Final = 1.0
"""No inventory takes the word of a look that ended longer ago: bits may have flipped since."""


@dataclass(slots=True, kw_only=True)
class Look:
    """A look at one block: under way, or what it found."""

    entry: BlockEntry
    ended_s: float = math.inf
    intact: bool | None = None
    over: Future[None] = field(default_factory=Future)

    def is_intact(self) -> bool:
        """Wait for its end; say what it found. Raises ``CkptError`` where it came to nothing."""
        self.over.result()
        if self.intact is None:
            raise CkptError(f"the block of rank {self.entry.rank} could not be looked at")
        return self.intact


class Scrutiny:
    """Looks at whole blocks. Its methods are called under the core's lock."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._looks: dict[int, Look] = {}

    def held(self) -> list[Slot]:
        """Return the slots with a block."""
        return [slot for slot in self._core.slots.all() if slot.entry and not slot.leaving]

    def begin(self) -> None:
        """Start to look at every block that is held: an inventory will be asked for."""
        self.look_at(self.held())

    def look_at(self, slots: Iterable[Slot]) -> list[Look]:
        """Return a look at each of these slots with blocks, one under way where there is one."""
        before, now_s = self._looks, monotonic()
        self._looks = {}
        for slot in slots:
            look = before.get(slot.number)
            if look is None or look.entry is not slot.entry or now_s > look.ended_s + _FRESH_S:
                look = self._look_at(slot)
            self._looks[slot.number] = look
        return list(self._looks.values())

    def _look_at(self, slot: Slot) -> Look:
        assert slot.entry is not None
        look = Look(entry=slot.entry)
        self._core.slots.pin(slot)

        def work() -> None:
            try:
                look.intact = is_intact(slot)
            finally:
                look.ended_s = monotonic()
                self._core.unpin(slot)

        look.over = self._core.submit(None, work, kind=Work.LOOK)
        return look


def is_intact(slot: Slot) -> bool:
    """Say whether every byte of a slot's block is what its checksums say."""
    if slot.entry is None:
        return False
    try:
        verify_block(slot.view(), slot.entry, origin=slot.file.path.name)
    except CorruptError:
        return False
    return True
