"""Snapshots of state on a CUDA device: side stream, pinned slots, no waiting on the host."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles.slots import FakeSidecar
from torch import nn

from holdfast.ckpt.errors import StateError
from holdfast.ckpt.memory.arena import SlotFile
from holdfast.ckpt.memory.block import block_bytes, verify_block
from holdfast.ckpt.snapshot.lanes import CudaLanes, PinnedSlots
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
        check_stored(sidecar, step, tensors)


def check_stored(sidecar: FakeSidecar, step: int, tensors: dict[str, torch.Tensor]) -> None:
    """Assert that the sealed block of a step has the bytes of host tensors."""
    entry = sidecar.sealed[step, 0]
    block = sidecar.slot(step).block(block_bytes(entry))
    index = verify_block(block, entry, origin="test")
    for name, tensor in tensors.items():
        (chunk,) = index.tensors[name].chunks
        data = bytearray(block[chunk.at : chunk.at + chunk.nbytes])
        assert torch.equal(torch.frombuffer(data, dtype=tensor.dtype).view(tensor.shape), tensor)


@pytest.mark.parametrize("kind", ["foreach", "fused", "capturable", "for loop", "tensor lr"])
def test_the_state_of_every_kind_of_optimizer_is_that_of_its_step(
    sidecar: FakeSidecar, snapshotter: Snapshotter, kind: str
) -> None:
    options: dict[str, Any] = {
        "foreach": {"foreach": True},
        "fused": {"fused": True},
        "capturable": {"capturable": True},
        "for loop": {"foreach": False},
        "tensor lr": {"capturable": True, "lr": torch.tensor(0.01, device="cuda")},
    }[kind]
    weight = nn.Parameter(torch.rand(1000, 300, device="cuda"))
    optimizer = torch.optim.AdamW([weight], **options)
    state = {"weight": nn.ParameterList([weight]), "optimizer": optimizer}
    expected = []
    for step in range(4):
        weight.grad = torch.randn_like(weight)
        optimizer.step()
        snapshotter.snapshot(state, step)
        kept = {"weight.0": weight}
        for key in ("exp_avg", "exp_avg_sq"):
            kept[f"optimizer.state.weight.0.{key}"] = optimizer.state[weight][key]
        expected.append({name: tensor.detach().cpu() for name, tensor in kept.items()})
    snapshotter.fence()
    assert snapshotter.stats.discarded == 0
    for step, tensors in enumerate(expected):
        check_stored(sidecar, step, tensors)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.rand(7, 5, 3, device="cuda").permute(2, 0, 1),
        lambda: torch.rand(64, device="cuda")[::2],
        lambda: torch.rand(5, 5, device="cuda", dtype=torch.complex64).conj(),
        lambda: torch.rand(33, 3, device="cuda") > 0.5,
        lambda: torch.rand((), device="cuda"),
        lambda: torch.rand(40, device="cuda").to(torch.float8_e4m3fn),
        lambda: torch.rand(1, 100_000, device="cuda").bfloat16(),
    ],
    ids=["turned", "strided", "conjugate", "bool", "scalar", "float8", "one row"],
)
def test_a_tensor_of_any_layout_arrives_in_c_order(
    sidecar: FakeSidecar, snapshotter: Snapshotter, make: Callable[[], torch.Tensor]
) -> None:
    tensor = make()
    snapshotter.snapshot({"tensor": tensor}, 1)
    snapshotter.fence()
    entry = sidecar.sealed[1, 0]
    block = sidecar.slot(1).block(block_bytes(entry))
    (chunk,) = verify_block(block, entry, origin="test").tensors["tensor"].chunks
    raw = tensor.resolve_conj().cpu().contiguous().reshape(-1).view(torch.uint8)
    assert bytes(block[chunk.at : chunk.at + chunk.nbytes]) == raw.numpy().tobytes()


def test_memory_that_is_freed_meanwhile_is_not_handed_out_before_it_was_copied(
    sidecar: FakeSidecar, snapshotter: Snapshotter
) -> None:
    weight = nn.Parameter(torch.full((4 << 20,), 3.0, device="cuda"))
    sidecar.gate.clear()
    snapshotter.snapshot({"weight": nn.ParameterList([weight])}, 1)
    weight.data = torch.zeros(1, device="cuda")  # the program gives its memory up
    fill = [torch.full((4 << 20,), 7.0, device="cuda") for _ in range(8)]
    sidecar.gate.set()
    snapshotter.fence()
    assert fill[0][0].item() == 7.0
    check_stored(sidecar, 1, {"weight.0": torch.full((4 << 20,), 3.0)})


def test_a_replayed_graph_that_writes_to_the_state_discards_the_snapshot(
    sidecar: FakeSidecar, snapshotter: Snapshotter
) -> None:
    state = make_state()
    weights = [p.data for p in state["model"].parameters()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch._foreach_add_(weights, 1.0)
    sidecar.gate.clear()
    snapshotter.snapshot(state, 1)
    versions = [p._version for p in state["model"].parameters()]
    graph.replay()
    torch.cuda.synchronize()
    sidecar.gate.set()
    snapshotter.fence()
    assert [p._version for p in state["model"].parameters()] == versions
    assert snapshotter.stats.torn
    assert not sidecar.sealed
    snapshotter.snapshot(state, 2)
    snapshotter.fence()
    assert list(sidecar.sealed) == [(2, 0)]


def test_a_captured_step_of_a_tracked_optimizer_is_refused(snapshotter: Snapshotter) -> None:
    model = nn.Linear(8, 8).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    snapshotter.snapshot(state, 1)
    snapshotter.fence()
    with (
        pytest.raises(StateError, match="AdamW is stepped while a CUDA graph is captured"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        optimizer.step()
    with (
        pytest.raises(StateError, match="step 2 was asked for while a CUDA graph is captured"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        snapshotter.snapshot(state, 2)
    optimizer.step()
    snapshotter.snapshot(state, 3)
    snapshotter.fence()
    assert snapshotter.stats.last_step == 3


def test_an_optimizer_in_a_stream_of_its_own_waits_for_the_copy_too(
    sidecar: FakeSidecar, snapshotter: Snapshotter
) -> None:
    model, side = nn.Linear(2048, 2048).cuda(), torch.cuda.Stream()
    optimizers = [torch.optim.SGD([each], lr=1.0) for each in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    expected = {f"model.{k}": v.cpu() for k, v in model.state_dict().items()}
    torch.cuda.synchronize()
    snapshotter.snapshot({"model": model, "a": optimizers[0], "b": optimizers[1]}, 1)
    optimizers[1].step()
    with torch.cuda.stream(side):
        optimizers[0].step()
    snapshotter.fence()
    torch.cuda.synchronize()
    check_stored(sidecar, 1, expected)


def test_a_registration_that_failed_harms_no_kernel(tmp_path: Path) -> None:
    runtime, slot = torch.cuda.cudart, SlotFile.create(tmp_path / "1.slot", 1 << 20)
    first, second = PinnedSlots(runtime), PinnedSlots(runtime)
    torch.zeros(1, device="cuda")
    first.pin(slot)
    second.pin(slot)  # it is registered already, which CUDA refuses
    assert (len(first), len(second)) == (1, 0)
    assert torch.ones(1000, device="cuda").t().add(1).sum().item() == 2000.0
    first.close()
    slot.close()


ALONE_ON_THE_SECOND = """
import sys, torch
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from doubles.slots import FakeSidecar
torch.cuda.set_device(1)
sidecar = FakeSidecar(directory=Path(sys.argv[1]))
made = sidecar.snapshotter()
for step in range(3):
    made.snapshot({"x": torch.rand(300, 400, device="cuda:1").T}, step)
made.fence()
made.close()
sidecar.close()
assert torch._C._cuda_hasPrimaryContext(1)
print("first" if torch._C._cuda_hasPrimaryContext(0) else "second alone")
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_rank_makes_no_context_on_another_ranks_device(tmp_path: Path) -> None:
    tests = str(Path(__file__).parents[1])
    command = [sys.executable, "-c", ALONE_ON_THE_SECOND, str(tmp_path), tests]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == "second alone"


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
