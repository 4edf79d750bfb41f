"""The shared memory of the nodes on this machine, which outlives the nodes' processes."""

from __future__ import annotations

import os
import time
from pathlib import Path

from holdfast.ckpt.memory import kept
from holdfast.ckpt.memory.arena import hold, is_held, sweep, take_away

_SWEEP_S = 2.0
_SWEEP_TICK_S = 0.01


class KeptArenas:
    """Descriptors by which a launcher keeps the arenas of its nodes until the job ends."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}

    def keep(self, arena: Path) -> None:
        """Make a node's memory outlive its processes."""
        if not self.has(arena):
            self._release(arena)
            self._descriptors[arena] = hold(arena)

    def has(self, arena: Path) -> bool:
        """Return whether the memory that is kept is still the node's."""
        return is_held(arena, self._descriptors.get(arena, -1))

    def remove(self, arena: Path, *, shared: bool) -> None:
        """Remove the memory of a node's processes, the last of which may still be ending.

        ``shared``: another process keeps the memory too, until nothing lies there.
        """
        self._release(arena)
        kept.give_up(arena)
        deadline_s = time.monotonic() + _SWEEP_S
        if shared:
            with take_away(arena):
                return
        while arena.exists() and time.monotonic() < deadline_s:
            if not sweep(exactly=arena.name):
                time.sleep(_SWEEP_TICK_S)

    def _release(self, arena: Path) -> None:
        if (fd := self._descriptors.pop(arena, -1)) >= 0:
            os.close(fd)
