"""A node's list of checkpoints that are not durable yet; it survives the sidecar's death.

The list lies beside the slots, in the arena's directory, so that a restarted sidecar continues the
writes of its predecessor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from time import monotonic
from typing import Final

import msgspec

from holdfast.ckpt.memory.records import RestorePoint, SnapshotWorld
from holdfast.ckpt.memory.target import CheckpointTarget
from holdfast.ckpt.sidecar.core.book import SnapshotKey
from holdfast.ckpt.sidecar.core.durable_note import Note
from holdfast.ckpt.sidecar.core.messages import PendingCheckpoint
from holdfast.ckpt.sidecar.core.slots import Slot
from holdfast.ckpt.types import Json

NOTE: Final = "checkpoints"


@dataclass(slots=True, kw_only=True, eq=False)
class CheckpointJob:
    """A checkpoint as this node sees it.

    ``ranks`` are those whose blocks this node writes. ``slots`` are their slots, pinned until
    written. ``busy`` are the ranks that a thread is writing. ``receipts`` are those of packs on the
    store (on the committing node: of all ranks). It is ``due`` once the snapshot is protected,
    ``begun`` once it is to be written in this generation, ``over`` when it has ended in any way,
    and ``urgent`` if no trainer is left.
    """

    world: SnapshotWorld
    step: int
    target: CheckpointTarget
    ranks: set[int] = field(default_factory=set)
    slots: dict[int, Slot] = field(default_factory=dict)
    busy: set[int] = field(default_factory=set)
    receipts: dict[int, Json] = field(default_factory=dict)
    due: bool = False
    begun: bool = False
    over: bool = False
    urgent: bool = False
    total_bytes: int = 0
    written_bytes: int = 0
    others_bytes: dict[str, int] = field(default_factory=dict)
    began_s: float = field(default_factory=monotonic)
    told_s: float = field(default_factory=monotonic)

    @property
    def key(self) -> SnapshotKey:
        """(generation, step)."""
        return self.world.generation, self.step

    @property
    def group_bytes(self) -> int:
        """The bytes that all nodes together are known to have written."""
        return self.written_bytes + sum(self.others_bytes.values())

    def is_past(self, restore: RestorePoint | None) -> bool:
        """Say whether its state lies in the past of a generation that begins with ``restore``."""
        if restore is None:
            return False
        return self.step <= restore.step and self.world.generation <= restore.world.generation

    def pending(self) -> PendingCheckpoint:
        """Return the record to store, and to send to the committing node."""
        return PendingCheckpoint(
            world=self.world,
            step=self.step,
            target=self.target,
            ranks=tuple(sorted(self.ranks)),
            receipts=tuple(self.receipts.values()),
            due=self.due,
            total_bytes=self.total_bytes,
        )

    @classmethod
    def of(cls, pending: PendingCheckpoint) -> CheckpointJob:
        """Return the job of a node's record."""
        return cls(
            world=pending.world,
            step=pending.step,
            target=pending.target,
            ranks=set(pending.ranks),
            receipts={writer_of(receipt): receipt for receipt in pending.receipts},
            due=pending.due,
            total_bytes=pending.total_bytes,
        )


def writer_of(receipt: Json) -> int:
    """Return the rank of the pack that a receipt confirms."""
    return int(receipt["files"]["writer"])


def store(note: Note, jobs: Iterable[CheckpointJob]) -> None:
    """Write the list. Raises ``OSError`` if there is no room for it."""
    note.write(msgspec.json.encode([job.pending() for job in jobs]))


def load(note: Note) -> list[CheckpointJob]:
    """Return the list of an earlier process; empty if there is none, or it is unreadable."""
    with contextlib.suppress(msgspec.DecodeError, KeyError, TypeError):
        if text := note.read():
            found = msgspec.json.decode(text, type=list[PendingCheckpoint])
            return [CheckpointJob.of(each) for each in found]
    return []
