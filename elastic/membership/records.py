"""The records of the control plane: nodes, seats and generations. Pure values.

No record can be part of a reference cycle, and a large job has tens of thousands. So the garbage
collector skips the kinds with one record or more per node (``gc=False``).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from holdfast.ckpt.memory.records import Inventory, RestorePoint, SnapshotWorld
from holdfast.ckpt.parity.groups import GROUP_SIZE
from holdfast.ckpt.types import Json, learn

TRAINER = "trainer"
"""The role whose workers form the ranks of a generation; workers of other roles run alongside."""

RESTORE_AT_MOST = "restore_at_most"
"""In the ``info`` of trainers that left a generation to roll back: the newest step to restore."""

REPLICATED_BYTES = "replicated_bytes"
"""In the ``info`` of trainers that left a generation: the bytes of state that replicas share."""

REPLACEABLE = "replaceable_stages"
"""In the ``info`` of trainers that left a generation: the places of the pipeline whose stages can
be set from others, each with the places that they need."""


class WorkerState(StrEnum):
    """The state of a worker; it enters a generation only from READY."""

    STARTING = "starting"
    READY = "ready"
    ACTIVE = "active"
    DONE = "done"
    DEAD = "dead"


class MeshSize(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a mesh's axes: ``dp`` data-parallel groups of ``tp`` × ``pp`` ranks each.

    The experts are spread over ``ep`` consecutive groups (1: every group has all). ``shard``
    consecutive groups share the state, and the next ones hold it again (1: the state is not
    replicated in that way); then ``ep`` divides ``shard``.
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
        """The number of ranks in a data-parallel group."""
        return self.tp * self.pp

    @property
    def near(self) -> int:
        """The number of consecutive ranks that communicate most with each other."""
        return max(self.shard, self.ep) * self.cell

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.dp * self.cell

    @property
    def text(self) -> str:
        """The sizes as text, without axes of size 1."""
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
    """The decorated function's request to the control plane; every trainer announces the same.

    ``dp`` is the number of data-parallel groups to wait for, None to take all that are ready, from
    ``min_dp`` up to ``max_dp`` (None: no limit); further ready trainers are spares. ``tp``, ``pp``,
    ``ep`` and ``shard`` are the accepted sizes, preferred ones first; if ``shard`` is requested,
    ``ep`` must divide it. ``microbatches`` is the work of a step, 0 if it is not shared by speed.
    ``device`` is the device type of all ranks, ``"cpu"`` or ``"cuda"``. ``stage`` counts the
    decorated functions that the script has called before and that are complete. ``parity_group`` is
    the preferred size of a parity group; ``columns`` and ``memory_bytes`` as in `SnapshotWorld`.
    ``beyond``: lost stages of a pipeline are set from others if every restore point is more than so
    many steps older; None: never.
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
    stage: int = 0
    beyond: int | None = None

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
        if self.beyond is not None and self.beyond < 1:
            raise ValueError(f"beyond is {self.beyond}; give 1 or more steps")

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
        """Return whether experts can be spread this way: over the shards of one replica, if any."""
        return self.shard == (1,) or shard % ep == 0

    @property
    def least_dp(self) -> int:
        """The number of data-parallel groups that a generation needs."""
        return self.min_dp if self.dp is None else self.dp

    @property
    def least(self) -> int:
        """The number of trainers that a generation needs: that of the smallest accepted mesh."""
        return self._least_groups * min(self.tp) * min(self.pp)

    @property
    def _least_groups(self) -> int:
        pairs = [(ep, shard) for ep in self.ep for shard in self.shard]
        steps = [max(ep, shard) for ep, shard in pairs if self.goes(ep=ep, shard=shard)]
        return min(-(-self.least_dp // step) * step for step in steps)

    @property
    def most(self) -> int | None:
        """The number of trainers that a generation can use, None if there is no limit."""
        groups = self.max_dp if self.dp is None else self.dp
        return None if groups is None else groups * max(self.tp) * max(self.pp)


class RoleAsk(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The numbers of workers, by role, that rank 0 of ``generation`` asks for, and the ``reason``.

    ``waits`` is the share of a step's time for which the trainers waited for the others, ``works``
    the share for which the others were at work. A step takes ``step_s``, and ``expected_s`` with
    these numbers.
    """

    generation: int
    roles: dict[str, int]
    reason: str = ""
    waits: float = 0.0
    works: float = 0.0
    step_s: float = 0.0
    expected_s: float = 0.0

    @property
    def why(self) -> str:
        """The reason with the seconds of a step, as a clause."""
        return f"{self.reason}; {self.step_s:.3g} s a step, {self.expected_s:.3g} s expected"


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A worker process: its seat (``"trainer/0"``), a fresh incarnation id, its state.

    ``attempt`` is that of the seating that started it. ``info`` holds the values that the worker
    announced when it became ready (``store``: the ``host:port`` of its TCPStore; and values of its
    role). ``ready_after`` is the last generation it took part in (0: none): it is ready for any
    later one. ``result`` is the result of a DONE worker, ``ending`` describes how a DEAD one ended
    (``"killed by SIGKILL"``). A record stays until its seat has a newer attempt. ``speed`` is in
    microbatches per second of computing, 0 while not measured; ``waits``, ``data`` and ``busy`` are
    as in `stragglers.RankPace`. ``lingers``: it is DONE, and its script may yet come to another
    stage. ``broke``: it was DONE, and then its process ended with an error. ``fault`` is the kind
    and line of the error of the user's code that ended a DEAD one, if a retry meets it again
    (``"KeyError at train.py:41"``); else it is empty. ``asks`` is the newest `RoleAsk` of rank 0.
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
    lingers: bool = False
    broke: bool = False
    fault: str = ""
    asks: RoleAsk | None = None


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The record that an agent publishes under its lease.

    ``slots`` maps a role to the number of its workers that fit. ``sidecar`` is the sidecar's
    address, empty while it is down; ``sidecar_starts`` counts the starts by this agent, to tell a
    sidecar from its predecessor. ``fenced`` is the newest generation in which no local worker is
    active any more, or ever will be; ``inventory`` was taken after that. ``leaving`` is its place
    among the nodes with a notice, which leave one after the other; 0: no notice. ``stalled`` is the
    generation in which all its trainers have waited too long for others; ``stands`` are the places
    in the user's code where they wait in generation ``standing``, by seat, sooner than that.
    ``unreachable`` are the nodes that its agent does not reach, each with its identity
    (`membership.identity`) at the time of the probe; ``probed`` is the generation in which it has
    probed all nodes of the group.
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
    standing: int = 0
    stands: dict[str, str] = {}
    unreachable: dict[str, str] = {}
    probed: int = 0


class Seating(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The assignment of a seat to a node: the only order by which agents start workers.

    ``attempt`` numbers the starts of this seat from 1. ``failures`` counts those in a row that
    ended without a newly protected step; ``progress`` is the newest protected step known when
    the last of them was ordered (-1: none). ``fault`` is that of the last worker which failed, as
    in `WorkerRecord`. ``slot`` is the role whose slot the seat has, if that is not its own role: a
    worker was moved between roles.
    """

    seat: str
    node: str
    attempt: int
    failures: int = 0
    progress: int = -1
    fault: str = ""
    slot: str = ""


class Member(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A rank of a generation: its worker, and the values that the worker announced."""

    rank: int
    seat: str
    node: str
    incarnation: str
    info: dict[str, Json] = {}


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """The origin of a generation: snapshots of older generations are valid only up to ``step``.

    ``step`` is -1 if it restored nothing from memory: then no older snapshot is valid.
    """

    generation: int
    step: int


class Setback(msgspec.Struct, frozen=True, kw_only=True):
    """A node's number of losses, and the seconds without trouble since the last one."""

    losses: int
    calm_s: float = 0.0


class GenerationRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One link of the compare-and-set chain: members, mesh, restore point and reason.

    ``restore`` is None if nothing can be restored from memory (first start, or too much was lost):
    then the workers load the newest checkpoint, or begin at step 0. ``fallbacks`` are the points to
    try next, newest first, if reading ``restore`` fails. ``before``, if not empty, says that memory
    may have lost newer steps than ``restore``: it is the timeline until now, and a newer checkpoint
    of it comes first. ``nodes`` maps every node of the group to its identity
    (`membership.identity`), which reveals a changed node. ``timeline`` lets `plan.on_timeline`
    refuse snapshots that a roll-back abandoned. ``mesh`` is the grid of the
    ranks. ``shares`` are the numbers of a step's microbatches per data-parallel group (empty: even
    shares), equal for groups that share experts. ``setbacks`` are the nodes that were lost before,
    for the hold-off of nodes that come and go.
    """

    number: int
    members: tuple[Member, ...]
    snapshots: SnapshotWorld
    restore: RestorePoint | None
    reason: str
    fallbacks: tuple[RestorePoint, ...] = ()
    before: tuple[Origin, ...] = ()
    nodes: dict[str, str] = {}
    timeline: tuple[Origin, ...] = ()
    mesh: MeshSize = MeshSize()
    shares: tuple[int, ...] = ()
    setbacks: dict[str, Setback] = {}


class Decider(msgspec.Struct, frozen=True, kw_only=True):
    """An agent that decides for all in a large job: its node and the agent's incarnation."""

    node: str
    incarnation: str


class Bulletin(msgspec.Struct, frozen=True, kw_only=True):
    """The newest word of the deciders to the agents that do not watch the nodes' records.

    ``number`` counts the bulletins. ``over`` is the newest generation that cannot continue, for
    ``reason``: fence it. ``halt`` is the newest generation whose trainers are to halt at the end of
    their step, because others join. ``look_around``: some node is stuck, all watch and probe.
    ``stage`` is the newest stage that any trainer has come to.
    """

    number: int
    over: int = 0
    halt: int = 0
    reason: str = ""
    look_around: bool = False
    stage: int = 0


class JobOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of the job, written once. ``result`` is the result of rank 0."""

    ok: bool
    message: str
    result: Json = None


class Roster(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the whole job, sent to every worker whenever it changes."""

    nodes: tuple[NodeRecord, ...] = ()
    generation: GenerationRecord | None = None

    def in_stages_after(self, stage: int) -> list[WorkerRecord]:
        """Return the workers that take part in a later stage."""
        return [
            worker
            for node in self.nodes
            for worker in node.workers
            if worker.spec is not None
            and worker.spec.stage > stage
            and worker.state in (WorkerState.READY, WorkerState.ACTIVE)
        ]


learn(globals())
