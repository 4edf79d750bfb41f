"""Training goes on through DCP and our format, in every wrapping that PyTorch's own tests use."""

from __future__ import annotations

import io
import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from holdfast.adapters.dcp import HoldfastReader, HoldfastWriter

WORLD_SIZE = 4
WRAPPINGS = ("ddp", "fsdp", "hsdp", "fsdp2", "hsdp2", "compiled ddp", "compiled fsdp2")
WAYS = ("save", *(kind.value for kind in AsyncCheckpointerType), "cached")
QUICK = {("fsdp2", "cached"), ("hsdp", "save")}


def wrapped(how: str) -> nn.Module:
    model: nn.Module = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 8), nn.BatchNorm1d(8))
    flat = init_device_mesh("cpu", (WORLD_SIZE,))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    kind = how.rsplit(maxsplit=1)[-1]
    cpu: Any = {"device_id": torch.device("cpu"), "use_orig_params": True}
    if kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind == "fsdp":
        model = FullyShardedDataParallel(model, device_mesh=flat, **cpu)
    elif kind == "hsdp":
        hybrid = ShardingStrategy.HYBRID_SHARD
        model = FullyShardedDataParallel(model, device_mesh=grid, sharding_strategy=hybrid, **cpu)
    else:
        fully_shard(model, mesh=grid if kind == "hsdp2" else flat)
    return torch.compile(model, backend="eager") if how.startswith("compiled") else model  # type: ignore[return-value]


class Training:
    """The model and its optimizer, as DCP's guide has them: an object with state_dict."""

    def __init__(self, how: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = wrapped(how)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)

    def train(self, steps: range) -> list[float]:
        return [self._step(step) for step in steps]

    def _step(self, step: int) -> float:
        torch.manual_seed(100 * step + dist.get_rank())
        loss = self.model(torch.rand(4, 8)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        found = loss.detach()
        dist.all_reduce(found)
        return float(found)

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )


class Progress:
    """Losses as torchtitan keeps them: pickled, in a stream of bytes."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        stream = io.BytesIO()
        torch.save(self.losses, stream)
        return {"step": torch.tensor(len(self.losses)), "losses": stream}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state_dict["losses"].seek(0)
        self.losses = torch.load(state_dict["losses"])


def saved(state: dict[str, Any], root: Path, way: str, *, step: int) -> None:
    writer = HoldfastWriter(root, step=step)
    if way == "save":
        dcp.save(state, storage_writer=writer)
        return
    cached = way == "cached"
    kind = AsyncCheckpointerType.THREAD if cached else AsyncCheckpointerType(way)
    future: Any = dcp.async_save(state, storage_writer=writer, async_checkpointer_type=kind)
    future.result(120)


def go_on(rank: int, root: Path, how: str, way: str) -> None:
    """Train four steps, two of them twice: the second time from the checkpoint of step 2."""
    state: dict[str, Any] = {"training": Training(how, seed=1), "progress": Progress()}
    for step in (1, 2):
        state["progress"].losses += state["training"].train(range(step - 1, step))
        saved(state, root / how / way, way, step=step)
    wanted = state["training"].train(range(2, 4))
    other: dict[str, Any] = {"training": Training(how, seed=2), "progress": Progress()}
    dcp.load(other, storage_reader=HoldfastReader(root / how / way))
    assert other["progress"].losses == state["progress"].losses
    assert other["training"].train(range(2, 4)) == wanted, (how, way, rank)


def main(rank: int, root: Path, cases: list[tuple[str, str]]) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1"}
    store = dist.FileStore(str(root / "rendezvous"), WORLD_SIZE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE)
    for how, way in cases:
        go_on(rank, root, how, way)
        dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(autouse=True, scope="module")
def loaded() -> Iterator[None]:
    """Have one process import everything, for the ranks to be forked from."""
    multiprocessing.set_forkserver_preload(["holdfast.adapters.dcp"])
    yield
    forkserver._forkserver._stop()


def run(root: Path, cases: list[tuple[str, str]]) -> None:
    mp.start_processes(main, (root, cases), nprocs=WORLD_SIZE, start_method="forkserver")


def test_training_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    run(tmp_path, sorted(QUICK))


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", WAYS)
def test_training_goes_on_in_every_wrapping(way: str, tmp_path: Path) -> None:
    run(tmp_path, [(how, way) for how in WRAPPINGS])
