"""Formation of a generation's process group and mesh in a living process, and their release."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Literal, TypeAlias

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import Work
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from holdfast.ckpt import torch_private
from holdfast.ckpt.errors import HoldfastError, StateError
from holdfast.ckpt.snapshot.store_gather import StoreGather
from holdfast.ckpt.torch_private import PrefixStore, Store
from holdfast.ckpt.transport import RunKey
from holdfast.ckpt.types import Json
from holdfast.elastic.groups import collectives, devices
from holdfast.elastic.groups.apart import PointsOf
from holdfast.elastic.groups.circles import WorldScale
from holdfast.elastic.groups.collectives import Connect
from holdfast.elastic.groups.forming import LargeWorld
from holdfast.elastic.groups.shards import counts_here
from holdfast.elastic.groups.tree import MessageTree, adds, compares
from holdfast.elastic.groups.tree_plans import TreeGather
from holdfast.elastic.groups.trees import NO_TREES, Trees, plans_of, trees_of
from holdfast.elastic.groups.waits import WaitGuard
from holdfast.elastic.meeting.point import LOOPBACK, keys_of
from holdfast.elastic.meeting.store import MeetingStore
from holdfast.elastic.membership.records import GenerationRecord, MeshSize
from holdfast.elastic.planning.meshes import Coordinates, coordinates, rank_of

AXES = ("dp",)
"""The axes of a purely data-parallel mesh."""

MODEL_AXES: Final = frozenset({"tp", "pp", "ep"})
"""Axes along which all ranks run the same microbatches, or theirs at the same time."""

SCALE = WorldScale()
"""The limits of worlds; not final, because a test makes a few ranks a large world."""

_points: list[PointsOf] = []  # the newest generation's, if its world is large
_meetings: list[MeetingStore] = []  # the newest generation's; groups see it while it is here


def host_of(address: str) -> str:
    """Return the host in ``tcp://host:port``; a sidecar's workers are reached at its host."""
    return address.partition("://")[2].rpartition(":")[0] or LOOPBACK


_CPU = torch.device("cpu")

Plans: TypeAlias = StoreGather | TreeGather
"""The gather of plans, beside the collectives; in a large world through circles."""


