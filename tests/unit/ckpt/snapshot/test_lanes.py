"""State on a device is copied to the slot in stream order, and only events hold training back."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles.lanes import FakeLane, FakeLanes
from doubles.slots import FakeSidecar
from torch import nn

from holdfast.ckpt.errors import StateError
from holdfast.ckpt.memory.arena import SlotFile
from holdfast.ckpt.memory.block import block_bytes, verify_block
from holdfast.ckpt.snapshot import lanes as lanes_module
from holdfast.ckpt.snapshot.lanes import Mark, PinnedSlots, refuse_devices
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


def test_a_write_that_no_version_tells_of_discards_the_snapshot(
    sidecar: FakeSidecar, lanes: FakeLanes, snapshotter: Snapshotter
) -> None:
    state = make_state()
    weight = state["model"].weight
    sidecar.gate.clear()
    snapshotter.snapshot(state, 1)
    before = weight._version
    lanes.lane.training.ask(lambda: weight.data.add_(1))  # as a replayed CUDA graph does
    lanes.lane.training.drain()
    sidecar.gate.set()
    snapshotter.fence()
    assert weight._version == before
    assert snapshotter.stats.torn == "model.weight"
    assert sidecar.abandoned == [1]
    lanes.lane.training.ask(lambda: weight.data.add_(1))
    snapshotter.snapshot(state, 2)
    snapshotter.fence()
    assert list(sidecar.sealed) == [(2, 0)], "it was written before the moment of the snapshot"


@pytest.mark.parametrize("on_device", [False, True])
def test_a_part_that_is_written_as_a_whole_is_not_said_to_be_the_same(
    sidecar: FakeSidecar, on_device: bool
) -> None:
    made = Snapshotter(
        sidecar,
        run="test",
        generation=1,
        rank=0,
        world_size=1,
        gather=gather_alone,
        lanes=FakeLanes(lambda tensor: on_device),
    )
    turned = nn.Parameter(torch.rand(300, 400).T)
    for step in range(3):
        made.snapshot({"turned": nn.ParameterList([turned])}, step)
        made.fence()
        with torch.no_grad():
            turned.add_(1)
    made.close()
    for step in range(3):
        assert set(sidecar.since[step].tolist()) == {step}


class FullLane(FakeLane):
    """A lane of a device without free memory."""

    def copy(self, source: torch.Tensor, into: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def look(self, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_full_device_costs_the_snapshot_and_not_the_run(sidecar: FakeSidecar) -> None:
    made = Snapshotter(
        sidecar,
        run="test",
        generation=1,
        rank=0,
        world_size=1,
        gather=gather_alone,
        lanes=FakeLanes(lambda tensor: tensor.ndim == 2, FullLane()),
    )
    made.snapshot(make_state(), 1)
    made.fence()
    assert made.stats.discarded == 1
    assert made.stats.reason.startswith("a device has no memory left")
    assert sidecar.abandoned == [1]
    made.close()


class CountingLane(FakeLane):
    """Counts how often the training stream was held back."""

    holds = 0

    def hold(self, mark: Mark) -> None:
        self.holds += 1
        super().hold(mark)


def test_every_optimizer_is_held_back_as_each_may_have_a_stream_of_its_own(
    sidecar: FakeSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane, may_seal, seal = CountingLane(), threading.Event(), FakeSidecar.seal

    def seal_late(*args: Any, **kwargs: Any) -> None:
        assert may_seal.wait(60)
        seal(*args, **kwargs)

    monkeypatch.setattr(FakeSidecar, "seal", seal_late)
    made = Snapshotter(
        sidecar,
        run="test",
        generation=1,
        rank=0,
        world_size=1,
        gather=gather_alone,
        lanes=FakeLanes(lambda tensor: tensor.ndim == 2, lane),
    )
    model = nn.Linear(5, 6)
    optimizers = [torch.optim.SGD([each], lr=0.1) for each in model.parameters()]
    made.snapshot({"model": model, "first": optimizers[0], "second": optimizers[1]}, 1)
    for optimizer in optimizers:
        optimizer.step()
    assert lane.holds == 2
    may_seal.set()
    made.fence()
    made.copied()
    assert lane.holds == 2, "nothing is copied any more"
    made.close()


def test_a_snapshot_and_a_step_within_the_capture_of_a_graph_are_refused(
    snapshotter: Snapshotter, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(5, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    snapshotter.snapshot(state, 1)
    snapshotter.fence()
    monkeypatch.setattr(lanes_module, "is_captured", lambda: True)
    with pytest.raises(StateError, match="step 2 was asked for while a CUDA graph is captured"):
        snapshotter.snapshot(state, 2)
    with pytest.raises(StateError, match=r"SGD is stepped.*step after the replay"):
        optimizer.step()
    monkeypatch.undo()
    optimizer.step()


def test_a_tensor_on_a_device_from_which_no_lane_copies_is_refused_by_name() -> None:
    tensors = {"near": torch.zeros(1), "far": torch.empty(1, device="meta")}
    with pytest.raises(StateError, match=r"far is on meta: .* or save by holdfast\.save"):
        refuse_devices(tensors)


class Runtime:
    """A fake of CUDA's runtime that records its calls."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.code = 0
        self.threads: set[int] = set()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert address not in self.registered
        self.threads.add(threading.get_ident())
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
    assert threading.get_ident() not in runtime.threads, "where a failed call leaves its error"
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
