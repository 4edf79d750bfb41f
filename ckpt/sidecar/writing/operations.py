"""Operations of workers that write: acquire, seal, abandon, and wait for protection."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from time import monotonic

from holdfast.ckpt.errors import (
    BudgetError,
    CapacityError,
    CkptError,
    FencedError,
    GivenUpError,
    MismatchError,
    NotFoundError,
)
from holdfast.ckpt.memory.block import (
    SlotState,
    block_bytes,
    check_block,
    check_sealed,
    check_since,
)
from holdfast.ckpt.memory.records import BlockEntry, SnapshotWorld
from holdfast.ckpt.memory.target import CheckpointTarget
from holdfast.ckpt.native.sums import Sums
from holdfast.ckpt.sidecar.core.book import SnapshotPhase
from holdfast.ckpt.sidecar.core.core import Core, Op, Waiter
from holdfast.ckpt.sidecar.core.lease_page import LeasePage
from holdfast.ckpt.sidecar.core.messages import (
    Abandon,
    Acquire,
    Await,
    FenceSnapshots,
    Seal,
    SlotGrant,
    unparse,
)
from holdfast.ckpt.sidecar.core.slots import BlockKey, BlockSize, Slot
from holdfast.ckpt.sidecar.writing.room import SlotRoom
from holdfast.ckpt.sidecar.writing.spares import Spares
from holdfast.ckpt.transport import Request

OVERTAKEN_S = 1.0
"""The wait of a rank for a slot before slots of overtaken steps are released.

