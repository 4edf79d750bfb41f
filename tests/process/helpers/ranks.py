"""Real ranks without agents: processes of one generation, whose fence the test controls."""

from __future__ import annotations

import faulthandler
import os
import queue
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from fork_servers import forking

from holdfast.ckpt.memory.records import SidecarPeer, SnapshotWorld
from holdfast.ckpt.transport import RunKey
from holdfast.elastic.groups import reform
from holdfast.elastic.groups.circles import WorldScale
from holdfast.elastic.groups.waits import WaitGuard
from holdfast.elastic.meeting.point import LOOPBACK, MeetingPoint
from holdfast.elastic.membership.records import GenerationRecord, Member, MeshSize

Body = Callable[[reform.GenerationWorld, Path], Any]

GRACE_S = 10.0
"""Time that a rank waits for the fence that explains an error."""


def record_of(
    stores: list[str], *, number: int = 1, mesh: MeshSize | None = None, node_ranks: int = 0
) -> GenerationRecord:
    """Return a generation of as many ranks as there are stores, ``node_ranks`` of them on a node.

    On one node if none are given.
    """
    nodes = [f"n{i // node_ranks if node_ranks else 0}" for i in range(len(stores))]
    return GenerationRecord(
        number=number,
        members=tuple(
            Member(rank=i, seat=f"trainer/{i}", node=node, incarnation=str(i), info={"store": s})
            for i, (s, node) in enumerate(zip(stores, nodes, strict=True))
        ),
        snapshots=SnapshotWorld(
            run="r",
            generation=number,
            peers=(SidecarPeer(node="n0", address="tcp://127.0.0.1:1"),),
            rank_nodes=("n0",) * len(stores),
            parity=0,
            keep=1,
        ),
        restore=None,
        reason="test",
        mesh=mesh or MeshSize(dp=len(stores)),
    )


KEY = RunKey(
    server_public="Qd}UOxJaPXStdw{DfhQ.La<Lavk=h2:njPB}lsBd",
    server_secret="b6H)5@97.!Z{94N3p>53UcOvGe89$ReLn*fxB$ny",
    client_public="Z=2OUKpqBSiUHWz(xsjXDw6+V!>6<l6LSklf6x-G",
    client_secret="MPi2oO0XopdLcy/1xYjt[PR7<ck9>)zjMFYIK)A7",
)
"""The key of all ranks of tests."""


def fence_file(folder: Path, generation: int) -> Path:
    """The file whose presence ends a generation."""
    return folder / f"fence-{generation}"


def enter(
    rank: int,
    stores: list[str],
    folder: Path,
    *,
    number: int = 1,
    mesh: MeshSize | None = None,
    axes: tuple[str, ...] = reform.AXES,
    scale: WorldScale | None = None,
    node_ranks: int = 0,
) -> reform.GenerationWorld:
    """Form a generation in this process."""
    fence = fence_file(folder, number)
    guard = WaitGuard(number, fence.exists, grace_s=GRACE_S)
    return reform.form(
        record_of(stores, number=number, mesh=mesh, node_ranks=node_ranks),
        incarnation=str(rank),
        guard=guard,
        key=KEY,
        host=LOOPBACK,
        timeout_s=60.0,
        axes=axes,
        scale=scale,
    )


def _main(
    rank: int,
    pipe: Connection,
    folder: Path,
    body: Body,
    with_world: bool,
    environment: dict[str, str],
) -> None:
    os.environ.clear()  # that of the server, which began with another test
    os.environ.update(environment)
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(30)
    meeting = MeetingPoint(KEY)
    pipe.send(meeting.address)
    stores: list[str] = pipe.recv()
    try:
        if with_world:
            pipe.send(("ok", body(enter(rank, stores, folder), folder)))
        else:
            pipe.send(("ok", body(rank, stores, folder)))  # type: ignore[call-arg, arg-type]
    except Exception as error:  # noqa: BLE001 - told to the test
        pipe.send((type(error).__name__, f"{error} {time.time()}"))
    pipe.recv()  # stay until the test is done with the others
    os._exit(0)


class Ranks:
    """Running rank processes and their results."""

    def __init__(self, processes: list[Any], pipes: list[Connection]) -> None:
        self.processes, self._pipes = processes, pipes

    def result(self, rank: int, *, timeout_s: float = 200.0) -> tuple[str, Any]:
        """Return ``("ok", value)`` or ``(error name, text)`` of a rank."""
        if not self._pipes[rank].poll(timeout_s):
            raise queue.Empty(f"rank {rank} said nothing for {timeout_s} s")
        answer: tuple[str, Any] = self._pipes[rank].recv()
        return answer

    def results(self, *, timeout_s: float = 200.0) -> list[Any]:
        """Return every rank's value; fail on an error."""
        answers = [self.result(rank, timeout_s=timeout_s) for rank in range(len(self._pipes))]
        assert all(kind == "ok" for kind, _ in answers), answers
        return [value for _, value in answers]


@contextmanager
def ranks(world_size: int, body: Any, folder: Path, *, with_world: bool = True) -> Iterator[Ranks]:
    """Run ``body`` on ``world_size`` processes; nothing of them is left afterwards."""
    context = forking(__name__, "warmed")
    pipes, processes = [], []
    for rank in range(world_size):
        mine, theirs = context.Pipe()
        args = (rank, theirs, folder, body, with_world, dict(os.environ))
        process = context.Process(target=_main, args=args)
        process.start()
        pipes.append(mine)
        processes.append(process)
    try:
        stores = [pipe.recv() for pipe in pipes]
        for pipe in pipes:
            pipe.send(stores)
        yield Ranks(processes, pipes)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
