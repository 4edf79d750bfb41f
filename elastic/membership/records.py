"""The records of the control plane: what nodes, seats and generations look like. Pure values.

None of them can be part of a cycle, and there are tens of thousands in a large job: the garbage
collector need not look at those of which there is one for every node (``gc=False``).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from holdfast.ckpt.memory.records import Inventory, RestorePoint, SnapshotWorld
from holdfast.ckpt.parity.groups import GROUP_SIZE
from holdfast.ckpt.types import Json, learn

TRAINER = "trainer"
"""The role whose workers form the ranks of a generation; all other roles live beside it."""

RESTORE_AT_MOST = "restore_at_most"
"""In the ``info`` of trainers that left a generation to go back: the newest step to restore."""

REPLICATED_BYTES = "replicated_bytes"
"""In the ``info`` of trainers that left a generation: what of their state all replicas have."""


class WorkerState(StrEnum):
    """Where a worker is in its life; it enters a generation only from READY."""

    STARTING = "starting"
    READY = "ready"
    ACTIVE = "active"
    DONE = "done"
    DEAD = "dead"


class MeshSize(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a mesh's axes: ``dp`` data-parallel groups of ``tp`` × ``pp`` ranks each.

    The experts are spread over ``ep`` groups that follow each other (1: every group has all).
    ``shard`` groups that follow each other share the state, and the next ones have it again
    (1: the state is not replicated in that way); ``ep`` divides it then.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    shard: int = 1

    def __post_init__(self) -> None:
        if min(self.dp, self.tp, self.pp, self.ep, self.shard) < 1:
            raise ValueError(f"mesh {self.text}: every axis has a size of 1 or more")
        for axis, size in (("ep", self.ep), ("shard", self.shard)):
            if self.dp % size and self.dp > 1:
                raise ValueError(f"mesh {self.text}: dp is no multiple of {axis}")
        if self.shard > 1 and self.shard % self.ep:
            raise ValueError(f"mesh {self.text}: shard {self.shard} is no multiple of ep {self.ep}")

    @property
    def cell(self) -> int:
        """How many ranks a data-parallel group has."""
        return self.tp * self.pp

    @property
    def near(self) -> int:
        """How many ranks that follow each other have most to tell each other."""
        return max(self.shard, self.ep) * self.cell

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return self.dp * self.cell

    @property
    def text(self) -> str:
        """The sizes in words, without the axes that are 1."""
        axes = {"tp": self.tp, "pp": self.pp, "ep": self.ep}
        words = [f"{name} {size}" for name, size in axes.items() if size > 1]
        shards = f" (replicate {self.dp // self.shard} × shard {self.shard})"
        return " × ".join([f"dp {self.dp}{shards if self.shard > 1 else ''}", *words])

    def along(self, axes: Sequence[str]) -> tuple[int, ...]:
        """Return the sizes of the named axes of a device mesh."""
        carved = self.shard if "replicate" in axes else self.dp
        sizes = {
            "dp": self.dp,
            "replicate": self.dp // self.shard,
            "shard": self.shard,
            "edp": carved // self.ep,
            "ep": self.ep,
            "pp": self.pp,
            "tp": self.tp,
        }
        return tuple(sizes[axis] for axis in axes)


class JobSpec(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What the decorated function asks of the world; every trainer announces the same.

    ``dp`` is the number of data-parallel groups to wait for, None to take whoever is ready, from
    ``min_dp`` up to ``max_dp`` (None: all); who is ready beyond that is a spare. ``tp``, ``pp``,
    ``ep`` and ``shard`` are the sizes accepted of each, preferred ones first; of ``ep`` and
    ``shard``, where it is asked for, only such as divide each other. ``microbatches`` is
    the work of a step, 0 when it is not to be shared by speed. ``device`` is what all ranks compute
    on, ``"cpu"`` or ``"cuda"``. ``parity_group`` is the preferred size of a parity group;
    ``columns`` and ``memory_bytes`` as in `SnapshotWorld`.
    """

    dp: int | None = None
    min_dp: int = 1
    parity: int = 1
    keep: int = 2
    parity_group: int = GROUP_SIZE
    columns: int = 0
    memory_bytes: int = 0
    max_dp: int | None = None
    tp: tuple[int, ...] = (1,)
    pp: tuple[int, ...] = (1,)
    ep: tuple[int, ...] = (1,)
    shard: tuple[int, ...] = (1,)
    microbatches: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.dp is not None and self.dp < 1:
            raise ValueError(f"dp is {self.dp}, at least one trainer is needed")
        if self.min_dp < 1:
            raise ValueError(f"min_dp is {self.min_dp}, at least one trainer is needed")
        self._check_axes()
        if self.max_dp is not None and self.max_dp < self._least_groups:
            raise ValueError(f"max_dp is {self.max_dp}, at least {self._least_groups} are needed")
        if self.microbatches < 0:
            raise ValueError(f"microbatches is {self.microbatches}; give 0 to share evenly")
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

    def _check_axes(self) -> None:
        for axis in ("tp", "pp", "ep", "shard"):
            sizes = getattr(self, axis)
            if not sizes or min(sizes) < 1 or len(set(sizes)) != len(sizes):
                raise ValueError(f"{axis} is {sizes}: name each accepted size once, from 1 up")
        for axis, sizes in (("ep", self.ep), ("shard", self.shard)):
            if self.dp is not None and all(self.dp % size for size in sizes):
                raise ValueError(f"dp is {self.dp}, no multiple of an accepted {axis} {sizes}")
        if not any(self.goes(ep=ep, shard=shard) for ep in self.ep for shard in self.shard):
            raise ValueError(f"no accepted ep {self.ep} divides an accepted shard {self.shard}")

    def goes(self, *, ep: int, shard: int) -> bool:
        """Say whether experts can be spread so: over the shards of one replica, where there are."""
        return self.shard == (1,) or shard % ep == 0

    @property
    def least_dp(self) -> int:
        """How many data-parallel groups a generation needs."""
        return self.min_dp if self.dp is None else self.dp

    @property
    def least(self) -> int:
        """How many trainers a generation needs: those of the smallest accepted mesh."""
        return self._least_groups * min(self.tp) * min(self.pp)

    @property
    def _least_groups(self) -> int:
        pairs = [(ep, shard) for ep in self.ep for shard in self.shard]
        steps = [max(ep, shard) for ep, shard in pairs if self.goes(ep=ep, shard=shard)]
        return min(-(-self.least_dp // step) * step for step in steps)

    @property
    def most(self) -> int | None:
        """How many trainers a generation has use for, None where there is no limit."""
        groups = self.max_dp if self.dp is None else self.dp
        return None if groups is None else groups * max(self.tp) * max(self.pp)


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A worker process: its seat (``"trainer/0"``), a fresh incarnation id, its state.

    ``attempt`` is that of the seating by which it was started. ``info`` is what the worker
    announced when it became ready (``store``: the ``host:port`` of its TCPStore; whatever else
    its role publishes). ``ready_after`` is the last generation it took part in (0: none): it is
    ready for any later one. ``result`` is what a DONE worker returned, ``ending`` says how a
    DEAD one ended (``"killed by SIGKILL"``). A record stays until its seat has a newer attempt.
    ``speed`` is how many microbatches per second it computes, 0 while none was measured; ``waits``,
    ``data`` and ``busy`` as in `stragglers.Pace`.
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
    speed: float = 0.0
    waits: float = 0.0
    data: float = 0.0
    busy: float = 0.0


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What an agent publishes under its lease.

    ``slots`` maps a role to how many of its workers fit. ``sidecar`` is its address, empty while
    it is down; ``sidecar_starts`` counts how often this agent started one, so that a sidecar is
    known from its predecessor. ``fenced`` is the newest generation of
    which no local worker is active any more, nor ever will be, and for which ``inventory`` was
    taken after that. ``leaving``: its place among the nodes
    that were told to end and leave one after the other, 0 where it was not. ``stalled`` is the
    generation in which all its trainers have waited for others for too long. ``unreachable`` are
    the nodes that its agent does not reach, each with the identity (`membership.identity`) it had
    when it was asked; ``probed`` is the generation in which it has asked all nodes of the group.
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
    leaving: int = 0
    stalled: int = 0
    unreachable: dict[str, str] = {}
    probed: int = 0


class Seating(msgspec.Struct, frozen=True, kw_only=True, gc=False):
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


class Member(msgspec.Struct, frozen=True, kw_only=True, gc=False):
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


class Setback(msgspec.Struct, frozen=True, kw_only=True):
    """How often a node was lost, and for how many seconds it has behaved since the last time."""

    losses: int
    calm_s: float = 0.0


class GenerationRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One link of the compare-and-set chain: who trains, with what, from where, and why.

    ``restore`` is None when nothing can be restored from memory (first start, or too much was
    lost): the workers then load the newest checkpoint, or begin at step 0. ``fallbacks`` are the
    points to try next, newest first, when ``restore`` fails while it is read. ``nodes`` maps every
    node of the group to its identity (`membership.identity`), by which a changed one is known.
    ``timeline`` is what `plan.on_timeline` needs to refuse snapshots of rolled-back futures.
    ``mesh`` is the grid of the ranks, ``shares`` how many of a step's microbatches each of its
    data-parallel groups runs (empty: even shares), the same for those that share experts.
    ``setbacks`` are the nodes that were lost before, by which those that come and go are held off.
    """

    number: int
    members: tuple[Member, ...]
    snapshots: SnapshotWorld
    restore: RestorePoint | None
    reason: str
    fallbacks: tuple[RestorePoint, ...] = ()
    nodes: dict[str, str] = {}
    timeline: tuple[Origin, ...] = ()
    mesh: MeshSize = MeshSize()
    shares: tuple[int, ...] = ()
    setbacks: dict[str, Setback] = {}


class JobOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How the job ended; written once. ``result`` is what rank 0 returned."""

    ok: bool
    message: str
    result: Json = None


class Roster(msgspec.Struct, frozen=True, kw_only=True):
    """What every worker is told of the whole job, whenever it changes."""

    nodes: tuple[NodeRecord, ...] = ()
    generation: GenerationRecord | None = None


learn(globals())
