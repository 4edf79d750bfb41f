"""The slots of one node: which are free, which hold a block, which are in use.

Not thread-safe by itself: the server calls it under its lock. Only the creation of a slot is slow;
it happens outside, in `Arena.create`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from holdfast.ckpt.errors import CkptError
from holdfast.ckpt.memory.arena import (
    Arena,
    FixedPart,
    SlotFile,
    SlotHeader,
    has_little_room,
    slot_capacity,
)
from holdfast.ckpt.memory.block import SlotState, block_bytes
from holdfast.ckpt.memory.fixed_files import HEADER_BYTES
from holdfast.ckpt.memory.records import BlockEntry
from holdfast.ckpt.native.sums import SUM_BYTES, Flags, Lengths, Sums, same_runs
from holdfast.ckpt.sidecar.core.book import SlotEvent, SnapshotKey, move_slot

BlockKey: TypeAlias = tuple[int, int, int]
"""(generation, step, rank)."""

_SLACK = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSize:
    """The length of a rank's blocks, and the fixed part with which they begin."""

    nbytes: int
    fixed: FixedPart | None = None

    @classmethod
    def of(cls, entry: BlockEntry) -> BlockSize:
        """Return the size of a sealed block."""
        fixed = FixedPart(
            generation=entry.generation,
            rank=entry.rank,
            number=entry.fixed,
            nbytes=entry.fixed_bytes,
        )
        return cls(nbytes=block_bytes(entry), fixed=fixed if entry.fixed_bytes else None)

    @property
    def fixed_bytes(self) -> int:
        """The length of the fixed part."""
        return self.fixed.nbytes if self.fixed is not None else 0

    @property
    def fixed_name(self) -> str:
        """The name of the fixed part, "" for none."""
        return self.fixed.name if self.fixed is not None else ""

    @property
    def file_bytes(self) -> int:
        """The length of the file of a slot for it."""
        return HEADER_BYTES + slot_capacity(self.nbytes - self.fixed_bytes)

    def fits(self, file: SlotFile) -> bool:
        """Return whether a slot holds the block and wastes at most a quarter of its own part."""
        return self._fits(file.fixed_name, file.file_bytes - HEADER_BYTES)

    def is_like(self, other: BlockSize) -> bool:
        """Return whether a slot made for ``other`` fits."""
        return self._fits(other.fixed_name, other.file_bytes - HEADER_BYTES)

    def _fits(self, fixed: str, capacity: int) -> bool:
        wanted = slot_capacity(self.nbytes - self.fixed_bytes)
        return fixed == self.fixed_name and wanted <= capacity <= wanted + wanted // _SLACK


@dataclass(slots=True, kw_only=True, eq=False)
class Slot:
    """A slot and its contents; ``pins`` counts the readers that rely on its bytes.

    ``persisting`` counts the threads that write it to a store or disk. A ``borrowed`` file is on a
    disk; it is never written to or removed. ``sums`` are those of the block, where this process
    verified it. ``since`` are the steps since which each of its runs is the same in all blocks of
    its rank in its generation, as the writer says. ``before`` is the block written there before.
    """

    number: int
    file: SlotFile
    state: SlotState = SlotState.EMPTY
    key: BlockKey | None = None
    entry: BlockEntry | None = None
    pins: int = 0
    leaving: bool = False
    busy: bool = False
    persisting: int = 0
    borrowed: bool = False
    sums: Sums | None = None
    since: Lengths | None = None
    last: BlockKey | None = None
    before: BlockKey | None = None

    def view(self) -> memoryview:
        """Return the bytes of the block held."""
        if self.entry is None:
            raise CkptError(f"slot {self.number} is {self.state.name}: nothing to read")
        return self.file.block(block_bytes(self.entry))


