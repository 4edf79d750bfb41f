"""Snapshots of state on a CUDA device: side stream, pinned slots, no waiting on the host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles.slots import FakeSidecar
from torch import nn

from holdfast.ckpt.memory.block import block_bytes, verify_block
from holdfast.ckpt.snapshot.lanes import CudaLanes
from holdfast.ckpt.snapshot.snapshotter import Snapshotter
from holdfast.ckpt.state.capture import gather_alone

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[FakeSidecar]:
    fake = FakeSidecar(directory=tmp_path)
    yield fake
    fake.close()


@pytest.fixture
def snapshotter(sidecar: FakeSidecar) -> Iterator[Snapshotter]:
    made = sidecar.snapshotter()
    yield made
    made.close()


def make_state() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(512, 512), nn.BatchNorm1d(512), nn.Linear(512, 8)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    turned = nn.ParameterList([nn.Parameter(torch.rand(64, 32, device="cuda").T)])
    return {"model": model, "optimizer": optimizer, "turned": turned}


def train(state: dict[str, Any]) -> None:
    state["optimizer"].zero_grad()
    state["model"](torch.randn(32, 512, device="cuda")).square().sum().backward()
    state["optimizer"].step()


def tensors_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    found = {f"model.{k}": v for k, v in state["model"].state_dict().items()}
    found["turned.0"] = state["turned"][0].detach()
    return {name: tensor.cpu() for name, tensor in found.items()}


def test_every_snapshot_holds_the_state_of_its_step(
    sidecar: FakeSidecar, snapshotter: Snapshotter
) -> None:
    state, expected = make_state(), []
    for step in range(6):
        snapshotter.snapshot(state, step)
        expected.append(tensors_of(state))
        train(state)
    snapshotter.fence()
    assert (snapshotter.stats.taken, snapshotter.stats.discarded) == (6, 0)
    for step, tensors in enumerate(expected):
        entry = sidecar.sealed[step, 0]
        block = sidecar.slot(step).block(block_bytes(entry))
        index = verify_block(block, entry, origin="test")
        for name, tensor in tensors.items():
            (chunk,) = index.tensors[name].chunks
            data = bytearray(block[chunk.at : chunk.at + chunk.nbytes])
            assert torch.equal(
                torch.frombuffer(data, dtype=tensor.dtype).view(tensor.shape), tensor
            )


def test_the_optimizer_is_held_back_by_an_event_not_by_the_host(
    sidecar: FakeSidecar, snapshotter: Snapshotter
) -> None:
    state = make_state()
    snapshotter.snapshot(state, 0)
    snapshotter.fence()
    torch.cuda._sleep(2_000_000_000)  # the training stream is busy for about a second
    event = torch.cuda.Event()
    event.record()
    snapshotter.snapshot(state, 1)
    snapshotter.copied()
    assert not event.query()
    snapshotter.fence()
    assert snapshotter.stats.taken == 2


def test_slots_are_registered_with_cuda(sidecar: FakeSidecar) -> None:
    lanes = CudaLanes()
    snapshotter = Snapshotter(
        sidecar, run="test", generation=1, rank=0, world_size=1, gather=gather_alone, lanes=lanes
    )
    for step in range(3):
        snapshotter.snapshot(make_state(), step)
    snapshotter.fence()
    assert len(lanes._pins) == 3
    snapshotter.close()
    assert len(lanes._pins) == 0
