"""Operations of readers: locate, open, read, list holdings, take an inventory.

Nothing is verified ahead of time: every reader checks the bytes it copies or decodes. A damaged
block is rebuilt, or an older point is used. All ranks wait for an inventory, so it must be quick.
"""

from __future__ import annotations

from itertools import accumulate

from holdfast.ckpt.errors import CorruptError, MismatchError, NotFoundError
from holdfast.ckpt.memory.block import block_bytes, verify_block
from holdfast.ckpt.memory.records import BlockSource, Inventory, RestorePoint
from holdfast.ckpt.native.isal import crc32c
from holdfast.ckpt.sidecar.core.core import Core, Op
from holdfast.ckpt.sidecar.core.messages import (
    Distrust,
    Key,
    Locate,
    Nothing,
    OpenBlock,
    Opened,
    Read,
    ReadRow,
    RolledBack,
    unparse,
)
from holdfast.ckpt.sidecar.core.slots import Slot
from holdfast.ckpt.sidecar.core.wire import PART_BYTES
from holdfast.ckpt.sidecar.parity.rows import Parities
from holdfast.ckpt.sidecar.reading.holdings import holdings_of
from holdfast.ckpt.sidecar.reading.rebuild import Rebuild
from holdfast.ckpt.transport import Request


class ReadOperations:
    """Serves blocks and parity rows; ``rebuild`` serves lost blocks."""

    def __init__(
        self,
        core: Core,
        parities: Parities,
        *,
        rebuild: Rebuild,
    ) -> None:
        self._core, self._parities, self._rebuild = core, parities, rebuild

    def ops(self) -> dict[str, Op]:
        """Return the operations of this part."""
        return {
            "locate": (Locate, self._locate),
            "open": (OpenBlock, self._open),
            "read": (Read, self._read),
            "row": (ReadRow, self._read_row),
            "holdings": (Key, self._holdings),
            "inventory": (Nothing, self._inventory),
            "distrust": (Distrust, self._distrust),
            "roll_back": (RolledBack, self._roll_back),
        }

    def _locate(self, request: Request, body: Locate) -> None:
        core = self._core
        snapshot = core.book.find(body.step, generation=body.generation)
        world = snapshot.world
        now = {peer.node: peer.address for peer in (core.book.world or world).peers}
        then = {peer.node: peer.address for peer in world.peers}
        live = sorted({*now, core.node})
        sources = []
        for rank, node in enumerate(world.rank_nodes):
            gone = node not in live
            sources.append(
                BlockSource(
                    rank=rank,
                    node=live[rank % len(live)] if gone else node,
                    rebuilt=gone or now.get(node, then[node]) != then[node],
                )
            )
        point = RestorePoint(world=world, step=snapshot.step, sources=tuple(sources))
        request.reply(unparse(point))

    def _open(self, request: Request, body: OpenBlock) -> None:
        slot = self._core.slots.holding((body.world.generation, body.step, body.rank))

        def answer(found: Slot) -> None:
            if found.entry is None:
                raise NotFoundError(f"the block of rank {body.rank} was released meanwhile")
            opened = Opened(
                path=str(found.file.path),
                payload_bytes=found.entry.payload_bytes,
                on_disk=found.file.path.parent != self._core.arena.directory,
                host=self._core.host,
            )
            request.reply(unparse(opened), [bytes(found.file.index_view(found.entry))])

        if slot is not None:
            answer(slot)
        elif body.rebuilt and body.in_parts:
            self._rebuild.request_index(body, answer, request)
        elif body.rebuilt:
            self._rebuild.request(body, answer, request)
        else:
            raise self._not_held(body.world.generation, body.step, body.rank)

    def _distrust(self, request: Request, body: Distrust) -> None:
        core = self._core
        slot = core.slots.holding((body.generation, body.step, body.rank))
        if slot is None:
            request.reply(False)
            return
        core.slots.pin(slot)

        def check() -> None:
            damaged = not is_intact(slot)
            with core.lock:
                core.counters["distrusted"] += 1
                if damaged:
                    core.counters["corrupt_blocks"] += 1
                    slot.leaving = True
                core.slots.unpin(slot)
                core.changed()
            request.reply(damaged)

        core.submit(request, check)

    def _roll_back(self, request: Request, body: RolledBack) -> None:
        core = self._core
        core.book.require(body.generation)
        core.apply(core.book.roll_back(body.restore))
        request.reply()

    def _not_held(self, generation: int, step: int, rank: int) -> NotFoundError:
        return NotFoundError(
            f"node {self._core.node} has no block of rank {rank}, step {step}, generation "
            f"{generation}: it was released or lost; locate the step again"
        )

    def _read(self, request: Request, body: Read) -> None:
        if sum(max(nbytes, 0) for _, nbytes in body.ranges) > PART_BYTES:
            raise MismatchError(f"more than {PART_BYTES:,} bytes of a block; ask for less at once")
        slot = self._core.slots.holding((body.generation, body.step, body.rank))
        if slot is not None:
            self._read_slot(request, body, slot)
        elif not self._rebuild.read(body, lambda at: self._read_slot(request, body, at), request):
            raise self._not_held(body.generation, body.step, body.rank)

    def _read_slot(self, request: Request, body: Read, slot: Slot) -> None:
        core = self._core
        if slot.entry is None:
            raise self._not_held(body.generation, body.step, body.rank)
        limit = block_bytes(slot.entry)
        for at, nbytes in body.ranges:
            if at < 0 or nbytes < 0 or at + nbytes > limit:
                raise NotFoundError(f"bytes {at}+{nbytes} are outside the block of {limit:,} bytes")
        core.slots.pin(slot)

        def send() -> None:
            try:
                with core.meters.timed("serve", sum(nbytes for _, nbytes in body.ranges)):
                    view = slot.view()
                    parts = [view[at : at + nbytes] for at, nbytes in body.ranges]
                    if request.seals_at_once and len(parts) == 1:  # from the slot itself
                        request.reply([crc32c(parts[0])], parts)
                        return
                    data = b"".join(parts)
            finally:
                core.unpin(slot)
            ends = [*accumulate(nbytes for _, nbytes in body.ranges)]
            copied = memoryview(data)
            sums = [
                crc32c(copied[end - nbytes : end])
                for end, (_, nbytes) in zip(ends, body.ranges, strict=True)
            ]
            request.reply(sums, [data])

        core.submit(request, send)

    def _read_row(self, request: Request, body: ReadRow) -> None:
        row = self._parities.get((body.generation, body.step), (body.stripe, body.row))
        if row is None or min(body.at, body.nbytes) < 0 or body.at + body.nbytes > row.nbytes:
            raise NotFoundError(
                f"node {self._core.node} has no parity row {body.row} of stripe {body.stripe}, "
                f"step {body.step}, generation {body.generation}"
            )

        def copy() -> None:
            with row.lock:
                part = row.part(body.at, body.nbytes)
            request.reply([crc32c(part)], [part])

        self._core.submit(request, copy)

    def _holdings(self, request: Request, body: Key) -> None:
        request.reply(unparse(holdings_of(self._core, self._parities, body)))

    def _inventory(self, request: Request, body: Nothing) -> None:
        core = self._core
        core.book.close()
        snapshots = core.book.snapshots
        slots = [slot for slot in core.slots.all() if slot.entry and slot.key and not slot.leaving]
        blocks = [slot.entry for slot in slots if slot.key and slot.key[:2] in snapshots]
        worlds = {each.world.generation: each.world for each in snapshots.values()}
        parities = [row.entry for row in self._parities.sealed()]
        inventory = Inventory(
            node=core.node,
            worlds=tuple(worlds[number] for number in sorted(worlds)),
            blocks=tuple(entry for entry in blocks if entry),
            parities=tuple(entry for entry in parities if entry.generation in worlds),
            sealed=tuple(entry for each in snapshots.values() for entry in each.entries.values()),
            spoiled=tuple(entry for entry in core.spoiled if entry.generation in worlds),
            durable=core.durable,
        )
        request.reply(unparse(inventory))


def is_intact(slot: Slot) -> bool:
    """Say whether every byte of a slot's block matches its checksums."""
    if slot.entry is None:
        return False
    try:
        verify_block(slot.view(), slot.entry, origin=slot.file.path.name)
    except CorruptError:
        return False
    return True
