"""State on a device is copied to the slot in stream order, and only events hold training back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles.lanes import FakeLanes
from doubles.slots import FakeSidecar
from torch import nn

from holdfast.ckpt.memory.arena import SlotFile
from holdfast.ckpt.memory.block import block_bytes, verify_block
from holdfast.ckpt.snapshot.lanes import PinnedSlots
from holdfast.ckpt.snapshot.snapshotter import Snapshotter
from holdfast.ckpt.state.capture import gather_alone

SHAPE = (6, 5)


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[FakeSidecar]:
    fake = FakeSidecar(directory=tmp_path)
    yield fake
    fake.close()


@pytest.fixture
def lanes() -> FakeLanes:
    return FakeLanes(lambda tensor: tensor.ndim == 2)


@pytest.fixture
def snapshotter(sidecar: FakeSidecar, lanes: FakeLanes) -> Iterator[Snapshotter]:
    made = Snapshotter(
        sidecar, run="test", generation=1, rank=0, world_size=1, gather=gather_alone, lanes=lanes
    )
    yield made
    made.close()
    assert lanes.lane.is_closed


def make_state() -> dict[str, Any]:
    model = nn.Linear(5, 6)
    return {"model": model, "turned": nn.ParameterList([nn.Parameter(torch.rand(5, 6).T)])}


def stored(sidecar: FakeSidecar, step: int, fqn: str) -> torch.Tensor:
    """Return a tensor as it lies in a sealed slot, every checksum verified."""
    entry = sidecar.sealed[step, 0]
    block = sidecar.slot(step).block(block_bytes(entry))
    index = verify_block(block, entry, origin="test")
    (chunk,) = index.tensors[fqn].chunks
    data = bytearray(block[chunk.at : chunk.at + chunk.nbytes])
    return torch.frombuffer(data, dtype=torch.float32).view(index.tensors[fqn].shape)


def test_the_copy_comes_after_what_training_was_asked_for_before(
    sidecar: FakeSidecar, lanes: FakeLanes, snapshotter: Snapshotter
) -> None:
    state = make_state()
    weight = state["model"].weight
    lanes.lane.training.ask(lambda: weight.data.fill_(7))  # asked for, not done yet
    snapshotter.snapshot(state, 1)
    snapshotter.fence()
    assert torch.equal(stored(sidecar, 1, "model.weight"), torch.full(SHAPE, 7.0))
    assert torch.equal(stored(sidecar, 1, "turned.0"), state["turned"][0])
    assert len(lanes.lane.pinned) == 1


def test_training_goes_on_behind_the_copy_without_waiting_in_the_host(
    sidecar: FakeSidecar, lanes: FakeLanes, snapshotter: Snapshotter
) -> None:
    state = make_state()
    weight, before = state["model"].weight, state["model"].weight.detach().clone()
    snapshotter.snapshot(state, 1)
    snapshotter.copied()
    lanes.lane.training.ask(weight.data.zero_)  # the optimizer's step
    lanes.lane.training.drain()
    snapshotter.fence()
    assert torch.equal(stored(sidecar, 1, "model.weight"), before)
    assert snapshotter.stats.discarded == 0


def test_an_optimizer_step_between_two_fences_is_no_tear(
    sidecar: FakeSidecar, lanes: FakeLanes, snapshotter: Snapshotter
) -> None:
    state = make_state()
    for step in range(5):
        snapshotter.snapshot(state, step)
        snapshotter.copied()
        lanes.lane.training.drain()
        with torch.no_grad():
            state["model"].weight.add_(1)
    snapshotter.fence()
    assert (snapshotter.stats.taken, snapshotter.stats.discarded) == (5, 0)


def test_a_write_on_the_device_before_the_fence_discards_the_snapshot(
    sidecar: FakeSidecar, snapshotter: Snapshotter
) -> None:
    state = make_state()
    sidecar.gate.clear()
    snapshotter.snapshot(state, 1)
    with torch.no_grad():
        state["model"].weight.add_(1)
    sidecar.gate.set()
    snapshotter.fence()
    assert snapshotter.stats.torn == "model.weight"
    assert sidecar.abandoned == [1]
    snapshotter.snapshot(state, 2)
    snapshotter.fence()
    assert list(sidecar.sealed) == [(2, 0)]


class Runtime:
    """A fake of CUDA's runtime that records its calls."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.code = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert address not in self.registered
        if self.code == 0:
            self.registered[address] = nbytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


def test_slots_are_pinned_once_and_unpinned_when_their_files_are_gone(tmp_path: Path) -> None:
    runtime = Runtime()
    pins = PinnedSlots(lambda: runtime)
    first = SlotFile.create(tmp_path / "1.slot", 1000)
    second = SlotFile.create(tmp_path / "2.slot", 1000)
    for slot in (first, second, first):
        pins.pin(slot)
    assert len(runtime.registered) == len(pins) == 2
    first.path.unlink()
    first.close()
    pins.pin(second)
    assert len(runtime.registered) == 1
    pins.close()
    assert not runtime.registered
    second.close()


def test_a_slot_that_cannot_be_pinned_is_used_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = Runtime()
    runtime.code = 2
    pins, slot = PinnedSlots(lambda: runtime), SlotFile.create(tmp_path / "1.slot", 1000)
    pins.pin(slot)
    pins.pin(slot)
    assert len(pins) == 0
    assert caplog.text.count("ulimit -l") == 1
    slot.close()
