"""NCCL and elastic training on CUDA devices: alone, in re-entries, after the loss of a peer."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lone_channel import LoneChannel
from ranks import GRACE_S, KEY, fence_file, ranks, record_of
from torch import nn
from torch.distributed.fsdp import fully_shard

from holdfast.elastic.config import Batch, Mesh, Settings
from holdfast.elastic.errors import ConfigError, GenerationOverError
from holdfast.elastic.groups import devices, nccl, reform
from holdfast.elastic.groups.waits import WaitGuard
from holdfast.elastic.loop.generations import Loop
from holdfast.elastic.loop.run import Run
from holdfast.elastic.meeting.point import LOOPBACK, MeetingPoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and dist.is_nccl_available()),
        reason="needs a CUDA device and a torch with NCCL",
    ),
]

WIDTH = 64


def test_alone_a_function_is_entered_again_on_its_device() -> None:
    channel: Any = LoneChannel()
    losses: list[list[float]] = []

    def body(run: Run) -> str:
        assert run.device == torch.device("cuda", 0)
        assert run.mesh.device_type == "cuda"
        whole = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
        model: Any = fully_shard(whole.to(run.device), mesh=run.mesh)
        found = []
        for _ in range(3):
            loss = model(torch.ones(4, WIDTH, device=run.device)).square().mean()
            loss.backward()
            run._world.settle()
            found.append(loss.item())
        losses.append(found)
        if run.generation == 3:
            return "finished"
        channel.over = run.generation
        run.check()
        raise AssertionError("not reached")

    settings = Settings(mesh=Mesh(device="cuda"), batch=Batch(microbatches=1))
    assert Loop(channel, settings, worker_info=dict).run(body) == "finished"
    assert not dist.is_initialized()
    assert losses[0] == losses[1] == losses[2], "built from the same seed"


def enter(rank: int, stores: list[str], folder: Path, *, number: int) -> reform.GenerationWorld:
    return reform.form(
        record_of(stores, number=number),
        incarnation=str(rank),
        guard=WaitGuard(number, fence_file(folder, number).exists, grace_s=GRACE_S),
        key=KEY,
        host=LOOPBACK,
        timeout_s=60.0,
        device="cuda",
    )


def go_on_alone(rank: int, stores: list[str], folder: Path) -> dict[str, Any]:
    """Reduce on the devices until the peer is hurt; then go on in a generation of one's own."""
    world = enter(rank, stores, folder, number=1)
    model: Any = fully_shard(nn.Linear(WIDTH, WIDTH).to(world.device), mesh=world.mesh)
    tensor = torch.ones(1 << 20, device=world.device)
    try:
        for turn in range(1_000_000):
            model(torch.ones(2, WIDTH, device=world.device)).sum().backward()
            dist.all_reduce(tensor)
            tensor.div_(world.size)
            world.settle()
            assert world.gather(turn) == [turn] * world.size
            if turn == 20:
                (folder / f"warm-{rank}").touch()
    except GenerationOverError:
        fenced_at = time.time()
    busy_s = time.monotonic()
    while reform.leave():
        assert time.monotonic() - busy_s < GRACE_S, "an abort does not come back"
        time.sleep(0.01)
    store = MeetingPoint(KEY)
    world = enter(0, [store.address], folder, number=2)
    alone = torch.full((8,), 3.0, device=world.device)
    dist.all_reduce(alone)
    world.settle()
    reform.leave()
    return {"fenced_at": fenced_at, "sum": alone.tolist()}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("hurt", [signal.SIGKILL, signal.SIGSTOP])
def test_who_waits_for_a_lost_peer_on_the_device_goes_on_alone(
    tmp_path: Path, hurt: signal.Signals
) -> None:
    with ranks(2, go_on_alone, tmp_path, with_world=False) as running:
        deadline_s = time.monotonic() + 60
        while not all((tmp_path / f"warm-{rank}").exists() for rank in range(2)):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        victim = running.processes[1].pid
        assert victim is not None
        os.kill(victim, hurt)
        time.sleep(0.2)  # let the other run into it
        told_at = time.time()
        fence_file(tmp_path, 1).touch()
        kind, found = running.result(0, timeout_s=60)
        assert kind == "ok", found
        assert found["fenced_at"] - told_at < 1.0
        assert found["sum"] == [3.0] * 8


@pytest.fixture
def lone_group() -> Iterator[nccl.NcclGroup]:
    """Yield a real communicator of one rank."""
    group = nccl.connect(
        dist.HashStore(),
        0,
        1,
        timedelta(seconds=60),
        WaitGuard(1, lambda: False),
        device=torch.device("cuda", 0),
    )
    yield group
    group.close()


def test_torch_returns_nothing_for_a_collective_in_the_callers_stream(
    lone_group: nccl.NcclGroup,
) -> None:
    tensor, options = torch.ones(1 << 20, device="cuda"), dist.AllreduceOptions()
    options.asyncOp = False
    assert lone_group._nccl.allreduce([tensor], options) is None, "torch changed: see nccl.NcclWork"
    work = lone_group.start("allreduce", [tensor], options)
    assert work.wait()
    assert work.result()[0] is tensor
    assert work.get_future().wait()[0] is tensor
    torch.cuda.synchronize()
    assert work.is_completed()
    assert work.is_success()


def test_every_operation_works_in_both_ways(lone_group: nccl.NcclGroup) -> None:
    one, other = torch.arange(8.0, device="cuda"), torch.zeros(8, device="cuda")
    calls: dict[str, tuple[Any, ...]] = {
        "allreduce": ([one.clone()],),
        "broadcast": ([one.clone()],),
        "reduce": ([one.clone()],),
        "allgather": ([[other]], [one]),
        "_allgather_base": (other, one),
        "_reduce_scatter_base": (other, one),
        "reduce_scatter": ([other], [[one]]),
        "alltoall_base": (other, one, [], []),
        "alltoall": ([other], [one]),
        "gather": ([[other]], [one]),
        "scatter": ([other], [[one]]),
    }
    for name, arguments in calls.items():
        work = lone_group.start(name, *arguments)
        assert work.wait(), name
        torch.cuda.synchronize()
        assert work.is_completed(), name
        assert work.is_success(), name
    assert torch.equal(one, other)


def test_a_collective_is_not_captured(lone_group: nccl.NcclGroup) -> None:
    with (
        pytest.raises(ConfigError, match="captured into a CUDA graph"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        lone_group.start("allreduce", [torch.ones(2, device="cuda")])


def test_an_abort_comes_back_and_another_group_is_formed_after_it() -> None:
    for number in range(3):
        over = threading.Event()
        guard = WaitGuard(number, over.is_set)
        group = nccl.connect(
            dist.HashStore(), 0, 1, timedelta(seconds=60), guard, device=torch.device("cuda", 0)
        )
        tensor = torch.ones(1 << 20, device="cuda")
        group.start("allreduce", [tensor]).wait()
        over.set()
        deadline_s = time.monotonic() + 30
        while group._ending is None or group.busy:
            assert time.monotonic() < deadline_s, "an abort does not come back"
            time.sleep(0.01)
        with pytest.raises(GenerationOverError):
            group.start("allreduce", [tensor])
    torch.cuda.synchronize()


def test_a_device_is_found_where_there_is_one() -> None:
    assert devices.kind("auto") == "cuda"
