"""The records of the control plane: what nodes, seats and generations look like. Pure values."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from ckpt.types import Json
from ckpt.world import Inventory, RestorePoint, SnapshotWorld

TRAINER = "trainer"
"""The role whose workers form the ranks of a generation; all other roles live beside it."""


class WorkerState(StrEnum):
    """Where a worker is in its life; it enters a generation only from READY."""

    STARTING = "starting"
    READY = "ready"
    ACTIVE = "active"
    DONE = "done"
    DEAD = "dead"


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the decorated function asks of the world; every trainer announces the same."""

    dp: int | None = None
    min_dp: int = 1
    parity: int = 1
    keep: int = 2


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A worker process: its seat (``"trainer/0"``), a fresh incarnation id, its state.

    ``info`` is what the worker announced when it became ready (``store``: the ``host:port`` of
    its TCPStore; whatever else its role publishes). ``ready_after`` is the last generation it
    took part in (0: none): it is ready for any later one.
    """

    seat: str
    incarnation: str
    pid: int
    state: WorkerState
    ready_after: int = 0
    spec: JobSpec | None = None
    info: dict[str, Json] = {}


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent publishes under its lease.

    ``slots`` maps a role to how many of its workers fit. ``fenced`` is the newest generation of
    which no local worker is active any more and for which ``inventory`` was taken after that.
    """

    node: str
    incarnation: str
    domain: str
    sidecar: str
    slots: dict[str, int]
    workers: tuple[WorkerRecord, ...] = ()
    fenced: int = 0
    inventory: Inventory | None = None


class Seating(msgspec.Struct, frozen=True, kw_only=True):
    """Which node is to run which seat: the only order by which agents start workers."""

    seat: str
    node: str
    attempt: int


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A rank of a generation: the worker that plays it and what it announced."""

    rank: int
    seat: str
    node: str
    incarnation: str
    info: dict[str, Json] = {}


class GenerationRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One link of the compare-and-set chain: who trains, with what, from where, and why.

    ``restore`` is None when nothing can be restored from memory (first start, or too much was
    lost): the workers then load the newest checkpoint, or begin at step 0.
    """

    number: int
    members: tuple[Member, ...]
    snapshots: SnapshotWorld
    restore: RestorePoint | None
    reason: str


class Roster(msgspec.Struct, frozen=True, kw_only=True):
    """What every worker is told of the whole job, whenever it changes."""

    nodes: tuple[NodeRecord, ...] = ()
    generation: GenerationRecord | None = None