def same_blocks(new: Slot, new_sums: Sums, old: Slot, old_sums: Sums) -> Flags:
    """Return the runs of ``new``'s block that have the very same bytes as those of ``old``'s.

    The runs of a fixed part that both name are not looked at: they are the same memory. Nor are
    those of which the writer says that they are the same.
    """
    alike = new.file.fixed_name == old.file.fixed_name
    known: Flags = np.zeros(len(new_sums), dtype=np.bool_)
    known[: new.file.fixed_bytes // SUM_BYTES if alike else 0] = True
    if new.since is not None and new.key and old.key and new.key[::2] == old.key[::2]:
        known |= new.since <= old.key[1]
    known[len(old_sums) :] = False
    return same_runs(new.view(), new_sums, old.view(), old_sums, known=known)


class Slots:
    """The table of slots.

    ``unmap`` unmaps a file that was removed; it takes long, and need not be done at once.
    """

    def __init__(
        self, arena: Arena, *, unmap: Callable[[SlotFile], object] = SlotFile.close
    ) -> None:
        self._arena, self._unmap = arena, unmap
        self._table: dict[int, Slot] = {}
        self._next = 1
        self._wanted: dict[int, str] = {}
        self._sealed_fixed: dict[str, Sums | None] = {}
        self.corrupt = 0

    def all(self) -> list[Slot]:
        """Return every slot."""
        return list(self._table.values())

    def add(self, file: SlotFile) -> Slot:
        """Enter a new file in the table."""
        slot = Slot(number=self._next, file=file)
        self._table[slot.number] = slot
        self._next += 1
        return slot

    def get(self, number: int) -> Slot:
        """Return a slot by number. Raises ``CkptError`` for one that is gone."""
        if (slot := self._table.get(number)) is None:
            raise CkptError(f"slot {number} is not there any more: its generation is over")
        return slot

    def holding(self, key: BlockKey) -> Slot | None:
        """Return the slot with a sealed block of ``key``."""
        for slot in self._table.values():
            if slot.key == key and slot.entry is not None and not slot.leaving:
                return slot
        return None

    def writing(self, key: BlockKey) -> Slot | None:
        """Return the slot that is being written for ``key``."""
        for slot in self._table.values():
            if slot.key == key and slot.state is SlotState.WRITING:
                return slot
        return None

    def of(self, key: SnapshotKey) -> list[Slot]:
        """Return every slot that belongs to a snapshot, whatever its state."""
        return [slot for slot in self._table.values() if slot.key and slot.key[:2] == key]

    def used(self, generation: int, rank: int) -> int:
        """Return how many slots ``rank`` has in use in ``generation``."""
        return sum(
            slot.key is not None and slot.key[0] == generation and slot.key[2] == rank
            for slot in self._table.values()
        )

    def take_free(self, size: BlockSize, *, rank: int) -> Slot | None:
        """Return the smallest free slot that fits a block of ``rank``, one of its own if it can be.

        The rank writes only what differs from its block before.
        """
        fitting = [
            slot
            for slot in self._table.values()
            if slot.state is SlotState.EMPTY and slot.key is None
            if size.fits(slot.file)
        ]
        return min(
            fitting,
            key=lambda slot: (slot.file.capacity, slot.last is None or slot.last[2] != rank),
            default=None,
        )

    # -- fixed parts -----------------------------------------------------------------------------

    def want_fixed(self, rank: int, size: BlockSize) -> None:
        """Keep the fixed part that a rank's next slot names, also while no slot names it."""
        if size.fixed_name != self._wanted.get(rank, ""):
            self._wanted[rank] = size.fixed_name
            self._sweep_fixed()

    def forget_wanted(self) -> None:
        """Keep only the fixed parts that slots name: a generation began."""
        self._wanted.clear()
        self._sweep_fixed()

    def has_fixed(self, file: SlotFile) -> bool:
        """Return whether a block with the fixed part of ``file`` was sealed."""
        return bool(file.fixed_name) and file.fixed_name in self._sealed_fixed

    def fixed_sums(self, file: SlotFile) -> Sums | None:
        """Return the sums of a fixed part, where this process has seen it sealed."""
        return self._sealed_fixed.get(file.fixed_name)

    def nbytes(self) -> int:
        """Return the length of all files in shared memory, those of fixed parts once each."""
        here = [slot.file for slot in self._table.values() if not slot.borrowed]
        fixed = {file.fixed_name: file.fixed_bytes for file in here}
        return sum(file.file_bytes for file in here) + sum(fixed.values())

    def _sweep_fixed(self) -> None:
        named = {slot.file.fixed_name for slot in self._table.values()}
        named |= set(self._wanted.values())
        for name in self._sealed_fixed.keys() - named:
            del self._sealed_fixed[name]
        self._arena.sweep_fixed(named=named)

    # -- the life of a slot ----------------------------------------------------------------------

    def begin(self, slot: Slot, key: BlockKey) -> None:
        """Move a slot from EMPTY to WRITING."""
        self._move(slot, SlotEvent.ACQUIRE)
        slot.key, slot.before, slot.last = key, slot.last, key
        header = SlotHeader(state=slot.state, generation=key[0], step=key[1], rank=key[2])
        self._note(slot, SlotEvent.ACQUIRE, header)

    def seal(self, slot: Slot, entry: BlockEntry) -> None:
        """Move a slot from WRITING to SEALED with the verified ``entry``."""
        self._move(slot, SlotEvent.SEAL)
        slot.entry = entry
        if (name := slot.file.fixed_name) and self._sealed_fixed.get(name) is None:
            runs = entry.fixed_bytes // SUM_BYTES
            self._sealed_fixed[name] = slot.sums[:runs] if slot.sums is not None else None
        self._note(slot, SlotEvent.SEAL, SlotHeader.of(entry, slot.state))

    def commit(self, slot: Slot) -> None:
        """Move a slot from SEALED to COMMITTED; slots in other states stay unchanged."""
        if slot.state is SlotState.SEALED and slot.entry is not None:
            self._move(slot, SlotEvent.COMMIT)
            self._note(slot, SlotEvent.COMMIT, SlotHeader.of(slot.entry, slot.state))

    def readopt(self, file: SlotFile, entry: BlockEntry, state: SlotState) -> Slot:
        """Enter a slot that an earlier process sealed."""
        slot = self.add(file)
        slot.state, slot.entry = state, entry
        slot.key = (entry.generation, entry.step, entry.rank)
        if file.fixed_name:
            self._sealed_fixed.setdefault(file.fixed_name, None)
        return slot

    def release(self, slot: Slot, *, surplus: bool = False) -> None:
        """Free a slot, once it has no reader; remove the file if it is ``surplus``."""
        if slot.pins or slot.busy:
            slot.leaving = True
            return
        if slot.borrowed:
            self._table.pop(slot.number, None)
            slot.file.close()
        elif surplus:
            self.discard(slot)
        elif slot.state is not SlotState.EMPTY:
            self._move(slot, SlotEvent.RELEASE)
            slot.key = slot.entry = slot.sums = slot.since = None
            slot.leaving = False
            self._note(slot, SlotEvent.RELEASE, SlotHeader(state=slot.state))

    def discard(self, slot: Slot) -> None:
        """Remove a slot's file: a stale writer that still maps it then writes to nowhere."""
        self._table.pop(slot.number, None)
        self._arena.reach("discard.before")
        slot.file.path.unlink(missing_ok=True)
        self._arena.reach("discard.after")
        self._sweep_fixed()
        if has_little_room(self._arena.directory):
            slot.file.close()
        else:
            self._unmap(slot.file)

    def pin(self, slot: Slot) -> None:
        """Keep the bytes until `unpin`."""
        slot.pins += 1

    def unpin(self, slot: Slot) -> bool:
        """Release a pin; return whether that freed the slot."""
        slot.pins -= 1
        if slot.pins == 0 and slot.leaving and slot.number in self._table:
            self.release(slot)
            return True
        return False

    def _note(self, slot: Slot, event: SlotEvent, header: SlotHeader) -> None:
        """Write a slot's new state to its header; only this makes the change survive a crash."""
        self._arena.reach(f"{event}.before")
        slot.file.write_header(header, run=self._arena.run)
        self._arena.reach(f"{event}.after")

    def _move(self, slot: Slot, event: SlotEvent) -> None:
        slot.state = move_slot(slot.state, event, slot=slot.number)
