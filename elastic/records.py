"""The records of the control plane: what nodes, seats and generations look like. Pure values."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from ckpt.groups import GROUP_SIZE
from ckpt.types import Json, learn
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
    """What the decorated function asks of the world; every trainer announces the same.

    ``dp`` is the number of trainers to wait for, None to take whoever is ready, down to
    ``min_dp``. ``parity_group`` is the preferred size of a parity group; ``columns`` and
    ``memory_bytes`` as in `SnapshotWorld`.
    """

    dp: int | None = None
    min_dp: int = 1
    parity: int = 1
    keep: int = 2
    parity_group: int = GROUP_SIZE
    columns: int = 0
    memory_bytes: int = 0

    def __post_init__(self) -> None:
        if self.dp is not None and self.dp < 1:
            raise ValueError(f"dp is {self.dp}, at least one trainer is needed")
        if self.min_dp < 1:
            raise ValueError(f"min_dp is {self.min_dp}, at least one trainer is needed")
        if self.parity < 0:
            raise ValueError(f"parity is {self.parity}, it counts nodes that may be lost")
        if self.keep < 1:
            raise ValueError(f"keep is {self.keep}, at least one snapshot must stay")
        if self.parity_group < 2:
            raise ValueError(f"parity_group is {self.parity_group}, a group has two nodes or more")
        if self.columns < 0:
            raise ValueError(f"columns is {self.columns}; give 0 for as many as a group allows")
        if self.memory_bytes < 0:
            raise ValueError(f"memory_bytes is {self.memory_bytes}; give 0 for no budget")

    @property
    def least(self) -> int:
        """How many trainers a generation needs."""
        return self.min_dp if self.dp is None else self.dp


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A worker process: its seat (``"trainer/0"``), a fresh incarnation id, its state.

    ``attempt`` is that of the seating by which it was started. ``info`` is what the worker
    announced when it became ready (``store``: the ``host:port`` of its TCPStore; whatever else
    its role publishes). ``ready_after`` is the last generation it took part in (0: none): it is
    ready for any later one. ``result`` is what a DONE worker returned, ``ending`` says how a
    DEAD one ended (``"killed by SIGKILL"``). A record stays until its seat has a newer attempt.
    """

    seat: str
    incarnation: str
    pid: int
    state: WorkerState
    attempt: int = 1
    ready_after: int = 0
    spec: JobSpec | None = None
    info: dict[str, Json] = {}
    result: Json = None
    ending: str = ""


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent publishes under its lease.

    ``slots`` maps a role to how many of its workers fit. ``sidecar`` is its address, empty while
    it is down; ``sidecar_starts`` counts how often this agent started one, so that a sidecar is
    known from its predecessor. ``fenced`` is the newest generation of
    which no local worker is active any more, nor ever will be, and for which ``inventory`` was
    taken after that.
    """

    node: str
    incarnation: str
    domain: str
    sidecar: str
    slots: dict[str, int]
    workers: tuple[WorkerRecord, ...] = ()
    fenced: int = 0
    inventory: Inventory | None = None
    sidecar_starts: int = 1


class Seating(msgspec.Struct, frozen=True, kw_only=True):
    """Which node is to run which seat: the only order by which agents start workers.

    ``attempt`` numbers the starts of this seat from 1. ``failures`` counts those in a row that
    ended without a newly protected step; ``progress`` is the newest protected step known when
    the last of them was ordered (-1: none).
    """

    seat: str
    node: str
    attempt: int
    failures: int = 0
    progress: int = -1


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A rank of a generation: the worker that plays it and what it announced."""

    rank: int
    seat: str
    node: str
    incarnation: str
    info: dict[str, Json] = {}


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Where a generation went on from: snapshots of older ones count only up to ``step``.

    ``step`` is -1 when it restored nothing from memory: then no older snapshot counts.
    """

    generation: int
    step: int


class GenerationRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One link of the compare-and-set chain: who trains, with what, from where, and why.

    ``restore`` is None when nothing can be restored from memory (first start, or too much was
    lost): the workers then load the newest checkpoint, or begin at step 0. ``fallbacks`` are the
    points to try next, newest first, when ``restore`` fails while it is read. ``nodes`` maps every
    node of the group to its identity (`membership.identity`), by which a changed one is known.
    ``timeline`` is what `plan.on_timeline` needs to refuse snapshots of rolled-back futures.
    """

    number: int
    members: tuple[Member, ...]
    snapshots: SnapshotWorld
    restore: RestorePoint | None
    reason: str
    fallbacks: tuple[RestorePoint, ...] = ()
    nodes: dict[str, str] = {}
    timeline: tuple[Origin, ...] = ()


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How the job ended; written once. ``result`` is what rank 0 returned."""

    ok: bool
    message: str
    result: Json = None


class Roster(msgspec.Struct, frozen=True, kw_only=True):
    """What every worker is told of the whole job, whenever it changes."""

    nodes: tuple[NodeRecord, ...] = ()
    generation: GenerationRecord | None = None


learn(globals())
