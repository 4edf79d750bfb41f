"""The functions of ranks of a large world, in which a few ranks stand for many."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from signal import SIGKILL
from typing import Any

import torch
import torch.distributed as dist
from rank_bodies import all_collectives, await_files
from ranks import enter

from holdfast.elastic.errors import ConfigError, GenerationOverError
from holdfast.elastic.groups import reform
from holdfast.elastic.groups.circles import WorldScale
from holdfast.elastic.membership.records import MeshSize

SCALE = WorldScale(many=2, fan_out=2)
NODE_RANKS = 2


def all_messages(
    rank: int,
    stores: list[str],
    folder: Path,
    *,
    scale: WorldScale = SCALE,
    node_ranks: int = NODE_RANKS,
) -> dict[str, Any]:
    """Send every kind of message that the loop sends, and torch's own, through a large world."""
    world = enter(rank, stores, folder, scale=scale, node_ranks=node_ranks)
    size = world.size
    found: dict[str, Any] = {}
    short = torch.arange(3) * (rank + 1)
    world.sum_(short)
    found["sum"] = short.tolist()
    highest = torch.tensor([rank + 1.0, -rank - 1.0, float("nan") if rank == 1 else 0.0])
    world.max_(highest)
    found["max"] = str(highest.tolist())
    found["any"] = [world.any_of(rank == size - 1), world.any_of(False)]
    found["gather"] = world.gather({"rank": rank, "text": "x" * rank})
    long = bytearray(bytes([rank]) * (3000 * rank))
    found["long"] = [
        (len(each), set(each) <= {i}) for i, each in enumerate(world.gather_bytes(long))
    ]
    found["plans"] = [world.gather_plans({"rank": rank, "turn": turn}) for turn in range(3)]
    world.barrier()
    floats = torch.full((1 << 15,), rank + 0.5)
    world.sum_(floats)
    found["floats"] = floats.unique().tolist()
    world.start_sum(aside := torch.ones(4))()
    found["aside"] = aside.unique().tolist()
    total = torch.full((3,), rank + 1)
    dist.all_reduce(total)
    found["all_reduce"] = total.tolist()
    root = torch.tensor([float(rank)])
    world.broadcast(root)
    found["broadcast"] = root.item()
    found.update(_between_two(rank, size))
    world.barrier()
    reform.leave()
    return found


def all_collectives_of_large(rank: int, stores: list[str], folder: Path) -> dict[str, Any]:
    """Call every collective of torch's in a large world."""
    world = enter(rank, stores, folder, scale=SCALE, node_ranks=NODE_RANKS)
    return all_collectives(world, folder)


def _between_two(rank: int, size: int) -> dict[str, Any]:
    """Send around the ring, each rank before it receives, and twice; then refuse any source."""
    right, left = (rank + 1) % size, (rank - 1) % size
    rooms = [torch.zeros(2), torch.zeros(2)]
    sends = [dist.isend(torch.full((2,), 10.0 * rank + turn), right) for turn in range(2)]
    receives = [dist.irecv(room, left) for room in rooms]
    for work in [*receives, *sends]:
        assert work is not None
        work.wait()
    batch = torch.zeros(2)
    far = rank ^ 1 if rank ^ 1 < size else rank
    if far != rank:
        pair = [dist.P2POp(dist.isend, rooms[0].clone(), far), dist.P2POp(dist.irecv, batch, far)]
        for work in dist.batch_isend_irecv(pair):
            work.wait()
    try:
        dist.recv(torch.zeros(1))
        refused = ""
    except ConfigError as error:
        refused = str(error)
    return {"ring": [room.tolist() for room in rooms], "refused": refused, "batch": batch.tolist()}


def meshes_in_large(rank: int, stores: list[str], folder: Path) -> dict[str, Any]:
    """Sum and compare along the axes of a mesh; its data-parallel groups have trees too."""
    world = enter(
        rank,
        stores,
        folder,
        mesh=MeshSize(dp=len(stores) // 2, tp=2),
        axes=("dp", "tp"),
        scale=SCALE,
        node_ranks=NODE_RANKS,
    )
    mine = torch.tensor([rank])
    world.dp.sum_(mine)
    part = torch.tensor([float(rank)])
    dist.all_reduce(part, group=world.mesh.get_group("tp"))
    found = {"dp": mine.item(), "tp": part.item(), "groups": world.gather_groups(rank)}
    world.barrier()
    reform.leave()
    return found


def generations_of_large(rank: int, stores: list[str], folder: Path) -> list[int]:
    """Lose the last rank while generation 1 forms, and form others without it.

    It never comes, or dies so many milliseconds after it began as a file says.
    """
    if rank == len(stores) - 1:
        (folder / "absent").touch()
        if not (timing := folder / "dies-after-ms").exists():
            await_files([folder / "never"])
        timer = threading.Timer(int(timing.read_text()) / 1000, os.kill, (os.getpid(), SIGKILL))
        timer.daemon = True
        timer.start()
    try:
        world = enter(rank, stores, folder, scale=SCALE, node_ranks=NODE_RANKS)
        while True:
            world.gather("x" * 2000)
            dist.all_reduce(torch.ones(1 << 10))
    except GenerationOverError:
        (folder / f"parked-{rank}").touch()
    reform.leave()
    await_files([folder / f"parked-{other}" for other in range(len(stores) - 1)])
    found = []
    for number in range(2, 6):
        world = enter(rank, stores[:-1], folder, number=number, scale=SCALE, node_ranks=NODE_RANKS)
        total = torch.tensor([rank + 1])
        dist.all_reduce(total)
        world.sum_(total)
        found.append(int(total.item()))
        world.barrier()
        reform.leave()
    return found


def message_until_hurt(rank: int, stores: list[str], folder: Path) -> int:
    """Send short messages through the tree, and long ones around the ring, without end."""
    world = enter(rank, stores, folder, scale=SCALE, node_ranks=NODE_RANKS)
    long = torch.ones(1 << 14)
    for turn in range(1_000_000):
        world.gather("x" * 2000)
        dist.all_reduce(long)
        long.div_(world.size)
        if turn == 5:
            (folder / f"warm-{rank}").touch()
    return 0
