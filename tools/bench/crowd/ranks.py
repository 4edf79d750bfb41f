"""Ranks without agents and without a model: they form a generation, and send short messages."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import msgspec
import torch

from holdfast.ckpt.memory.records import SidecarPeer, SnapshotWorld
from holdfast.ckpt.transport import RunKey
from holdfast.elastic.groups import reform
from holdfast.elastic.groups.circles import WorldScale
from holdfast.elastic.groups.waits import WaitGuard
from holdfast.elastic.meeting.point import LOOPBACK, MeetingPoint
from holdfast.elastic.membership.records import GenerationRecord, Member, MeshSize

_TIMEOUT_S: Final = 300.0
_MESSAGES: Final = 20
_SOCKETS: Final = Path("/proc/self/net/tcp")
_ESTABLISHED: Final = "01"


class RankPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of ``ranks``, ``node_ranks`` of them on a node, which connect by ``scale``."""

    rank: int
    ranks: int
    node_ranks: int
    key: RunKey
    scale: WorldScale


class RankCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that one rank saw, and the counts of it and of its meeting point.

    ``formed`` is after the formation, ``used`` after all kinds of messages and a sum of gradients.
    """

    formed_s: float
    said_s: float
    connections_formed: int
    connections_used: int
    requests: int
    read_bytes: int


def serve(plan: RankPlan, pipe: Connection) -> None:
    """Be a rank: send the address of a meeting point, get those of all, send `RankCosts`."""
    torch.set_num_threads(1)
    point = MeetingPoint(plan.key)
    pipe.send(point.address)
    record = _record(pipe.recv(), plan)
    started_s = time.perf_counter()
    world = reform.form(
        record,
        incarnation=str(plan.rank),
        guard=WaitGuard(1, lambda: False),
        key=plan.key,
        host=LOOPBACK,
        timeout_s=_TIMEOUT_S,
        scale=plan.scale,
    )
    formed_s = time.perf_counter() - started_s
    formed = connections()
    world.barrier()
    said_s = statistics.median(_timed(lambda: _speak(world)) for _ in range(_MESSAGES))
    gradients = torch.ones(1 << 16)
    world.sum_(gradients)
    world.barrier()
    costs = RankCosts(
        formed_s=formed_s,
        said_s=said_s,
        connections_formed=formed,
        connections_used=connections(),
        requests=point.requests,
        read_bytes=point.read_bytes,
    )
    world.barrier()  # all have counted
    pipe.send(msgspec.to_builtins(costs))
    with contextlib.suppress(EOFError):
        pipe.recv()  # stay for the others
    os._exit(0)


def _speak(world: reform.GenerationWorld) -> None:
    """Send what a step of the loop sends: a largest value, and now and then a JSON value."""
    world.any_of(False)
    world.gather({"rank": world.rank})


def _timed(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def connections() -> int:
    """Return the number of this process's TCP connections; on one machine each has two ends."""
    established = {
        fields[9]
        for fields in map(str.split, _SOCKETS.read_text().splitlines()[1:])
        if fields[3] == _ESTABLISHED
    }
    found = 0
    for handle in Path("/proc/self/fd").iterdir():
        try:
            target = str(handle.readlink())
        except OSError:  # that of the listing itself
            continue
        found += target.removeprefix("socket:[").rstrip("]") in established
    return found


def _record(stores: list[str], plan: RankPlan) -> GenerationRecord:
    nodes = [f"n{rank // plan.node_ranks}" for rank in range(plan.ranks)]
    return GenerationRecord(
        number=1,
        members=tuple(
            Member(
                rank=i, seat=f"trainer/{i}", node=node, incarnation=str(i), info={"store": store}
            )
            for i, (node, store) in enumerate(zip(nodes, stores, strict=True))
        ),
        snapshots=SnapshotWorld(
            run="bench",
            generation=1,
            peers=tuple(
                SidecarPeer(node=node, address="tcp://127.0.0.1:1") for node in dict.fromkeys(nodes)
            ),
            rank_nodes=tuple(nodes),
            parity=0,
            keep=1,
        ),
        restore=None,
        reason="bench",
        mesh=MeshSize(dp=plan.ranks),
    )
