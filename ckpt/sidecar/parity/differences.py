"""The ranges of a block that differ from the same rank's block of an earlier step.

A reader that follows a rank's blocks from another host need not fetch unchanged bytes again. The
sidecar keeps the block that was followed last, although its step was released, until the reader
asks for another or was silent for long. In the smaller mode there is no memory for that.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic

from holdfast.ckpt.errors import NotFoundError
from holdfast.ckpt.native.sums import SUM_BYTES, Flags, Sums, set_runs, sums_of
from holdfast.ckpt.sidecar.core.core import Core, Op
from holdfast.ckpt.sidecar.core.messages import AskChanged, Follow
from holdfast.ckpt.sidecar.core.slots import BlockKey, Slot, same_blocks
from holdfast.ckpt.sidecar.writing.room import SlotRoom
from holdfast.ckpt.transport import Request

FOLLOWED_S = 15.0
"""The silence after which a reader is taken to follow no more."""


@dataclass(slots=True, kw_only=True)
class _Followed:
    """The block that a reader of a rank has; its slot is pinned."""

    key: BlockKey
    slot: Slot
    until_s: float


class Differences:
    """Compares blocks that this node holds; called under the lock."""

    def __init__(self, core: Core, room: SlotRoom) -> None:
        self._core, self._room = core, room
        self._followed: dict[int, _Followed] = {}

    def ops(self) -> dict[str, Op]:
        """Return the operations of this part."""
        return {"changed": (AskChanged, self._changed), "follow": (Follow, self._follow)}

    def adopted(self) -> None:
        """Keep no block for a reader any more: a generation began."""
        for rank in list(self._followed):
            self._let_go(rank)

    def tick(self) -> None:
        """Let go of the blocks whose readers were silent for long."""
        with self._core.lock:
            now_s = monotonic()
            for rank, followed in list(self._followed.items()):
                if followed.until_s <= now_s or not self._room.lends:
                    self._let_go(rank)

    def _let_go(self, rank: int) -> None:
        self._core.unpin(self._followed.pop(rank).slot)

    def _follow(self, request: Request, body: Follow) -> None:
        key = (body.generation, body.step, body.rank)
        slot, before = self._held(key), self._followed.get(body.rank)
        if self._room.lends and slot is not None:
            self._core.slots.pin(slot)
            until_s = monotonic() + FOLLOWED_S
            self._followed[body.rank] = _Followed(key=key, slot=slot, until_s=until_s)
            if before is not None:
                self._core.unpin(before.slot)
        request.reply()

    def _held(self, key: BlockKey) -> Slot | None:
        followed = self._followed.get(key[2])
        if followed is not None and followed.key == key:
            return followed.slot
        return self._core.slots.holding(key)

    def _changed(self, request: Request, body: AskChanged) -> None:
        core = self._core
        new = self._held((body.generation, body.step, body.rank))
        old = self._held((body.base_generation, body.base_step, body.rank))
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
                same = same_blocks(new, _sums(new), old, _sums(old))
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
