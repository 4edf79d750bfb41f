"""Real FSDP2 and tensor-parallel ranks: a state saved in one layout is the same in any other."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.multiprocessing as mp
from doubles.shards import MemoryShards
from doubles.slots import FakeSidecar
from ports import free_ports
from torch import distributed as dist
from uneven_net import WORLD_SIZE, State, build, data_parallel, grid, train

from holdfast.ckpt.geometry.shard_index import decode_index, encode_index
from holdfast.ckpt.snapshot.snapshotter import Snapshotter
from holdfast.ckpt.state.hashing import state_hash
from holdfast.ckpt.state.restore import restore
from holdfast.ckpt.state.saved import read_tensors
from holdfast.ckpt.testing.shards import capture


def gather_over(group: Any) -> Callable[[Any], list[Any]]:
    def gather(value: Any) -> list[Any]:
        everyone: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, value, group=group)
        return everyone

    return gather


def save(folder: Path, state: State, *, group: Any, step: int) -> None:
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    gather = gather_over(group)
    index, payload = capture(state, step=step, rank=rank, world_size=world, gather=gather)
    (folder / f"{rank}.json").write_bytes(encode_index(index))
    (folder / f"{rank}.bin").write_bytes(payload)


def load(folder: Path) -> MemoryShards:
    shards = []
    for path in sorted(folder.glob("*.json")):
        index = decode_index(path.read_bytes(), origin=str(path))
        shards.append((index, bytearray(path.with_suffix(".bin").read_bytes())))
    return MemoryShards(shards)


def body(rank: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD_SIZE
    )
    first_two = dist.new_group([0, 1])
    two, three, four = data_parallel([0, 1]), data_parallel([0, 1, 2]), grid()
    saved: dict[str, Any] = {}
    (folder / "two").mkdir(exist_ok=True)
    (folder / "grid").mkdir(exist_ok=True)
    if rank < 2:
        state = build(two, seed=1, tied=True)
        train(state, 3, seed=rank)
        saved["two"] = state_hash(state, group=first_two)
        save(folder / "two", state, group=first_two, step=3)
        snapshot_through_slots(folder, state, group=first_two, expected=saved["two"])
    dist.barrier()
    if rank < 3:
        state = build(three, seed=2, tied=True)
        report = restore(state, load(folder / "two"), rank=rank)
        assert report.step == 3
        saved["three"] = state_hash(state)
        train(state, 1, seed=0)  # the restored optimizer works
    state = build(four, seed=3, tied=True)
    train(state, 1, seed=0)
    restore(state, load(folder / "two"), rank=rank)
    saved["grid"] = state_hash(state)
    save(folder / "grid", state, group=dist.group.WORLD, step=4)
    dist.barrier()
    if rank == 0:
        for name in ("two", "grid"):
            alone = build(None, seed=4, tied=True)
            restore(alone, load(folder / name), rank=0)
            assert alone["seen"] == {"samples": 16}
            assert alone["optimizer"].param_groups[0]["lr"] == 0.02
            saved[f"alone from {name}"] = state_hash(alone)
            (tied,) = read_tensors(load(folder / name), ["model.head.weight"]).values()
            assert torch.equal(tied, alone["model"].embed.weight)
    (folder / f"hashes-{rank}.json").write_bytes(msgspec.json.encode(saved))
    dist.barrier()
    dist.destroy_process_group()


def snapshot_through_slots(folder: Path, state: State, *, group: Any, expected: str) -> None:
    """Snapshot while the next forward and backward run, and look at what the slot holds."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    slots = folder / f"slots-{rank}"
    slots.mkdir()
    sidecar = FakeSidecar(directory=slots)
    snapshotter = Snapshotter(
        sidecar,
        run="test",
        generation=1,
        rank=rank,
        world_size=world,
        gather=gather_over(group),
    )
    for step in range(3, 6):
        before = state_hash(state)
        assert step != 3 or before == expected
        snapshotter.snapshot(state, step)
        train(state, 1, seed=rank)
        snapshotter.fence()
        mine = sidecar.slot(step, rank)
        entry = sidecar.sealed[step, rank]
        index = decode_index(bytes(mine.index_view(entry)), origin="slot")
        block = bytearray(mine.block(entry.payload_bytes))
        everyone = gather_over(group)((encode_index(index), block))
        shards = MemoryShards([(decode_index(i, origin="peer"), b) for i, b in everyone])
        if rank == 0:
            alone = build(None, seed=9, tied=True)
            restore(alone, shards, rank=0)
            assert state_hash(alone) == before
    assert snapshotter.stats.taken == 3
    assert snapshotter.stats.discarded == 0
    snapshotter.close()
    sidecar.close()


def test_a_state_is_the_same_in_every_layout(tmp_path: Path) -> None:
    multiprocessing.set_forkserver_preload(
        ["torch.distributed.tensor.parallel", "holdfast.ckpt.state.restore"]
    )
    mp.start_processes(
        body, (free_ports(1)[0], tmp_path), nprocs=WORLD_SIZE, start_method="forkserver"
    )
    forkserver._forkserver._stop()
    hashes = [
        msgspec.json.decode((tmp_path / f"hashes-{rank}.json").read_bytes())
        for rank in range(WORLD_SIZE)
    ]
    found = {(name, value) for each in hashes for name, value in each.items()}
    assert len({value for _, value in found}) == 1, sorted(found)
    assert {name for name, _ in found} == {
        "two",
        "three",
        "grid",
        "alone from two",
        "alone from grid",
    }
