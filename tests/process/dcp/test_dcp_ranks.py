"""Ranks save and load through torch.distributed.checkpoint: any layout becomes any other."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
import uneven_net
from torch import distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from uneven_net import WORLD_SIZE, State, Wrap, data_parallel, grid, tensor_parallel, train

from holdfast import ckpt
from holdfast.adapters.dcp import DcpSource, HoldfastReader, HoldfastWriter
from holdfast.ckpt.checkpoints.catalog import committed_steps
from holdfast.ckpt.checkpoints.verify import faults
from holdfast.ckpt.geometry.grid import whole
from holdfast.ckpt.state.hashing import state_hash
from holdfast.ckpt.store.places import open_store


def build(wrap: Wrap | None, seed: int) -> State:
    state = uneven_net.build(wrap, seed, tied=False)
    state["seen"]["order"] = (seed, "x")
    return state


def taken_apart(state: State) -> State:
    weights, moments = get_state_dict(state["model"], state["optimizer"])
    return {"model": weights, "optimizer": moments, "seen": dict(state["seen"])}


def save(state: State, writer: dcp.StorageWriter, **how: Any) -> None:
    dcp.save(taken_apart(state), storage_writer=writer, **how)


def load(state: State, reader: dcp.StorageReader, **how: Any) -> None:
    parts = taken_apart(state)
    dcp.load(parts, storage_reader=reader, **how)
    set_state_dict(
        state["model"],
        state["optimizer"],
        model_state_dict=parts["model"],
        optim_state_dict=parts["optimizer"],
    )
    state["seen"] = parts["seen"]


def layouts_body(rank: int, folder: Path, found: dict[str, Any]) -> None:
    """FSDP2 over 4, 2 and 3 ranks, TP, both, one process; each loads what the one before saved."""
    root = folder / "ours"
    chain: list[tuple[str, Wrap, int]] = [
        ("four", data_parallel([0, 1, 2, 3]), 4),
        ("two", data_parallel([0, 1]), 2),
        ("three", data_parallel([0, 1, 2]), 3),
        ("parallel", tensor_parallel(), 4),
        ("both", grid(), 4),
        ("again", data_parallel([0, 1, 2, 3]), 4),
    ]
    groups = {size: dist.new_group(list(range(size))) for size in (2, 3, 4)}
    for step, (name, wrap, size) in enumerate(chain):
        if rank < size:
            state = build(wrap, seed=step + 1)
            if step == 0:
                train(state, 3, seed=1)
            else:
                load(state, HoldfastReader(root, step=step - 1), process_group=groups[size])
            found[name] = state_hash(state, group=groups[size])
            writer = HoldfastWriter(root, step=step, run="chain")
            save(state, writer, process_group=groups[size])
            if step == 0:
                save(state, dcp.FileSystemWriter(folder / "theirs"), process_group=groups[size])
            train(state, 1, seed=1)  # what was restored can go on
        dist.barrier()
    if rank == 0:
        alone = build(None, seed=9)
        load(alone, HoldfastReader(root, step=5), no_dist=True)
        found["alone"] = state_hash(alone)


def failures_body(rank: int, folder: Path, found: dict[str, Any]) -> None:
    """Check that a failure on one rank is reported on all ranks, and leaves nothing visible."""
    root = folder / "ours"
    state = {"w": torch.arange(8.0), f"only {rank}": rank}
    dcp.save(state, storage_writer=HoldfastWriter(root, step=1))
    bad = state | ({"bad": object()} if rank == 1 else {})
    with pytest.raises(CheckpointException) as failed:
        dcp.save(bad, storage_writer=HoldfastWriter(root, step=2))
    errors = {at: (type(error), str(error)) for at, (error, _) in failed.value.failures.items()}
    assert errors.keys() == {1}
    assert errors[1][0] is ckpt.StateError
    assert errors[1][1].startswith("bad: cannot capture")
    dist.barrier()
    assert committed_steps(root) == [1]
    target: State = {"w": torch.zeros(8), f"only {(rank + 1) % WORLD_SIZE}": None}
    dcp.load(target, storage_reader=HoldfastReader(root))
    assert target[f"only {(rank + 1) % WORLD_SIZE}"] == (rank + 1) % WORLD_SIZE
    assert torch.equal(target["w"], state["w"])
    dist.barrier()
    if rank == 0:
        packs = sorted((root / "step-000000000001/data").iterdir(), key=lambda p: -p.stat().st_size)
        data = bytearray(packs[0].read_bytes())
        data[5] ^= 1
        packs[0].write_bytes(data)
    dist.barrier()
    with pytest.raises(CheckpointException) as failed:
        dcp.load(target, storage_reader=HoldfastReader(root))
    for error, _ in failed.value.failures.values():
        assert isinstance(error, ckpt.CorruptError)
        assert "tensor w" in str(error)
    found["failures"] = "told"


def asynchronous_body(rank: int, folder: Path, found: dict[str, Any]) -> None:
    """Background saves, by thread and by process, are complete when they are there."""
    wrap = data_parallel(list(range(dist.get_world_size())))
    state = build(wrap, seed=1)
    for step, kind in enumerate(AsyncCheckpointerType, start=1):
        train(state, 1, seed=1)
        expected = state_hash(state)
        root = folder / "ours"
        future: Any = dcp.async_save(
            taken_apart(state),
            storage_writer=HoldfastWriter(root, step=step),
            async_checkpointer_type=kind,
        )
        future.result(60)
        dist.barrier()
        other = build(wrap, seed=2)
        load(other, HoldfastReader(root, step=step))
        assert state_hash(other) == expected
    found["asynchronous"] = "done"


def main(rank: int, body: Any, folder: Path, world_size: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1"}  # where DCP's own processes meet
    store = dist.FileStore(str(folder / "rendezvous"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    found: dict[str, Any] = {}
    body(rank, folder, found)
    (folder / f"found-{rank}.json").write_bytes(msgspec.json.encode(found))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(autouse=True, scope="module")
def loaded() -> Iterator[None]:
    """Have one process import everything, for the ranks to be forked from."""
    multiprocessing.set_forkserver_preload(
        ["torch.distributed.tensor.parallel", "holdfast.adapters.dcp"]
    )
    yield
    forkserver._forkserver._stop()


def run(body: Any, folder: Path, *, world_size: int = WORLD_SIZE) -> list[dict[str, Any]]:
    arguments = (body, folder, world_size)
    mp.start_processes(main, arguments, nprocs=world_size, start_method="forkserver")
    names = [folder / f"found-{rank}.json" for rank in range(world_size)]
    return [msgspec.json.decode(name.read_bytes()) for name in names]


def test_a_state_is_the_same_in_every_layout(tmp_path: Path) -> None:
    found = run(layouts_body, tmp_path)
    hashes = {(name, value) for each in found for name, value in each.items()}
    assert len({value for _, value in hashes}) == 1, sorted(hashes)
    assert {name for name, _ in hashes} == {
        *("four", "two", "three", "parallel", "both", "again", "alone")
    }
    for step in committed_steps(tmp_path / "ours"):
        assert list(faults(open_store(tmp_path / "ours"), step, deep=True)) == []
    with ckpt.open(tmp_path / "ours", step=0) as ours, DcpSource(tmp_path / "theirs") as theirs:
        assert (ours.manifest.run, ours.manifest.world_size) == ("chain", WORLD_SIZE)
        assert set(ours.keys()) == theirs.specs.keys()
        for fqn, spec in theirs.specs.items():
            data = bytes(theirs.read(fqn, whole(spec.shape)))
            assert data == ours[fqn][...].numpy().tobytes(), fqn


def test_ranks_share_one_fate(tmp_path: Path) -> None:
    assert run(failures_body, tmp_path) == [{"failures": "told"}] * WORLD_SIZE


def test_background_saves_are_complete(tmp_path: Path) -> None:
    assert run(asynchronous_body, tmp_path, world_size=2) == [{"asynchronous": "done"}] * 2


SAVER = """
import os, signal, sys, warnings
from pathlib import Path
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from holdfast.adapters.dcp import HoldfastWriter
from holdfast.ckpt.checkpoints.catalog import committed_steps