Such steps have newer ones protected before them; mostly they are only a little late.
"""


class WriteOperations:
    """Grants slots and takes them back, at most ``keep + 2`` in use per rank of a generation.

    The limit is one less in the smaller mode (see `SlotRoom`), and one more while a checkpoint is
    being written from one of them and the declared budget holds it. ``on_sealed(entry, persist)``
    and ``on_abandoned(generation, step)`` tell the group. ``lease``, where the node holds one,
    limits the time in which the node may act: past it nothing is granted or sealed.
    """

    def __init__(
        self,
        core: Core,
        room: SlotRoom,
        *,
        on_sealed: Callable[[BlockEntry, CheckpointTarget | None], None],
        on_abandoned: Callable[[int, int], None],
        lease: LeasePage | None = None,
    ) -> None:
        self._core, self._room, self._lease = core, room, lease
        self._on_sealed, self._on_abandoned = on_sealed, on_abandoned
        self._creating: set[BlockKey] = set()
        self._over = 0
        self._spares = Spares(core, room, check=self._check_standing)

    def ops(self) -> dict[str, Op]:
        """Return the operations of this part."""
        return {
            "acquire": (Acquire, self._acquire),
            "seal": (Seal, self._seal),
            "abandon": (Abandon, self._abandon),
            "fence": (FenceSnapshots, self._end),
            "protected_step": (Await, self._protected_step),
        }

    def adopted(self) -> None:
        """Take away what older generations were still writing."""
        for slot in self._core.slots.all():
            if slot.state is SlotState.WRITING:
                self._core.slots.discard(slot)

    def _end(self, request: Request, body: FenceSnapshots) -> None:
        """Refuse requests that wait for a slot of a generation that is over.

        Written slots may still be sealed and protected, until the inventory is taken.
        """
        self._over = max(self._over, body.generation)
        request.reply()
        self._core.changed()

    def _check_begin(self, generation: int, rank: int) -> None:
        self._check_standing(generation)
        self._check(generation, rank)

    def _check_standing(self, generation: int) -> None:
        """Raise ``FencedError`` when a generation is known to be over; needs no lock."""
        if generation <= self._over:
            raise FencedError(f"generation {generation} is over; take part in the next one")

    def _check_lease(self, generation: int) -> None:
        if self._lease is not None and self._lease.expired:
            raise FencedError(
                f"the lease of node {self._core.node} ran out in generation {generation}: others "
                "may go on without it; take part in the next one"
            )

    def _check(self, generation: int, rank: int) -> SnapshotWorld:
        self._check_lease(generation)
        world = self._core.book.require_open(generation)
        if not 0 <= rank < len(world.rank_nodes) or world.rank_nodes[rank] != self._core.node:
            raise MismatchError(
                f"rank {rank} has no place on node {self._core.node} in generation {generation}"
            )
        return world

    def _acquire(self, request: Request, body: Acquire) -> None:
        core = self._core
        self._check_begin(body.generation, body.rank)
        key = (body.generation, body.step, body.rank)
        if core.slots.holding(key):
            raise MismatchError(f"step {body.step} is already sealed; snapshot a later one")

        began_s = monotonic()
        patience_s = min(body.patience_s, OVERTAKEN_S)

        def attempt() -> bool:
            self._check_begin(body.generation, body.rank)
            if core.book.is_gone(key[:2]):
                raise _given_up(body.step)
            lends = monotonic() >= began_s + patience_s
            try:
                return self._grant(request, body, key, lends=lends)
            except BudgetError:
                raise
            except CapacityError as error:
                self._leave_out(key, error)
                raise

        def expire() -> None:
            slots = [slot for slot in core.slots.all() if slot.key and slot.key[2] == body.rank]
            steps = sorted(slot.key[1] for slot in slots if slot.key)
            error = CapacityError(
                f"no slot became free within {body.timeout_s:g} s: rank {body.rank} has "
                f"{len(slots)} in use (steps {steps}, newest protected "
                f"{core.book.newest(SnapshotPhase.PROTECTED)}); snapshot less often, or see why "
                "peers do not answer"
            )
            self._leave_out(key, error)
            raise error

        def wait(seconds: float, then: Callable[[], None]) -> None:
            deadline_s = began_s + min(seconds, body.timeout_s)
            core.wait(Waiter(request=request, deadline_s=deadline_s, attempt=attempt, expire=then))

        def look_again() -> None:
            core.apply(core.book.give_up_overtaken())
            wait(body.timeout_s, expire)

        def lend() -> None:
            wait(OVERTAKEN_S, look_again)

        wait(patience_s, lend) if patience_s > 0 else lend()

    def _grant(self, request: Request, body: Acquire, key: BlockKey, *, lends: bool) -> bool:
        """Reply with a slot if there is one; ``lends`` allows to make one beyond the regular."""
        core = self._core
        if slot := core.slots.writing(key):
            self._reply_grant(request, slot)
            return True
        size = BlockSize(nbytes=body.size_bytes, fixed=body.fixed)
        self._room.admit(body.rank, size)
        core.slots.want_fixed(body.rank, size)
        pending = sum(other[2] == body.rank for other in self._creating)
        persisting = sum(
            bool(slot.persisting and slot.key and slot.key[2] == body.rank)
            for slot in core.slots.all()
        )
        used = core.slots.used(body.generation, body.rank) + pending - persisting
        if key in self._creating or used >= self._room.slots_per_rank:
            return False
        if slot := core.slots.take_free(size, rank=body.rank):
            self._begin(request, slot, key)
            return True
        is_regular = used < self._room.regular_slots
        if self._spares.is_coming(size) or not (is_regular or lends):
            return False
        if not self._room.make_room(size):
            return False
        if not is_regular:
            self._room.lend()
        self._creating.add(key)
        self._room.begin(size)
        core.submit(request, lambda: self._create(request, size, key))
        return True

    def _create(self, request: Request, size: BlockSize, key: BlockKey) -> None:
        core = self._core
        try:
            file = core.arena.create(
                size.nbytes, fixed=size.fixed, check=lambda: self._check_standing(key[0])
            )
        except BaseException as error:
            with core.lock:
                self._created(size, key)
                if isinstance(error, CapacityError):
                    self._leave_out(key, error)
            raise
        with core.lock:  # not released before the slot is taken: others look for free ones
            self._created(size, key)
            slot = core.slots.add(file)
            try:
                self._check_begin(key[0], key[2])
            except CkptError:
                core.slots.discard(slot)
                raise
            self._begin(request, slot, key)
            core.changed()

    def _created(self, size: BlockSize, key: BlockKey) -> None:
        self._creating.discard(key)
        self._room.end(size)

    def _begin(self, request: Request, slot: Slot, key: BlockKey) -> None:
        self._core.slots.begin(slot, key)
        self._room.granted(key[2])
        self._reply_grant(request, slot)

    def _leave_out(self, key: BlockKey, error: CapacityError) -> None:
        """Record a step for which one rank has no room, so that no rank waits for it."""
        self._room.refuse(str(error))
        with contextlib.suppress(FencedError, NotFoundError):
            self._core.book.require_open(key[0])
            self._give_up(key[:2])

    def _reply_grant(self, request: Request, slot: Slot) -> None:
        free = [each for each in self._core.slots.all() if each.state is SlotState.EMPTY]
        ahead = tuple(
            str(each.file.path)
            for each in free
            if each.file.fixed_name == slot.file.fixed_name
            and each.file.capacity >= slot.file.capacity
        )
        grant = SlotGrant(
            slot_id=slot.number,
            path=str(slot.file.path),
            capacity=slot.file.capacity,
            ahead=ahead,
            has_fixed=self._core.slots.has_fixed(slot.file),
            before=slot.before,
        )
        request.reply(unparse(grant))

    def _seal(self, request: Request, body: Seal) -> None:
        core, entry = self._core, body.entry
        self._check(entry.generation, entry.rank)
        slot = core.slots.get(body.slot_id)
        key = (entry.generation, entry.step, entry.rank)
        if slot.entry == entry:
            request.reply()  # repeated after a lost answer
            return
        if slot.key != key or slot.state is not SlotState.WRITING or slot.busy:
            raise CkptError(
                f"slot {slot.number} is {slot.state.name} for (generation, step, rank) {slot.key}, "
                f"not being written for {key}"
            )
        if (named := BlockSize.of(entry).fixed_name) != slot.file.fixed_name:
            raise MismatchError(
                f"slot {slot.number} begins with fixed part {slot.file.fixed_name!r}, the block "
                f"with {named!r}"
            )
        block = slot.file.block(block_bytes(entry))  # stays mapped if the slot is discarded
        slot.busy = True
        core.submit(request, lambda: self._verify(request, slot, body, block))

    def _verify(self, request: Request, slot: Slot, body: Seal, block: memoryview) -> None:
        core, entry = self._core, body.entry
        key = (entry.generation, entry.step)
        failed: CkptError | None = None
        try:
            with core.meters.timed("seal", block.nbytes - slot.file.fixed_bytes):
                slot.sums = self._check_block(request, block, entry, slot)
                slot.since = check_since(request.frames[1:], entry, slot.file.path.name)
        except CkptError as error:
            failed = error
        with core.lock:
            slot.busy = False
            core.book.require_open(entry.generation)
            self._check_lease(entry.generation)
            if slot.key is None:
                raise FencedError(f"generation {entry.generation} is over")
            if failed or core.book.is_gone(key):
                core.counters["seals_refused"] += 1
                core.slots.release(slot)
                if failed:
                    self._give_up(key)
                core.changed()
                raise failed or _given_up(entry.step)
            core.slots.seal(slot, entry)
            self._on_sealed(entry, body.persist)
            core.apply(core.book.seal(entry))
            self._room.trim()
            self._spares.sealed()
        request.reply()

    def _check_block(
        self, request: Request, block: memoryview, entry: BlockEntry, slot: Slot
    ) -> Sums:
        """Return the block's sums: the writer's, after a check of a sample, or new ones."""
        origin = slot.file.path.name
        if not request.frames:
            return check_block(block, entry, origin=origin).sums
        with self._core.lock:
            fixed = self._core.slots.fixed_sums(slot.file)
        sums = request.frames[0]
        return check_sealed(block, entry, sums, turn=entry.step, origin=origin, fixed=fixed)

    def _abandon(self, request: Request, body: Abandon) -> None:
        core = self._core
        slot = core.slots.get(body.slot_id)
        if slot.state is SlotState.WRITING and slot.key is not None and not slot.busy:
            key = slot.key[:2]
            core.slots.release(slot)
            self._give_up(key)
        request.reply()

    def _give_up(self, key: tuple[int, int]) -> None:
        if self._core.book.is_closed:
            return  # the whole generation is over
        self._on_abandoned(*key)
        self._core.apply(self._core.book.give_up(key))

    def _protected_step(self, request: Request, body: Await) -> None:
        core = self._core
        generation = core.book.generation if body.generation is None else body.generation

        def newest() -> int:
            core.book.require(generation)
            return core.book.newest(SnapshotPhase.PROTECTED, generation=generation)

        def attempt() -> bool:
            if generation > core.book.generation and body.timeout_s > 0:
                return False  # the agent will soon adopt it
            step = newest()
            if body.at_least is not None and step < body.at_least and body.timeout_s > 0:
                return False
            request.reply(step)
            return True

        def expire() -> None:
            request.reply(newest())

        deadline_s = monotonic() + body.timeout_s
        core.wait(Waiter(request=request, deadline_s=deadline_s, attempt=attempt, expire=expire))


def _given_up(step: int) -> GivenUpError:
    return GivenUpError(f"step {step} was given up by another rank; go on with a later one")
