"""A state machine of the snapshots of a sidecar's group: events in, instructions out. Pure.

A snapshot moves SEALING → COMMITTED (every rank sealed) → PROTECTED (every parity row sealed). The
server executes the instructions. `PHASES` lists every move. Any order of messages, with any of them
repeated, ends in the same state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from holdfast.ckpt.errors import CkptError, FencedError, MismatchError, NotFoundError
from holdfast.ckpt.memory.block import SlotState
from holdfast.ckpt.memory.records import BlockEntry, ParityEntry, RestorePoint, SnapshotWorld
from holdfast.ckpt.parity.stripes import Geometry

SnapshotKey: TypeAlias = tuple[int, int]
"""(generation, step)."""


class SnapshotPhase(StrEnum):
    """The phase of a snapshot."""

    SEALING = "sealing"
    COMMITTED = "committed"
    PROTECTED = "protected"


class Progress(StrEnum):
    """The event that moves a snapshot to its next phase."""

    ALL_SEALED = "all ranks sealed"
    ALL_PARITY = "all parity rows sealed"


PHASES: dict[tuple[SnapshotPhase, Progress], SnapshotPhase] = {
    (SnapshotPhase.SEALING, Progress.ALL_SEALED): SnapshotPhase.COMMITTED,
    (SnapshotPhase.COMMITTED, Progress.ALL_PARITY): SnapshotPhase.PROTECTED,
}


class SlotEvent(StrEnum):
    """An event in the life of a slot."""

    ACQUIRE = "acquire"
    SEAL = "seal"
    COMMIT = "commit"
    RELEASE = "release"


SLOTS: dict[tuple[SlotState, SlotEvent], SlotState] = {
    (SlotState.EMPTY, SlotEvent.ACQUIRE): SlotState.WRITING,
    (SlotState.WRITING, SlotEvent.SEAL): SlotState.SEALED,
    (SlotState.WRITING, SlotEvent.RELEASE): SlotState.EMPTY,
    (SlotState.SEALED, SlotEvent.COMMIT): SlotState.COMMITTED,
    (SlotState.SEALED, SlotEvent.RELEASE): SlotState.EMPTY,
    (SlotState.COMMITTED, SlotEvent.RELEASE): SlotState.EMPTY,
}


def move_slot(state: SlotState, event: SlotEvent, *, slot: int) -> SlotState:
    """Return the slot's next state. Raises ``CkptError`` for a move that does not exist."""
    if (after := SLOTS.get((state, event))) is None:
        raise CkptError(f"slot {slot} is {state.name}: it cannot {event}; acquire a slot first")
    return after


