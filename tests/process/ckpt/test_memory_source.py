"""Snapshots through real sidecars are restored: mapped, over the wire, and after a node's death."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch
from thread_gather import ThreadGather
from torch import nn

from holdfast.ckpt.memory.maps import SlotMaps
from holdfast.ckpt.memory.records import SidecarPeer, SnapshotWorld
from holdfast.ckpt.parity.stripes import restore_points
from holdfast.ckpt.recovery.memory_source import MemorySource
from holdfast.ckpt.sidecar.client import SidecarClient
from holdfast.ckpt.sidecar.launch import SidecarProcess, start_sidecar
from holdfast.ckpt.snapshot.snapshotter import Snapshotter
from holdfast.ckpt.state.hashing import state_hash
from holdfast.ckpt.state.restore import restore
from holdfast.ckpt.state.saved import read_tensors
from holdfast.ckpt.transport import RunKey

NODES = ("a", "b", "c")
RANK_NODES = ("a", "b")


class Cluster:
    """Three nodes on this machine, two ranks (as threads' worth of work) on two of them."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.run = f"test-{uuid.uuid4().hex[:8]}"
        self.key = RunKey.new()
        key_file = folder / "key.json"
        self.key.save(key_file)
        self.sidecars: dict[str, SidecarProcess] = {}
        for node in NODES:
            sidecar = start_sidecar(run=self.run, node=node, key_file=key_file, run_dir=folder)
            stack.callback(sidecar.stop)
            self.sidecars[node] = sidecar
        self.clients = {n: SidecarClient(s.address, self.key) for n, s in self.sidecars.items()}
        for client in self.clients.values():
            stack.callback(client.close)
        self.addresses = {n: s.address for n, s in self.sidecars.items()}
        self.world = SnapshotWorld(
            run=self.run,
            generation=1,
            peers=tuple(SidecarPeer(node=n, address=self.addresses[n]) for n in NODES),
            rank_nodes=RANK_NODES,
            parity=1,
            keep=2,
        )
        for client in self.clients.values():
            client.adopt(self.world, restore=None)

    def source(self, point: Any, node: str, **options: Any) -> MemorySource:
        return MemorySource(
            point,
            local=self.clients[node],
            local_node=node,
            addresses=self.addresses,
            key=self.key,
            **options,
        )


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(tmp_path, stack)


def build(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 5))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "n": 0}


def train(state: dict[str, Any], step: int) -> None:
    state["optimizer"].zero_grad()
    inputs = torch.randn(4, 64, generator=torch.Generator().manual_seed(step))
    state["model"](inputs).square().sum().backward()
    state["optimizer"].step()
    state["n"] = step


def run_ranks(cluster: Cluster, steps: int) -> list[str]:
    """Train two replicas that snapshot every step; return the state's hash at each."""
    gather, hashes, errors = ThreadGather(len(RANK_NODES)).of, [], []

    def rank_body(rank: int, state: dict[str, Any]) -> None:
        snapshotter = Snapshotter(
            cluster.clients[RANK_NODES[rank]],
            run=cluster.run,
            generation=1,
            rank=rank,
            world_size=len(RANK_NODES),
            gather=gather(rank),
        )
        try:
            for step in range(steps):
                if step:
                    train(state, step)
                snapshotter.snapshot(state, step)
                if rank == 0:
                    hashes.append(state_hash(state))
            snapshotter.fence()
            assert snapshotter.stats.taken == steps
        except Exception as error:  # noqa: BLE001 - told to the test
            errors.append(error)
        finally:
            snapshotter.close()

    threads = [
        threading.Thread(target=rank_body, args=(r, build(0))) for r in range(len(RANK_NODES))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    return hashes


def test_a_snapshot_comes_back_mapped_sent_and_rebuilt(cluster: Cluster) -> None:
    torch.set_num_threads(1)
    hashes = run_ranks(cluster, 5)
    observer = cluster.clients["c"]
    assert observer.protected_step(generation=1, at_least=4, timeout_s=200) == 4
    point = observer.locate(generation=1, step=4)
    ways = ((True, 3, "rank 0 mapped from a"), (True, 1, "mapped"), (False, 1, "rank 1 sent by b"))
    for mapped, cores, words in ways:
        state = build(7)
        maps = SlotMaps(host="" if mapped else "elsewhere")
        with closing(maps), cluster.source(point, "c", maps=maps, cores=cores) as source:
            assert words in source.how
            report = restore(state, source, rank=0)
            some = read_tensors(source, ["model.0.weight"])
        assert (report.step, state["n"], state_hash(state)) == (4, 4, hashes[4])
        assert torch.equal(some["model.0.weight"], state["model"][0].weight)

    cluster.sidecars["b"].process.kill()
    cluster.sidecars["b"].process.wait()
    living = [cluster.clients[n].inventory() for n in ("a", "c")]
    points, reason = restore_points(living)
    assert points[0].step == 4, reason
    state = build(8)
    with cluster.source(points[0], "a", maps=SlotMaps(host="elsewhere")) as source:
        assert "rebuilt from parity" in source.how
        restore(state, source, rank=0)
    assert state_hash(state) == hashes[4]
