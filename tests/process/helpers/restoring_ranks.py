"""Two ranks as threads that restore from real sidecars, in step with each other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sidecar_group import SidecarGroup, inventories
from thread_gather import ThreadGather
from torch import nn

from holdfast.ckpt.memory.fixed_files import HEADER_BYTES
from holdfast.ckpt.memory.maps import SlotMaps
from holdfast.ckpt.memory.records import BlockSource, RestorePoint, SnapshotWorld
from holdfast.ckpt.parity.stripes import restore_points
from holdfast.ckpt.snapshot.snapshotter import Snapshotter
from holdfast.elastic.errors import GenerationOverError
from holdfast.elastic.events import RestoreFailed, RestoreProgressed
from holdfast.elastic.membership.records import GenerationRecord, Origin
from holdfast.elastic.tracked.restoring import Restorer
from holdfast.elastic.tracked.sources.restored import Restored

NODES = ("a", "b", "c")
RANK_NODES = ("a", "b")
STEPS = (1, 2)


def called(body: Callable[[], Any], *, name: str, limit_s: float | None = None) -> Any:
    """Do what the guard of a generation does with a call, without looking for a fence."""
    pool = ThreadPoolExecutor(1, thread_name_prefix=name)
    try:
        return pool.submit(body).result(limit_s)
    finally:
        pool.shutdown(wait=False)


def build(fill: float) -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(600, 500), nn.Linear(500, 300))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(fill)
    return {"model": model, "step": int(fill)}


def value(state: dict[str, Any]) -> float:
    """The one number the state is filled with, and its step."""
    found = {float(number) for p in state["model"].parameters() for number in p.detach().unique()}
    assert found == {float(state["step"])}, "parts of several steps"
    return found.pop()


class Ranks:
    """Two ranks as threads, with the state that each needs and the events of each.

    ``ahead`` says whether they open what they restore before their state is there, and
    ``meanwhile`` is what happens while that is built.
    """

    ahead = False

    def __init__(self) -> None:
        self.meanwhile: Callable[[], None] = lambda: None
        self.gather = ThreadGather(len(RANK_NODES)).of
        self.events: list[RestoreFailed | RestoreProgressed] = []
        self.fenced = False

    def check(self) -> None:
        if self.fenced:
            raise GenerationOverError("generation 2 is over")

    def run(self, body: Callable[[int], Any]) -> list[Any]:
        """Return what ``body`` returned or raised, per rank."""
        results: dict[int, Any] = {}

        def one(rank: int) -> None:
            try:
                results[rank] = body(rank)
            except Exception as error:  # noqa: BLE001 - told to the test
                results[rank] = error

        threads = [threading.Thread(target=one, args=(r,)) for r in range(len(RANK_NODES))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return [results[rank] for rank in range(len(RANK_NODES))]


def save(group: SidecarGroup, ranks: Ranks) -> tuple[RestorePoint, ...]:
    """Snapshot two steps in generation 1, and enter generation 2; return the restore points."""
    world = group.adopt(rank_nodes=RANK_NODES)

    def body(rank: int) -> None:
        snapshots = Snapshotter(
            group.clients[RANK_NODES[rank]],
            run=group.run,
            generation=1,
            rank=rank,
            world_size=len(RANK_NODES),
            gather=ranks.gather(rank),
        )
        for step in STEPS:
            snapshots.snapshot(build(step), step)
            snapshots.fence()
            group.await_protected(world, step)
        snapshots.close()

    assert ranks.run(body) == [None, None]
    points, _ = restore_points(inventories(group))
    assert [point.step for point in points] == [2, 1]
    group.adopt(rank_nodes=RANK_NODES, generation=2, restore=points[0])
    return tuple(points)


def damage(group: SidecarGroup, point: RestorePoint, rank: int) -> None:
    """Flip a bit in the middle of a block's tensors."""
    source = BlockSource(rank=rank, node=RANK_NODES[rank])
    client = group.clients[source.node]
    handle = client.open_block(point.world, point.step, source)
    with Path(handle.path).open("r+b") as slot:
        at = HEADER_BYTES + handle.payload_bytes // 2
        slot.seek(at)
        (byte,) = slot.read(1)
        slot.seek(at)
        slot.write(bytes([byte ^ 4]))


def restore(
    group: SidecarGroup,
    ranks: Ranks,
    *points: RestorePoint,
    root: Path | None = None,
    number: int = 2,
    before: tuple[Origin, ...] = (),
    timeline: tuple[Origin, ...] = (),
) -> tuple[list[Any], list[dict[str, Any]]]:
    """Have both ranks restore in generation 2; return what came of it, and their states.

    ``number`` is that of the record. The run is that of checkpoints that belong to none, ``""``.
    """
    addresses = group.addresses()
    world = SnapshotWorld(
        run=group.run,
        generation=2,
        peers=tuple(peer for peer in points[0].world.peers if peer.node in addresses),
        rank_nodes=RANK_NODES,
        parity=1,
        keep=2,
    )
    record = GenerationRecord(
        number=number,
        members=(),
        snapshots=world,
        restore=points[0] if number > 1 else None,
        fallbacks=points[1:],
        before=before,
        timeline=timeline,
        reason="test",
    )
    states = [build(0) for _ in RANK_NODES]

    def body(rank: int) -> Restored:
        found: Any = SimpleNamespace(
            record=record,
            size=len(RANK_NODES),
            rank=rank,
            generation=2,
            gather=ranks.gather(rank),
            guard=SimpleNamespace(check=ranks.check, call=called),
        )
        channel: Any = SimpleNamespace(
            run="",
            node=RANK_NODES[rank],
            key=group.key,
            emit=ranks.events.append,
        )
        client = group.clients[RANK_NODES[rank]]
        with Restorer(channel, found, client=client, maps=SlotMaps()) as restorer:
            if ranks.ahead:
                restorer.open_ahead()
                assert restorer._opening is not None
                restorer._opening._thread.join(30)
            ranks.gather(rank)(None)
            if rank == 0:
                ranks.meanwhile()
            ranks.gather(rank)(None)
            return restorer.restore(states[rank], root=str(root) if root else None)

    return ranks.run(body), states


def steps_held(group: SidecarGroup) -> set[int]:
    return {entry.step for each in inventories(group) for entry in each.blocks}


def without_memory(group: SidecarGroup, ranks: Ranks) -> tuple[RestorePoint, ...]:
    """Save steps 1 and 2, and damage both beyond repair."""
    points = save(group, ranks)
    for point in points:
        for rank in range(len(RANK_NODES)):
            damage(group, point, rank=rank)
    return points
