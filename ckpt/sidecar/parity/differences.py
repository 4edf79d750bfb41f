"""The ranges of a block that differ from the same rank's block of an earlier step.

A reader that follows a rank's blocks from another host need not fetch unchanged bytes again.
"""

from __future__ import annotations

from holdfast.ckpt.errors import NotFoundError
from holdfast.ckpt.native.sums import SUM_BYTES, Flags, Sums, same_runs, set_runs, sums_of
from holdfast.ckpt.sidecar.core.core import Core, Op
from holdfast.ckpt.sidecar.core.messages import AskChanged
from holdfast.ckpt.sidecar.core.slots import Slot
from holdfast.ckpt.transport import Request


class Differences:
    """Compares blocks that this node holds."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def ops(self) -> dict[str, Op]:
        """Return the operations of this part."""
        return {"changed": (AskChanged, self._changed)}

    def _changed(self, request: Request, body: AskChanged) -> None:
        core = self._core
        new = core.slots.holding((body.generation, body.step, body.rank))
        old = core.slots.holding((body.base_generation, body.base_step, body.rank))
        if new is None:
            raise NotFoundError(
                f"node {core.node} has no block of rank {body.rank}, step {body.step}, generation "
                f"{body.generation}: it was released or lost; locate the step again"
            )
        if old is None:
            request.reply(None)
            return
        core.slots.pin(new)
        core.slots.pin(old)

        def compare() -> None:
            try:
                same = same_runs(new.view(), _sums(new), old.view(), _sums(old))
                found = _ranges(same, nbytes=new.view().nbytes)
            finally:
                core.unpin(new, old)
            request.reply(found)

        core.submit(request, compare)


def _sums(slot: Slot) -> Sums:
    """Return a block's sums; computed where an earlier process sealed it."""
    return sums_of(slot.view()) if slot.sums is None else slot.sums


def _ranges(same: Flags, *, nbytes: int) -> list[tuple[int, int]]:
    """Return the bytes of the runs that differ, as ``(offset, length)``."""
    return [
        (low * SUM_BYTES, min(high * SUM_BYTES, nbytes) - low * SUM_BYTES)
        for low, high in set_runs(~same)
    ]