warnings.simplefilter("ignore")

def die():
    os.kill(os.getpid(), signal.SIGKILL)

class DyingBetweenTensors(DefaultSavePlanner):
    def resolve_data(self, item):
        if item.index.fqn == "b":
            die()
        return super().resolve_data(item)

class DyingBeforeCommit(HoldfastWriter):
    def finish(self, metadata, results):
        die()

def save(value, kind, planner):
    state = {name: torch.full((1000,), value) for name in "abc"}
    child = os.fork()
    if child == 0:
        dcp.save(state, storage_writer=kind(root, step=1), planner=planner, no_dist=True)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

for name, kind, planner in (
    ("tensors", HoldfastWriter, DyingBetweenTensors),
    ("commit", DyingBeforeCommit, DefaultSavePlanner),
):
    root = Path(sys.argv[1], name)
    assert save(1.0, kind, planner()) == -signal.SIGKILL
    assert committed_steps(root) == []
    assert save(0.0, HoldfastWriter, DefaultSavePlanner()) == 0
    assert save(1.0, kind, planner()) == -signal.SIGKILL
"""


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_killed_save_shows_nothing_and_harms_nothing(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", SAVER, str(tmp_path)], check=True, timeout=250)
    for name in ("tensors", "commit"):
        found = {name: torch.full((1000,), 2.0) for name in "abc"}
        dcp.load(found, storage_reader=HoldfastReader(tmp_path / name), no_dist=True)
        assert all(not tensor.any() for tensor in found.values()), name