class Peers:
    """A set of ranks that reduce among themselves.

    ``index`` is this rank's place among ``size``. Of many ranks, short tensors that have equal sums
    in any order take the ``tree``.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        index: int,
        size: int,
        tree: MessageTree | None = None,
    ) -> None:
        self._group, self.index, self.size = group, index, size
        self._tree = tree

    def max_(self, tensor: torch.Tensor) -> None:
        """Reduce to the element-wise maximum over the ranks, in place."""
        if self._tree is not None and compares(tensor):
            self._tree.max_(tensor)
        elif self.size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group)

    def sum_(self, tensor: torch.Tensor) -> None:
        """Add up the ranks' tensors, in place."""
        if self._tree is not None and adds(tensor):
            self._tree.sum_(tensor)
        elif self.size > 1:
            dist.all_reduce(tensor, group=self._group)

    def start_sum(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Start to add up the ranks' tensors, in place.

        Return a function that waits for the sum.
        """
        if self.size == 1:
            return lambda: None
        work = dist.all_reduce(tensor, group=self._group, async_op=True)
        return functools.partial(_wait, work)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientGroups:
    """The groups of a rank that sum gradients (`GenerationWorld.dp`, ``edp``); None: all ranks."""

    dp: dist.ProcessGroup | None
    edp: dist.ProcessGroup | None


class GenerationWorld(Peers):
    """The ranks of one generation: group, mesh, and the few collectives that the loop needs.

    ``board`` is a store of this generation, where ranks say that they left the loop. ``device`` is
    the rank's device; another thread's current device may be another.
    """

    def __init__(  # noqa: PLR0913 - made in two places, all by keyword
        self,
        record: GenerationRecord,
        *,
        rank: int,
        guard: WaitGuard,
        mesh: DeviceMesh,
        data_mesh: DeviceMesh,
        groups: GradientGroups,
        plans: Plans,
        board: Store | None = None,
        timeout_s: float = math.inf,
        trees: Trees = NO_TREES,
    ) -> None:
        super().__init__(None, index=rank, size=record.mesh.ranks, tree=trees.world)
        self.board = board
        self._timeout_s = timeout_s
        self.record, self.rank, self.guard, self.mesh = record, rank, guard, mesh
        self.data_mesh = data_mesh
        self.device = _device_of(mesh)
        self._streams: set[Any] = set()
        self._place = coordinates(rank, record.mesh)
        self._dp = Peers(groups.dp, index=self._place.dp, size=record.mesh.dp, tree=trees.dp)
        copies = record.mesh.dp // record.mesh.ep
        index = self._place.dp // record.mesh.ep
        self._edp = Peers(groups.edp, index=index, size=copies, tree=trees.edp)
        self.plans = plans
        self._aside: Peers | None = None

    @property
    def generation(self) -> int:
        """The generation's number."""
        return self.record.number

    @property
    def dp(self) -> Peers:
        """The ranks that do the same work on other microbatches; the world if all ranks do."""
        return self if self.record.mesh.cell == 1 else self._dp

    @property
    def edp(self) -> Peers:
        """The ranks of `dp` that have the same experts as this rank."""
        return self.dp if self.record.mesh.ep == 1 else self._edp

    @property
    def speaks(self) -> bool:
        """True if this rank reports for its data-parallel group, whose ranks hold equal values."""
        return self._place.tp == 0 and self._place.pp == self.record.mesh.pp - 1

    def unite(self, names: list[str]) -> list[str]:
        """Return the union of the names over all stages; collective if there are several stages."""
        if self.record.mesh.pp == 1:
            return names
        return sorted({str(name) for found in self.gather(list(names)) for name in found})

    def any_of(self, fact: bool) -> bool:
        """Return whether a fact is true at any rank; collective."""
        said = torch.tensor([int(fact)])
        self.max_(said)
        return bool(said)

    def over_stages(self, count: int) -> int:
        """Add up over the stages a count that is equal on all ranks of a stage.

        Collective like `unite`.
        """
        if self.record.mesh.pp == 1:
            return count
        first = self._first_of_stage == self.rank
        total = torch.tensor([count if first else 0], dtype=torch.int64)
        self.sum_(total)
        return int(total)

    @property
    def _first_of_stage(self) -> int:
        return rank_of(Coordinates(0, self._place.pp, 0), self.record.mesh)

    def counts(self, tensor: torch.Tensor) -> bool:
        """Return whether this rank counts its part of a tensor.

        Of ranks with the same part one does.
        """
        return counts_here(tensor, rank=self.rank, first=self._first_of_stage)

    def start_sum(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Start to add up all ranks' tensors, in place; return a function that waits for the sum.

        It uses a group of its own, so its order relative to other collectives may differ between
        ranks.
        """
        if self.size > 1 and self._aside is None:
            group = dist.new_group()  # released when the generation ends
            self._aside = Peers(group, index=self.rank, size=self.size)
        return self._aside.start_sum(tensor) if self._aside else lambda: None

    def gather(self, value: Json) -> list[Json]:
        """Return every rank's value, in rank order; values are JSON, never code."""
        if self.size == 1:
            return [value]
        found = self.gather_bytes(bytearray(msgspec.json.encode(value)))
        return [msgspec.json.decode(each) for each in found]

    def gather_bytes(self, data: bytearray) -> list[bytearray]:
        """Return every rank's bytes, in rank order; there may be none, and different numbers."""
        if self.size == 1:
            return [data]
        if self._tree is not None:
            return self._tree.gather(data)
        sizes = torch.zeros(self.size, dtype=torch.int64)
        sizes[self.rank] = len(data)
        dist.all_reduce(sizes)
        longest = int(sizes.max())
        mine = torch.zeros(longest, dtype=torch.uint8)
        if data:
            mine[: len(data)] = torch.frombuffer(data, dtype=torch.uint8)
        all_ = torch.zeros(self.size * longest, dtype=torch.uint8)
        if longest:
            dist.all_gather_single(all_, mine)
        rows = all_.view(self.size, longest)
        return [
            bytearray(row[:size].numpy().data)
            for row, size in zip(rows, sizes.tolist(), strict=True)
        ]

    def gather_groups(self, value: Json) -> list[Json]:
        """Return the value of one rank of every data-parallel group, in group order."""
        return self.gather(value)[:: self.record.mesh.cell]

    def gather_plans(self, value: Json) -> list[Json]:
        """Gather like `gather`, but without collectives: a rank may come alone.

        Raises ``StateError`` if the others do not come, ``GenerationOverError`` if the generation
        is over.
        """
        found: list[Json] | StateError = self.guard.call(lambda: self._planned(value), name="plan")
        if isinstance(found, StateError):
            raise found
        return found

    def _planned(self, value: Json) -> list[Json] | StateError:
        try:
            return self.plans(value)
        except StateError as error:
            return error  # no fence explains it, so do not wait for one

    def settle(self) -> None:
        """Wait until this rank's device has finished its work, so that the results can be kept.

        The result of an aborted collective looks like any other number. Raises
        ``GenerationOverError`` if the generation is over, ``TimeoutError`` after the time limit of
        a collective.
        """
        if self.device.type == "cuda":
            from holdfast.elastic.groups import nccl

            streams = {torch.cuda.current_stream(self.device), *self._streams}
            self._streams.clear()
            marks = [stream.record_event() for stream in streams]
            nccl.settle(marks, self.guard, timeout_s=self._timeout_s)

    def stepping(self) -> None:
        """Note the stream in which an optimizer is about to step: `settle` waits for it too."""
        if self.device.type == "cuda":
            self._streams.add(torch.cuda.current_stream(self.device))

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Give every rank the tensor of rank 0, in place."""
        if self.size > 1:
            dist.broadcast(tensor, 0)

    def barrier(self) -> None:
        """Wait for every rank."""
        if self._tree is not None:
            self._tree.meet()
        elif self.size > 1:
            dist.barrier()


def _device_of(mesh: DeviceMesh) -> torch.device:
    kind = mesh.device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else _CPU


def _wait(work: Work | None) -> None:
    if work is not None:
        work.wait()


def form(  # noqa: PLR0913 - called in one place, all by keyword
    record: GenerationRecord,
    *,
    incarnation: str,
    guard: WaitGuard,
    key: RunKey,
    host: str,
    timeout_s: float,
    axes: tuple[str, ...] = AXES,
    device: Literal["cpu", "cuda"] = "cpu",
    scale: WorldScale | None = None,
) -> GenerationWorld:
    """Meet the other members of ``record`` and return the world that they form.

    ``axes`` names the axes of its mesh, ``device`` its device type; ``scale`` says which world is
    large (`SCALE`). Raises ``ConfigError`` if the node has more ranks than such devices,
    ``GenerationOverError`` as soon as the generation is over, whatever the other ranks do.
    """
    scale = scale or SCALE
    rank = next((m.rank for m in record.members if m.incarnation == incarnation), None)
    if rank is None:
        raise HoldfastError(f"generation {record.number} does not contain worker {incarnation}")
    connect = _take_device(record, rank) if device == "cuda" else None
    size, keys = len(record.members), keys_of(record.number)
    large = _large_world(record, key, scale=scale)
    collectives.use(guard, host=host, connect=connect, large=large)
    store = _meet(_store_of(record, 0), key)
    if record.mesh.ranks != size:
        raise HoldfastError(
            f"generation {record.number} has {size} members for a mesh of {record.mesh.text}"
        )
    init_group(
        ",".join(f"{each}:{collectives.BACKEND}" for each in sorted({"cpu", device})),
        store=PrefixStore(keys, store),
        rank=rank,
        size=size,
        timeout_s=timeout_s,
    )
    mesh, data_mesh = meshes_of(record.mesh, axes, device=device)
    if device == "cuda":
        torch_private.keep_random_states(mesh)
    groups = groups_of(mesh, record.mesh, data_mesh=data_mesh)
    plans: Plans
    if large is None:
        flat = PrefixStore(f"{keys}/plans", store)
        plans, trees = StoreGather(flat, rank=rank, size=size, poll=guard.check), NO_TREES
    else:
        plans = plans_of(record, rank, guard, large=large)
        timeout = timedelta(seconds=timeout_s)
        trees = trees_of(record, rank, guard, scale=scale, timeout=timeout)
    return GenerationWorld(
        record,
        rank=rank,
        guard=guard,
        mesh=mesh,
        data_mesh=data_mesh,
        groups=groups,
        plans=plans,
        board=PrefixStore(f"{keys}/left", store),
        timeout_s=timeout_s,
        trees=trees,
    )


def _large_world(record: GenerationRecord, key: RunKey, *, scale: WorldScale) -> LargeWorld | None:
    """Return the meeting points of all ranks, if there are many; those of before are closed."""
    for points in _points:
        points.close()
    _points.clear()
    size = len(record.members)
    if size <= scale.many:
        return None
    addresses = [_store_of(record, rank) for rank in range(size)]
    _points.append(PointsOf(addresses, key, prefix=keys_of(record.number)))
    return LargeWorld(points=_points[0], scale=scale)


def _store_of(record: GenerationRecord, rank: int) -> str:
    """Return the address of a rank's meeting point. Raises ``HoldfastError`` if it has none."""
    meeting = str(record.members[rank].info.get("store", ""))
    address, _, port = meeting.rpartition(":")
    if not address or not port.isdigit():
        raise HoldfastError(
            f"rank {rank} of generation {record.number} announced store {meeting!r}"
        )
    return meeting


def _meet(address: str, key: RunKey) -> MeetingStore:
    """Return the store at ``address``; that of the generation before, if it met there too."""
    if not _meetings or not _meetings[0].is_of(address, key):
        for old in _meetings:
            old.close()
        _meetings[:] = [MeetingStore(address, key)]
    return _meetings[0]


def init_group(backend: str, *, store: Store, rank: int, size: int, timeout_s: float) -> None:
    """Make the default group; keep ``sys.excepthook``, which torch wraps again at every call."""
    hook = sys.excepthook
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
        )
    finally:
        sys.excepthook = hook


def _take_device(record: GenerationRecord, rank: int) -> Connect:
    """Select the rank's CUDA device; return the function that connects it with the others'."""
    from holdfast.elastic.groups import nccl

    index = devices.index_of(rank, record.members, count=torch.cuda.device_count())
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return functools.partial(nccl.connect, device=device)


def meshes_of(
    size: MeshSize, axes: tuple[str, ...], *, device: Literal["cpu", "cuda"] = "cpu"
) -> tuple[DeviceMesh, DeviceMesh]:
    """Return a mesh with the named axes, and one with only its data-parallel axes; collective.

    An axis of the model that spans the world has a group of its own, as it has in a larger world:
    so the default group is always one over data-parallel ranks.
    """
    sizes = size.along(axes)
    backend = dist.get_backend_config()  # that of the default group
    own: dict[int | str, Any] = {
        axis: backend
        for axis, count in zip(axes, sizes, strict=True)
        if axis in MODEL_AXES and count == size.ranks
    }
    mesh = init_device_mesh(device, sizes, mesh_dim_names=axes, backend_override=own or None)
    replicates = "replicate" in axes
    if "ep" not in axes:
        return mesh, mesh["replicate", "shard"] if replicates else mesh["dp"]
    carved = torch_private.flattened(mesh["edp", "ep"], "shard" if replicates else "dp")
    if not replicates:
        return mesh, carved
    return mesh, torch_private.concatenated([mesh["replicate"], carved])


def groups_of(mesh: DeviceMesh, size: MeshSize, *, data_mesh: DeviceMesh) -> GradientGroups:
    """Return the groups that sum gradients; collective."""
    replicates = data_mesh.ndim > 1
    dp: dist.ProcessGroup | None = None
    if size.cell > 1:
        dp = _every(size.cell, size) if replicates else data_mesh.get_group()
    edp: dist.ProcessGroup | None = None
    if size.ep > 1:
        edp = _every(size.ep * size.cell, size) if replicates else mesh["edp"].get_group()
    return GradientGroups(dp=dp, edp=edp)


def _every(step: int, size: MeshSize) -> dist.ProcessGroup:
    """Return the group of this rank and every ``step``-th before and after it."""
    rows = [list(range(first, size.ranks, step)) for first in range(step)]
    mine: dist.ProcessGroup
    mine, _ = dist.new_subgroups_by_enumeration(rows)  # type: ignore[no-untyped-call]
    return mine


def leave() -> int:
    """Abandon the present group, if any; return the number of old groups still busy in gloo."""
    if dist.is_initialized():
        dist.destroy_process_group()
    # After an interrupted formation, group names would differ between ranks.
    torch_private.restart_group_names()
    # Cached sharding results hold the mesh, and with it the group, of the old generation.
    torch_private.drop_sharding_cache()
    return collectives.bury()
