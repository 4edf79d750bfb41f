"""Form the process group and mesh of a generation, and leave them again, in a living process."""

from __future__ import annotations

import sys
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ckpt.errors import StateError
from ckpt.replan import StoreGather
from ckpt.types import Json
from elastic import collectives
from elastic.collectives import Guard
from elastic.errors import ElasticError
from elastic.records import GenerationRecord

AXIS = "dp"
LOOPBACK = "127.0.0.1"
_CONNECT_TIMEOUT_S = 30.0


class MeetingPoint:
    """This worker's TCPStore server: where a generation meets when the worker is its rank 0.

    It lives as long as the worker; generations are told apart by a prefix.
    """

    def __init__(self, host: str = LOOPBACK) -> None:
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self.host, self.address = host, f"{host}:{self._store.port}"


class World:
    """The ranks of one generation: group, mesh, and the few collectives the loop needs itself."""

    def __init__(
        self,
        record: GenerationRecord,
        *,
        rank: int,
        guard: Guard,
        mesh: DeviceMesh,
        plans: StoreGather,
    ) -> None:
        self.record, self.rank, self.guard, self.mesh = record, rank, guard, mesh
        self.size = len(record.members)
        self.plans = plans

    @property
    def generation(self) -> int:
        """The generation's number."""
        return self.record.number

    def max_(self, tensor: torch.Tensor) -> None:
        """Take the element-wise largest of all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)

    def sum_(self, tensor: torch.Tensor) -> None:
        """Add up all ranks' tensors, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)

    def gather(self, value: Json) -> list[Json]:
        """Return every rank's value, in rank order; values are JSON, never code."""
        if self.size == 1:
            return [value]
        data = msgspec.json.encode(value)
        sizes = torch.zeros(self.size, dtype=torch.int64)
        sizes[self.rank] = len(data)
        dist.all_reduce(sizes)
        longest = int(sizes.max())
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        all_ = torch.zeros(self.size * longest, dtype=torch.uint8)
        dist.all_gather_single(all_, mine)
        rows = all_.view(self.size, longest)
        return [
            msgspec.json.decode(bytes(row[:size].numpy()))
            for row, size in zip(rows, sizes.tolist(), strict=True)
        ]

    def gather_plans(self, value: Json) -> list[Json]:
        """Gather as `gather` does, but apart from all collectives: a rank may come alone.

        Raises ``StateError`` where the others do not come, ``Fenced`` when the generation is over.
        """
        found: list[Json] | StateError = self.guard.call(lambda: self._planned(value), name="plan")
        if isinstance(found, StateError):
            raise found
        return found

    def _planned(self, value: Json) -> list[Json] | StateError:
        try:
            return self.plans(value)
        except StateError as error:
            return error  # no fence explains it, so none is waited for

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.size > 1:
            dist.barrier()


def form(
    record: GenerationRecord,
    *,
    incarnation: str,
    guard: Guard,
    host: str,
    timeout_s: float,
) -> World:
    """Meet the other members of ``record`` and return the world they make.

    Raises ``Fenced`` as soon as the generation is over, whatever the others do.
    """
    rank = next((m.rank for m in record.members if m.incarnation == incarnation), None)
    if rank is None:
        raise ElasticError(f"generation {record.number} does not contain worker {incarnation}")
    collectives.use(guard, host=host)
    meeting = str(record.members[0].info.get("store", ""))
    address, _, port = meeting.rpartition(":")
    if not address or not port.isdigit():
        raise ElasticError(f"rank 0 of generation {record.number} announced store {meeting!r}")
    store = guard.call(
        lambda: TCPStore(
            address, int(port), is_master=False, timeout=timedelta(seconds=_CONNECT_TIMEOUT_S)
        ),
        name="meet",
    )
    size = len(record.members)
    hook = sys.excepthook
    try:
        dist.init_process_group(
            f"cpu:{collectives.BACKEND}",
            store=PrefixStore(f"g{record.number}", store),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
        )
    finally:
        sys.excepthook = hook  # torch wraps it anew at every call
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=(AXIS,))
    plans = StoreGather(
        PrefixStore(f"g{record.number}/plans", store), rank=rank, size=size, poll=guard.check
    )
    return World(record, rank=rank, guard=guard, mesh=mesh, plans=plans)


def leave() -> int:
    """Give up the present group, if any; return how many old groups are still busy inside gloo."""
    if dist.is_initialized():
        dist.destroy_process_group()
    # After a formation that was interrupted, names would differ between ranks.
    dist.distributed_c10d._world.group_count = 0
    # Cached sharding results hold the mesh, and with it the group, of the old generation.
    torch._C._clear_DTensor_sharding_propagator_cache()
    return collectives.bury()
