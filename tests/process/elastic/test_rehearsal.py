"""Rehearsal: a function is called in a fake world, and left where its first step would begin."""

from __future__ import annotations

import gc
import sys
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import record_of
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from holdfast.ckpt.transport import RunKey
from holdfast.elastic.config import Batch, Settings
from holdfast.elastic.events import Event
from holdfast.elastic.groups.waits import WaitGuard
from holdfast.elastic.loop import rehearsal
from holdfast.elastic.loop.rehearsal import stage
from holdfast.elastic.membership.records import MeshSize


def _guard() -> WaitGuard:
    return WaitGuard(1, lambda: False)


def test_a_model_is_sharded_as_it_will_be_and_collectives_wait_for_nobody() -> None:
    with stage(record_of(["x:1"] * 4), rank=2, guard=_guard()) as world:
        assert (dist.get_rank(), dist.get_world_size()) == (2, 4)
        assert (world.rank, world.size, world.mesh.size()) == (2, 4, 4)
        model = nn.Linear(6, 8)
        fully_shard(model, mesh=world.mesh)
        weight = model.weight
        assert isinstance(weight, DTensor)
        assert tuple(weight.to_local().shape) == (2, 6)
        model(torch.ones(1, 6)).sum().backward()
        dist.barrier()
        ones = torch.ones(3)
        world.sum_(ones)
        assert world.gather("me") == ["me"] * 4
    assert not dist.is_initialized()


def test_nothing_of_the_stage_is_left_for_the_generation() -> None:
    with stage(record_of(["x:1"] * 4), rank=0, guard=_guard()) as world:
        model = nn.Linear(6, 8)
        fully_shard(model, mesh=world.mesh)
        model(torch.ones(1, 6)).sum().backward()
        gone = weakref.ref(model)
        del model, world
    gc.collect()
    assert gone() is None
    with stage(record_of(["x:1"] * 2), rank=1, guard=_guard()) as world:
        assert world.mesh.size() == 2


def test_a_mesh_of_two_axes_is_staged_as_it_will_be() -> None:
    record = record_of(["x:1"] * 4, mesh=MeshSize(dp=2, tp=2))
    with stage(record, rank=3, guard=_guard(), axes=("dp", "tp")) as world:
        assert world.mesh.mesh_dim_names == ("dp", "tp")
        assert tuple(world.mesh.get_coordinate() or ()) == (1, 1)
        assert (world.dp.index, world.dp.size) == (1, 2)
        layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        model = parallelize_module(layers, world.mesh["tp"], plan)
        fully_shard(model, mesh=world.mesh["dp"])
        found = model(torch.ones(1, 8))
        assert found.shape == (1, 8)
        found.sum().item()  # waits


def test_a_function_that_does_not_come_to_its_first_step_is_interrupted() -> None:
    with (
        pytest.raises(rehearsal._TooLongError, match="not reached within"),
        rehearsal._limited(0.05),
    ):
        while True:
            time.sleep(0.001)


def test_it_is_interrupted_again_where_the_first_time_was_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Deaf:
        def __del__(self) -> None:
            while not lost:
                time.sleep(0.001)

    lost: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lost.append)
    monkeypatch.setattr(rehearsal, "_AGAIN_S", 0.05)
    with pytest.raises(rehearsal._TooLongError), rehearsal._limited(0.05):
        Deaf()
        while True:
            time.sleep(0.001)
    assert len(lost) == 1


def test_one_that_comes_there_is_not_interrupted_later() -> None:
    with rehearsal._limited(0.05):
        pass
    with rehearsal._limited(60.0):
        pass


def test_the_state_is_told_and_the_first_step_ends_it(tmp_path: Path) -> None:
    states: list[Mapping[str, Any]] = []
    channel: Any = _Channel()
    settings = Settings(batch=Batch(microbatches=2))
    with stage(record_of(["x:1"] * 2), rank=1, guard=_guard()) as world:
        pulse = rehearsal.Pulse(channel)
        keeper = rehearsal.StageKeeper(
            channel, settings, world, pulse=pulse, maps=rehearsal.SlotMaps()
        )
        keeper.tracked = states.append
        run = rehearsal.Run(channel, settings, world, pulse=pulse, keeper=keeper)
        model = nn.Linear(2, 2)
        run.track(model=model)
        with pytest.raises(rehearsal._FirstStepError):
            next(run.steps(3))
        assert not run.is_leader
        run._close()
    assert states[0].keys() == {"model", "holdfast", "holdfast-ranks"}


class _Channel:
    """The part of a channel that a keeper uses before anything is restored."""

    sidecar, key, run, node, memory_of = "tcp://127.0.0.1:1", RunKey.new(), "r", "n", ""

    def beat(self, **_: Any) -> None: ...

    def emit(self, event: Event) -> None: ...
