"""A sidecar's slots without the sidecar: for tests of code that writes or reads blocks."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.ckpt.errors import CkptError, CorruptError, NotFoundError
from holdfast.ckpt.memory.arena import (
    SLOT_SUFFIX,
    FixedPart,
    SlotFile,
    SlotHeader,
    run_digest,
)
from holdfast.ckpt.memory.block import SlotState, check_block
from holdfast.ckpt.memory.fixed_files import make_fixed, numbered
from holdfast.ckpt.memory.hosts import host_id
from holdfast.ckpt.memory.records import (
    BlockEntry,
    BlockSource,
    RestorePoint,
    SidecarPeer,
    SnapshotWorld,
)
from holdfast.ckpt.native.sums import Lengths, Sums
from holdfast.ckpt.recovery.memory_source import MemorySource
from holdfast.ckpt.sidecar.client import BlockHandle
from holdfast.ckpt.snapshot.snapshotter import Snapshotter
from holdfast.ckpt.state.capture import gather_alone
from holdfast.ckpt.transport import RunKey


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeGrant:
    """A slot to write."""

    slot_id: int
    path: str
    capacity: int
    ahead: tuple[str, ...] = ()
    has_fixed: bool = False
    before: tuple[int, int, int] | None = None


@dataclass(slots=True, kw_only=True)
class FakeSidecar:
    """Hands out slots in ``directory`` and checks sealed blocks; every step has its own slot.

    If it ``recycles``, it has only the newest sealed step, and hands out the slots of others again.
    The next ``acquire`` raises ``refuse``; while ``gate`` is clear, ``acquire`` waits. After
    ``forgets_fixed`` the next slot's fixed part is said to have no bytes.
    """

    directory: Path
    run: str = "test"
    refuse: CkptError | None = None
    forgets_fixed: bool = False
    recycles: bool = False
    gate: threading.Event = field(default_factory=threading.Event)
    sealed: dict[tuple[int, int], BlockEntry] = field(default_factory=dict)
    persisted: dict[int, str] = field(default_factory=dict)
    abandoned: list[int] = field(default_factory=list)
    free: dict[str, tuple[SlotFile, tuple[int, int, int]]] = field(default_factory=dict)
    since: dict[int, Lengths] = field(default_factory=dict)
    _slots: dict[int, tuple[SlotFile, SlotHeader]] = field(default_factory=dict)
    _held: dict[tuple[int, int], SlotFile] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.gate.set()

    def acquire(
        self,
        *,
        generation: int,
        step: int,
        rank: int,
        size_bytes: int,
        timeout_s: float,
        patience_s: float = 0.0,
        fixed: FixedPart | None = None,
    ) -> FakeGrant:
        """Make a slot."""
        self.gate.wait(timeout_s)
        if self.refuse is not None:
            error, self.refuse = self.refuse, None
            raise error
        number = len(self._slots) + 1
        name = ""
        if fixed is not None:
            name, size_bytes = fixed.name, size_bytes - fixed.nbytes
            make_fixed(self.directory, name, SLOT_SUFFIX, fixed.nbytes)
        path = numbered(self.directory, number, SLOT_SUFFIX, fixed=name)
        again = self._free_slot(name, size_bytes)
        slot, before = again or (SlotFile.create(path, size_bytes), None)
        header = SlotHeader(state=SlotState.WRITING, generation=generation, step=step, rank=rank)
        slot.write_header(header, run=run_digest(self.run))
        self._slots[number] = (slot, header)
        known = {slot.fixed_name for slot in self._held.values()}
        has_fixed = name in known and not self.forgets_fixed
        self.forgets_fixed = False
        return FakeGrant(
            slot_id=number,
            path=str(slot.path),
            capacity=slot.capacity,
            has_fixed=has_fixed,
            before=before,
        )

    def _free_slot(
        self, fixed: str, size_bytes: int
    ) -> tuple[SlotFile, tuple[int, int, int]] | None:
        for path, (slot, _) in self.free.items():
            if slot.fixed_name == fixed and slot.capacity - slot.fixed_bytes >= size_bytes:
                return self.free.pop(path)
        return None

    def _release(self, slot: SlotFile, header: SlotHeader) -> None:
        if self.recycles:
            key = (header.generation, header.step, header.rank)
            self.free[str(slot.path)] = (slot, key)

    def seal(
        self,
        *,
        slot_id: int,
        entry: BlockEntry,
        sums: Sums | None = None,
        since: Lengths | None = None,
        persist: str | None = None,
    ) -> None:
        """Verify a written slot and its sums, all of them."""
        slot, header = self._slots[slot_id]
        block = slot.block(entry.payload_bytes + entry.index_bytes)
        found = check_block(block, entry, origin=f"slot {slot_id}").sums
        if sums is not None and found.tolist() != sums.tolist():
            self._release(slot, header)
            raise CorruptError(f"slot {slot_id}: the sums are not those of the block")
        if self.recycles:
            for each, older in self._held.items():
                self._release(older, SlotHeader.of(self.sealed[each], SlotState.SEALED))
            self._held.clear()
            self.sealed.clear()
        if since is not None:
            self.since[entry.step] = since
        slot.write_header(SlotHeader.of(entry, SlotState.SEALED), run=run_digest(self.run))
        self.sealed[entry.step, entry.rank] = entry
        self._held[entry.step, entry.rank] = slot
        if persist is not None:
            self.persisted[entry.step] = persist

    def abandon(self, slot_id: int) -> None:
        """Record that a slot will not be sealed."""
        self.abandoned.append(slot_id)
        self._release(*self._slots[slot_id])

    def slot(self, step: int, rank: int = 0) -> SlotFile:
        """Return the sealed slot of a step."""
        return self._held[step, rank]

    def open_block(
        self, world: SnapshotWorld, step: int, source: BlockSource, *, in_parts: bool = False
    ) -> BlockHandle:
        """Open a sealed block."""
        if (step, source.rank) not in self.sealed:
            raise NotFoundError(f"no block of rank {source.rank}, step {step}")
        slot, entry = self._held[step, source.rank], self.sealed[step, source.rank]
        return BlockHandle(
            index=bytes(slot.index_view(entry)),
            path=str(slot.path),
            payload_bytes=entry.payload_bytes,
            host=host_id(),
        )

    def read(
        self, world: SnapshotWorld, step: int, rank: int, ranges: Sequence[tuple[int, int]]
    ) -> list[memoryview]:
        """Return bytes of a sealed block."""
        slot = self._held[step, rank]
        return [memoryview(bytes(slot.block(at + n)[at:])) for at, n in ranges]

    def changed(
        self, world: SnapshotWorld, step: int, rank: int, *, base: tuple[int, int]
    ) -> tuple[tuple[int, int], ...] | None:
        """Return None: changes since earlier steps are unknown."""
        return None

    def distrust(self, world: SnapshotWorld, step: int, rank: int) -> bool:
        """Drop a block."""
        return self.sealed.pop((step, rank), None) is not None

    def close(self) -> None:
        """Unmap the slots."""
        for slot, _ in self._slots.values():
            slot.close()

    # -- one rank --------------------------------------------------------------------------------

    def snapshotter(self, **options: Any) -> Snapshotter:
        """Return the snapshotter of the only rank."""
        return Snapshotter(
            self, run=self.run, generation=1, rank=0, world_size=1, gather=gather_alone, **options
        )

    def source(self, step: int, **options: Any) -> MemorySource:
        """Return a source of what the only rank sealed."""
        world = SnapshotWorld(
            run=self.run,
            generation=1,
            peers=(SidecarPeer(node="a", address="tcp://nowhere"),),
            rank_nodes=("a",),
            parity=0,
            keep=1,
        )
        point = RestorePoint(world=world, step=step, sources=(BlockSource(rank=0, node="a"),))
        key = RunKey.new()
        return MemorySource(point, local=self, local_node="a", addresses={}, key=key, **options)
