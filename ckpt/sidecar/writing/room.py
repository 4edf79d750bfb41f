"""The number of slots in a node's shared memory, from the declared budget and the free memory.

A rank's *regular* slots hold the kept steps and the one that is being written, which may have to
wait until the step before is protected. In the *full mode* a rank whose training would wait is lent
one more; it goes when it was not needed for a while. In the *small mode*, where the memory does not
suffice for that, the snapshot waits. Logs have a share of the budget; their bytes are not available
for slots, and they grow into the free rest.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from holdfast.ckpt.errors import BudgetError, CapacityError
from holdfast.ckpt.memory.arena import slot_capacity
from holdfast.ckpt.memory.block import SlotState
from holdfast.ckpt.memory.records import SnapshotWorld
from holdfast.ckpt.native.pages import huge_pages
from holdfast.ckpt.parity.budget import (
    FULL_IN_FLIGHT,
    LOG_SHARE,
    SMALL_IN_FLIGHT,
    MemoryNeed,
    log_limit,
    memory_need,
)
from holdfast.ckpt.sidecar.core.core import Core
from holdfast.ckpt.sidecar.core.slots import BlockSize, Slot
from holdfast.ckpt.types import Json

_log = logging.getLogger(__name__)

_LENT_FOR = 64
"""The snapshots of a rank in a row that need no lent slot before lent slots are removed."""

_FIRST_GRANTS = 3
"""A rank's state that grows after this many snapshots has outgrown memory that sufficed before."""


class InFlightMode(StrEnum):
    """The number of snapshots of a rank that may be in flight."""

    FULL = "full"
    SMALL = "small"