@dataclass(slots=True, kw_only=True)
class Snapshot:
    """One (generation, step): the ranks' entries and the parity rows known to be sealed."""

    world: SnapshotWorld
    step: int
    phase: SnapshotPhase = SnapshotPhase.SEALING
    entries: dict[int, BlockEntry] = field(default_factory=dict)
    rows: set[tuple[int, int]] = field(default_factory=set)

    @property
    def key(self) -> SnapshotKey:
        """(generation, step)."""
        return self.world.generation, self.step

    def geometry(self) -> Geometry:
        """Return the stripes; known once the snapshot is committed."""
        return Geometry(self.world, self.entries)

    def advance(self) -> list[Instruction]:
        """Move as far as the known entries and rows allow."""
        done: list[Instruction] = []
        if self.phase is SnapshotPhase.SEALING and len(self.entries) == len(self.world.rank_nodes):
            self._move(Progress.ALL_SEALED)
            done.append(CommitSnapshot(snapshot=self))
        wanted = len(self.world.peers) * self.world.parity
        if self.phase is SnapshotPhase.COMMITTED and len(self.rows) == wanted:
            self._move(Progress.ALL_PARITY)
            done.append(Protect(snapshot=self))
        return done

    def _move(self, progress: Progress) -> None:
        self.phase = PHASES[self.phase, progress]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitSnapshot:
    """Every rank has sealed: mark the local slots, exchange parity."""

    snapshot: Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Protect:
    """Any ``parity`` nodes may now vanish: answer waiting requests, persist."""

    snapshot: Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Nothing needs this snapshot any more: free its slots and parity."""

    key: SnapshotKey


Instruction: TypeAlias = CommitSnapshot | Protect | Release


_GONE_KEPT = 1024


class Book:
    """All snapshots a sidecar knows of, and the generation it serves."""

    def __init__(self) -> None:
        self.world: SnapshotWorld | None = None
        self.snapshots: dict[SnapshotKey, Snapshot] = {}
        self._gone: deque[SnapshotKey] = deque(maxlen=_GONE_KEPT)
        self.is_closed = False

    @property
    def generation(self) -> int:
        """The generation served; 0 before the first."""
        return self.world.generation if self.world else 0

    def adopt(self, world: SnapshotWorld, restore: RestorePoint | None) -> list[Instruction]:
        """Enter ``world``; older generations are fenced from now on.

        Older snapshots stay if they are complete and ``restore`` did not roll them back,
        until the new generation has its own protected one. Repeating the call is harmless.
        Raises ``FencedError`` for an older generation, ``MismatchError`` for another world under
        the same number.
        """
        if self.world is not None:
            self._check_newer(self.world, world)
            if world.generation == self.world.generation:
                return []
        self.world = world
        self.is_closed = False
        dropped = [key for key, each in self.snapshots.items() if not _survives(each, restore)]
        return [self._forget(key) for key in dropped]

    def roll_back(self, restore: RestorePoint | None) -> list[Instruction]:
        """Record that this generation started from ``restore`` instead of the point in its plan.

        Later snapshots of older generations are dropped.
        """
        older = {key: each for key, each in self.snapshots.items() if key[0] < self.generation}
        dropped = [key for key, each in older.items() if not _survives(each, restore)]
        return [self._forget(key) for key in dropped]

    @staticmethod
    def _check_newer(have: SnapshotWorld, world: SnapshotWorld) -> None:
        if world.run != have.run:
            raise MismatchError(f"this sidecar serves run {have.run!r}, not {world.run!r}")
        if world.generation < have.generation:
            raise FencedError(
                f"generation {world.generation} is over: this sidecar serves {have.generation}"
            )
        if world.generation == have.generation and world != have:
            raise MismatchError(
                f"generation {world.generation} is already known with another group; "
                "a changed group needs a new generation"
            )

    def readopt(self, world: SnapshotWorld, entry: BlockEntry, *, committed: bool) -> None:
        """Take over a block that an earlier sidecar process of this node left."""
        key = (entry.generation, entry.step)
        snapshot = self.snapshots.setdefault(key, Snapshot(world=world, step=entry.step))
        snapshot.entries[entry.rank] = entry
        if committed:
            snapshot.phase = SnapshotPhase.COMMITTED

    def readopt_row(self, world: SnapshotWorld, entry: ParityEntry, *, protected: bool) -> None:
        """Take over a parity row that an earlier sidecar process of this node left.

        ``protected`` says that the process knew all rows of the snapshot to be sealed. Without it,
        and without its blocks, this row is all that is known of the snapshot.
        """
        key = (entry.generation, entry.step)
        snapshot = self.snapshots.setdefault(key, Snapshot(world=world, step=entry.step))
        snapshot.rows.add((entry.stripe, entry.row))
        if protected:
            snapshot.phase = SnapshotPhase.PROTECTED

    def readopt_known(self, entry: BlockEntry) -> None:
        """Take over an earlier process's knowledge of any rank's block of a snapshot in memory."""
        if (snapshot := self.snapshots.get((entry.generation, entry.step))) is not None:
            snapshot.entries.setdefault(entry.rank, entry)

    def learn(self, world: SnapshotWorld, step: int, entries: Mapping[int, BlockEntry]) -> None:
        """Record an older, complete snapshot of which a block was rebuilt here."""
        key = (world.generation, step)
        snapshot = self.snapshots.setdefault(key, Snapshot(world=world, step=step))
        snapshot.entries.update(entries)
        if snapshot.phase is SnapshotPhase.SEALING:
            snapshot.phase = PHASES[snapshot.phase, Progress.ALL_SEALED]

    def require(self, generation: int) -> SnapshotWorld:
        """Return the served world if it is ``generation``.

        Raises ``FencedError`` when the caller is of an older one, ``NotFoundError`` when it is
        ahead of this sidecar (its agent will soon adopt it: try again).
        """
        if generation < self.generation:
            raise FencedError(
                f"generation {generation} is over: this sidecar serves {self.generation}"
            )
        if self.world is None or generation > self.generation:
            raise NotFoundError(
                f"generation {generation} is not known here yet, {self.generation} is; try again"
            )
        return self.world

    def is_gone(self, key: SnapshotKey) -> bool:
        """Return whether the snapshot was released or given up."""
        return key in self._gone

    def seal(self, entry: BlockEntry) -> list[Instruction]:
        """Record that a rank's block is sealed, here or on a peer."""
        world = self.require_open(entry.generation)
        key = (entry.generation, entry.step)
        if self.is_gone(key):
            return []
        if not 0 <= entry.rank < len(world.rank_nodes):
            raise MismatchError(f"rank {entry.rank} is outside the {len(world.rank_nodes)} ranks")
        snapshot = self.snapshots.setdefault(key, Snapshot(world=world, step=entry.step))
        if snapshot.entries.setdefault(entry.rank, entry) != entry:
            raise MismatchError(
                f"rank {entry.rank} sealed step {entry.step} twice with different contents"
            )
        return self._advance(snapshot)

    def seal_row(self, key: SnapshotKey, place: tuple[int, int]) -> list[Instruction]:
        """Record that a parity row is sealed on its holder."""
        world = self.require_open(key[0])
        if self.is_gone(key):
            return []
        if not (0 <= place[0] < len(world.peers) and 0 <= place[1] < world.parity):
            raise MismatchError(f"there is no parity row {place} in this group")
        snapshot = self.snapshots.setdefault(key, Snapshot(world=world, step=key[1]))
        snapshot.rows.add(place)
        return self._advance(snapshot)

    def give_up(self, key: SnapshotKey) -> list[Instruction]:
        """Drop a snapshot that some rank will never complete."""
        self.require_open(key[0])
        if key in self.snapshots and self.snapshots[key].phase is not SnapshotPhase.SEALING:
            return []
        if key not in self.snapshots:
            self._gone.append(key)
            return []
        return [self._forget(key)]

    def close(self) -> None:
        """Accept no more of this generation: its inventory is being taken.

        Otherwise a peer could see a step protected that the inventory does not name, and release
        the one before it. The planner would then have no step that all inventories name. The next
        `adopt` opens the book again.
        """
        self.is_closed = True

    def require_open(self, generation: int) -> SnapshotWorld:
        """Return the served world if it is ``generation`` and still accepts snapshots.

        Raises as `require`, and ``FencedError`` when an inventory of it was taken.
        """
        world = self.require(generation)
        if self.is_closed:
            raise FencedError(f"generation {generation} is over: its inventory was taken")
        return world

    def newest(self, phase: SnapshotPhase, *, generation: int | None = None) -> int:
        """Return the newest step that has reached ``phase``, -1 for none."""
        reached = (
            (SnapshotPhase.PROTECTED,)
            if phase is SnapshotPhase.PROTECTED
            else (phase, SnapshotPhase.PROTECTED)
        )
        steps = [
            each.step
            for each in self.snapshots.values()
            if each.phase in reached and generation in (None, each.world.generation)
        ]
        return max(steps, default=-1)

    def shed(self) -> list[Instruction]:
        """Release the oldest snapshot of older generations, but never the newest of them.

        The newest is the one restored from; the others are spare, and memory may be scarce.
        """
        older = sorted((key for key in self.snapshots if key[0] < self.generation), key=_by_step)
        return [self._forget(older[0])] if len(older) > 1 else []

    def give_up_overtaken(self) -> list[Instruction]:
        """Release unprotected snapshots older than a protected one; they may never be protected.

        A block that changed after its seal, for example, keeps its step unprotected for good.
        """
        newest = self.newest(SnapshotPhase.PROTECTED, generation=self.generation)
        return [
            self._forget(key)
            for key, each in list(self.snapshots.items())
            if key[0] == self.generation
            and each.phase is not SnapshotPhase.PROTECTED
            and key[1] < newest
        ]

    def find(self, step: int, *, generation: int | None) -> Snapshot:
        """Return the snapshot of ``step`` that readers may use, of the newest generation with it.

        Raises ``NotFoundError`` listing the existing steps.
        """
        have = [each for each in self.snapshots.values() if self._is_settled(each)]
        match = [
            each
            for each in have
            if each.step == step and generation in (None, each.world.generation)
        ]
        if not match:
            steps = sorted({each.step for each in have})
            raise NotFoundError(f"no protected snapshot of step {step} in memory; have {steps}")
        return max(match, key=lambda each: each.key)

    def _advance(self, snapshot: Snapshot) -> list[Instruction]:
        done = snapshot.advance()
        if any(isinstance(each, Protect) for each in done):
            done += self._retain()
        return done

    def _retain(self) -> list[Instruction]:
        """Release the snapshots that the ``keep`` newest settled steps make superfluous.

        A snapshot of this generation that is not protected yet stays (a checkpoint of it may be
        wanted). Snapshots of older generations stay until the present one has a protected snapshot.
        """
        settled = sorted(
            (key for key, each in self.snapshots.items() if self._is_settled(each)), reverse=True
        )
        if self.world is None or not settled:
            return []
        if settled[0][0] != self.generation:
            return []
        kept: dict[int, SnapshotKey] = {}
        for key in settled:
            if len(kept) < self.world.keep:
                kept.setdefault(key[1], key)
        keep = set(kept.values())
        superfluous = [
            key
            for key, each in self.snapshots.items()
            if key not in keep
            if key[0] < self.generation or each.phase is SnapshotPhase.PROTECTED
        ]
        return [self._forget(key) for key in superfluous]

    def _is_settled(self, snapshot: Snapshot) -> bool:
        """Return whether the job will not go back behind the snapshot while its blocks last.

        It is protected, or this generation began from it or from a later one (`adopt`): then its
        parity never comes, and rollouts bound to it still have to be finished.
        """
        is_older = snapshot.world.generation < self.generation
        return snapshot.phase is SnapshotPhase.PROTECTED or is_older

    def _forget(self, key: SnapshotKey) -> Release:
        del self.snapshots[key]
        self._gone.append(key)
        return Release(key=key)


def _by_step(key: SnapshotKey) -> tuple[int, int]:
    return key[1], key[0]


def _survives(snapshot: Snapshot, restore: RestorePoint | None) -> bool:
    if restore is None:
        return False
    generation, step = snapshot.key
    if step > restore.step or generation > restore.world.generation:
        return False
    is_restored = (generation, step) == (restore.world.generation, restore.step)
    return is_restored or snapshot.phase is not SnapshotPhase.SEALING