IN_FLIGHT = {InFlightMode.FULL: FULL_IN_FLIGHT, InFlightMode.SMALL: SMALL_IN_FLIGHT}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The mode that fits, and the most memory it needs."""

    mode: InFlightMode
    need: MemoryNeed


def fit(
    world: SnapshotWorld, sizes: Mapping[int, BlockSize], *, node: str, room_bytes: int
) -> Fit | MemoryNeed:
    """Return the larger mode that fits in ``room_bytes``; if none fits, the smaller mode's need.

    ``sizes`` are those of the ranks' blocks, as far as they are known.
    """
    lengths = {rank: size.nbytes for rank, size in sizes.items()}
    fixed = {rank: size.fixed_bytes for rank, size in sizes.items()}
    for mode, in_flight in IN_FLIGHT.items():
        slots = world.keep + in_flight
        need = memory_need(world, lengths, node=node, slots_per_rank=slots, fixed_bytes=fixed)
        if need.total <= room_bytes:
            return Fit(mode=mode, need=need)
    return need


class SlotRoom:
    """The memory of this node's slots in one generation; called under the lock.

    ``parity_bytes`` and ``log_bytes`` return the bytes of parity rows and logs now.
    """

    def __init__(
        self, core: Core, *, parity_bytes: Callable[[], int], log_bytes: Callable[[], int]
    ) -> None:
        self._core, self._parity_bytes, self._log_bytes = core, parity_bytes, log_bytes
        self._lengths: dict[int, BlockSize] = {}
        self._grants: Counter[int] = Counter()
        self._calm_grants = 0
        self._coming_bytes = 0
        self._fit: Fit | None = None
        self._mode = InFlightMode.FULL
        self._refusal = self._log_refusal = ""

    @property
    def slots_per_rank(self) -> int:
        """The most slots of a rank in one generation."""
        world = self._core.book.world
        return (world.keep if world else 0) + IN_FLIGHT[self._mode]

    @property
    def regular_slots(self) -> int:
        """The slots of a rank in one generation that need no reason."""
        world = self._core.book.world
        return (world.keep if world else 0) + SMALL_IN_FLIGHT

    @property
    def lends(self) -> bool:
        """True if there is memory for one more slot of each rank than the regular ones."""
        return self._mode is InFlightMode.FULL

    def lengths(self) -> Mapping[int, BlockSize]:
        """Return the sizes of blocks that ranks of this node have requested."""
        return self._lengths

    def adopted(self, world: SnapshotWorld) -> None:
        """Begin anew with what the ranks need; free slots beyond what they may need go."""
        self._lengths, self._fit, self._mode = {}, None, InFlightMode.FULL
        self._grants.clear()
        self._core.in_flight = FULL_IN_FLIGHT
        self._core.slots.forget_wanted()
        ranks = world.rank_nodes.count(self._core.node)
        free = self._free_slots()
        for slot in free[: max(0, len(self._core.slots.all()) - ranks * self.slots_per_rank)]:
            self._core.slots.discard(slot)

    def admit(self, rank: int, size: BlockSize) -> None:
        """Record the size of a rank's blocks.

        If memory can never suffice, raises ``BudgetError`` at the start of a job and
        ``CapacityError`` later: training that runs well is worth more than its snapshots.
        """
        wanted = BlockSize(nbytes=slot_capacity(size.nbytes), fixed=size.fixed)
        if (before := self._lengths.get(rank)) == wanted:
            return
        self._lengths[rank] = wanted
        world = self._core.book.world
        assert world is not None
        found = fit(world, self._known(world), node=self._core.node, room_bytes=self._room(world))
        if isinstance(found, Fit):
            self._enter(found)
        elif not self._core.slots.all() or 0 < self._budget(world) < found.total:
            del self._lengths[rank]
            if before is not None:
                self._lengths[rank] = before
            raise self._too_little(world, found, rank=rank)
        else:  # it fitted before: continue with this memory, others may make room
            self._enter(Fit(mode=InFlightMode.SMALL, need=found))

    def _known(self, world: SnapshotWorld) -> dict[int, BlockSize]:
        """Return the known sizes of all ranks; those of peers come from their sealed blocks."""
        sizes: dict[int, BlockSize] = {}
        for key, snapshot in sorted(self._core.book.snapshots.items()):
            if key[0] == world.generation:
                sizes |= {rank: BlockSize.of(each) for rank, each in snapshot.entries.items()}
        return sizes | self._lengths

    def _room(self, world: SnapshotWorld) -> int:
        """Return the available bytes: the budget, or less where the file system has less."""
        used_bytes = self.slot_bytes() + self._parity_bytes()
        there = self._core.arena.free_bytes() + used_bytes
        return min(self._budget(world), there) if world.memory_bytes else there

    def _budget(self, world: SnapshotWorld) -> int:
        """Return the declared budget without the bytes of logs; 0 if none is declared."""
        return max(world.memory_bytes - self._log_bytes(), 1) if world.memory_bytes else 0

    def _enter(self, found: Fit) -> None:
        if found.mode is not self._mode:
            _log.warning(
                "%s: %s: up to %s bytes for slots and %s for parity",
                self._core.node,
                "the smaller mode, in which a snapshot waits until the previous one is protected"
                if found.mode is InFlightMode.SMALL
                else "the full mode",
                f"{found.need.slots:,}",
                f"{found.need.parity:,}",
            )
        self._fit, self._mode = found, found.mode
        self._core.in_flight = IN_FLIGHT[found.mode]

    def _too_little(self, world: SnapshotWorld, need: MemoryNeed, *, rank: int) -> CapacityError:
        declared = world.memory_bytes and need.total > self._budget(world)
        root = self._core.arena.directory.parent
        logs = f", of which logs hold {log_bytes:,}" if (log_bytes := self._log_bytes()) else ""
        have = (
            f"{world.memory_bytes:,} bytes are declared for a node{logs}"
            if declared
            else f"{root} has {self._core.arena.free_bytes():,} bytes free"
        )
        more = "declare more" if declared else "enlarge it (mount -o remount,size=...)"
        kind = BudgetError if self._is_start(world, rank) else CapacityError
        return kind(
            f"node {self._core.node} needs {need.total:,} bytes of shared memory even in the "
            f"smaller mode ({need.slots:,} for slots with keep={world.keep}, {need.parity:,} for "
            f"parity={world.parity}) and {have}: {more}, keep fewer snapshots (keep=1), use less "
            "parity, or spread the ranks over more nodes"
        )

    def _is_start(self, world: SnapshotWorld, rank: int) -> bool:
        """Say whether the job has just begun: optimizers make their state in the first steps."""
        return world.generation <= 1 and self._grants[rank] < _FIRST_GRANTS

    # -- one more slot ---------------------------------------------------------------------------

    def slot_bytes(self) -> int:
        """Return the size of all slot files."""
        return self._core.slots.nbytes()

    def holds(self, size: BlockSize) -> bool:
        """Return whether the budget allows one more slot for ``size``."""
        world = self._core.book.world
        if world is None or not world.memory_bytes or self._fit is None:
            return True
        allowed = world.memory_bytes - self._fit.need.parity - self._log_bytes()
        wanted = size.file_bytes
        if size.fixed_name not in {slot.file.fixed_name for slot in self._core.slots.all()}:
            wanted += size.fixed_bytes
        return self.slot_bytes() + self._coming_bytes + wanted <= allowed

    def begin(self, size: BlockSize) -> None:
        """Count a slot that is being made."""
        self._coming_bytes += size.file_bytes

    def end(self, size: BlockSize) -> None:
        """Stop counting it: the slot is in the table, or was not made."""
        self._coming_bytes -= size.file_bytes

    def trim(self) -> None:
        """Remove free slots that fit no rank's state, once all ranks have requested one.

        Remove also the lent ones that nobody needed for a while.
        """
        world = self._core.book.world
        ranks = world.rank_nodes.count(self._core.node) if world else 0
        if world is None or len(self._lengths) < ranks:
            return
        for slot in self._free_slots():
            if not any(size.fits(slot.file) for size in self._lengths.values()):
                self._core.slots.discard(slot)
        if self._calm_grants >= _LENT_FOR * ranks:
            keys = [slot.key for slot in self._core.slots.all()]
            present = sum(key is None or key[0] == world.generation for key in keys)
            beyond = present - ranks * self.regular_slots
            for slot in self._free_slots()[: max(0, beyond)]:
                self._core.slots.discard(slot)

    def lend(self) -> None:
        """Record that a rank could not wait for a regular slot."""
        self._calm_grants = 0
        self._core.counters["slots_lent"] += 1

    def make_room(self, size: BlockSize) -> bool:
        """Remove free slots, and snapshots beyond the budget; return whether one more slot fits.

        Of older generations only the newest snapshot has to stay: the one restored from.
        """
        self.trim()
        for slot in self._free_slots():
            if self.holds(size):
                return True
            self._core.slots.discard(slot)
        while not self.holds(size) and (released := self._core.book.shed()):
            self._core.apply(released)
            for slot in self._free_slots():
                self._core.slots.discard(slot)
        return self.holds(size)

    def make_room_for_rebuilt(self, size: BlockSize) -> None:
        """Remove free slots until the budget holds one more, for a rebuilt block.

        If that is not enough, the slot is made nevertheless: the state is worth more than the
        budget.
        """
        world = self._core.book.world
        budget = world.memory_bytes if world else 0
        wanted = size.file_bytes + self._coming_bytes
        free = self._free_slots()
        beside = self._parity_bytes() + self._log_bytes()
        while budget and self.slot_bytes() + beside + wanted > budget:
            if not free:
                _log.warning(
                    "%s: a lost block of %s bytes is rebuilt beyond the budget of %s bytes",
                    self._core.node,
                    f"{size.nbytes:,}",
                    f"{budget:,}",
                )
                return
            self._core.slots.discard(free.pop(0))

    def _free_slots(self) -> list[Slot]:
        free = [
            slot
            for slot in self._core.slots.all()
            if slot.state is SlotState.EMPTY and slot.key is None and not slot.busy
        ]
        return sorted(free, key=lambda slot: slot.file.capacity)

    # -- logs --------------------------------------------------------------------------------------

    def log_limit(self) -> int:
        """Return the most bytes of all logs at once."""
        world = self._core.book.world
        return log_limit(world.memory_bytes if world else 0)

    def admit_log(self, nbytes: int) -> None:
        """Let logs grow by ``nbytes``, switching to the smaller mode if necessary.

        Raises ``CapacityError`` if their share, or the rest beside slots and parity, is used up.
        """
        log_bytes, world = self._log_bytes(), self._core.book.world
        memory = f"memory={world.memory_bytes:,}" if world and world.memory_bytes else ""
        if log_bytes + nbytes > (limit := self.log_limit()):
            part = f"one part in {LOG_SHARE} of {memory}" if memory else "as much as a node's logs"
            self._refuse_log(f"hold {log_bytes:,} bytes and may hold {limit:,}, {part}")
        elif world is not None and memory and self._fit is not None:
            self._fit_log(world, log_bytes + nbytes, memory)
        self._log_refusal = ""

    def _fit_log(self, world: SnapshotWorld, log_bytes: int, memory: str) -> None:
        left = world.memory_bytes - log_bytes
        found = fit(world, self._known(world), node=self._core.node, room_bytes=left)
        if not isinstance(found, Fit):
            self._refuse_log(
                f"would hold {log_bytes:,} bytes, and slots and parity need {found.total:,} of "
                f"{memory}"
            )
            return
        if IN_FLIGHT[found.mode] < IN_FLIGHT[self._mode]:
            self._enter(found)
        for slot in self._free_slots():
            if self.slot_bytes() + self._coming_bytes + found.need.parity <= left:
                return
            self._core.slots.discard(slot)
        if self.slot_bytes() + self._coming_bytes + found.need.parity > left:
            self._refuse_log(f"would hold {log_bytes:,} bytes, and no slot of {memory} is free yet")

    def _refuse_log(self, found: str) -> None:
        self._log_refusal = (
            f"the logs of node {self._core.node} {found}: truncate what has been consumed, drop "
            "what was taken over, or raise memory="
        )
        self._core.counters["log_refused"] += 1
        raise CapacityError(self._log_refusal)

    # -- reports to others -------------------------------------------------------------------------

    def refuse(self, reason: str) -> None:
        """Record that a snapshot found no room."""
        if not self._refusal:
            _log.warning("%s: snapshots are skipped: %s", self._core.node, reason)
        self._core.counters["left_out"] += 1
        self._refusal = reason

    def granted(self, rank: int) -> None:
        """Record that a snapshot of ``rank`` found room."""
        self._grants[rank] += 1
        self._calm_grants += 1
        if self._refusal:
            _log.warning("%s: there is room for snapshots again", self._core.node)
        self._refusal = ""

    def status(self) -> dict[str, Json]:
        """Return the mode, the need in bytes, the reasons of refusals, limits, and huge pages."""
        need = self._fit.need.total if self._fit else 0
        return {
            "memory": {
                "mode": self._mode.value,
                "need_bytes": need,
                "left_out": self._refusal or None,
                "logs_most_bytes": self.log_limit(),
                "logs_refused": self._log_refusal or None,
                "huge_pages": huge_pages(),
            }
        }
