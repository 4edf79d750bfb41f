"""The functions that ranks run in the process tests, in a module that a new process can import."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))  # `doubles`, for programs that import this file

import torch
import torch.distributed as dist
from doubles.slots import FakeSidecar
from ranks import enter
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from holdfast.ckpt.errors import StateError
from holdfast.ckpt.snapshot.snapshotter import Snapshotter
from holdfast.ckpt.state.hashing import state_hash
from holdfast.ckpt.torch_private import PrefixStore
from holdfast.elastic.channel.pulse import Pulse
from holdfast.elastic.config import Batch, Exact, Settings
from holdfast.elastic.errors import GenerationOverError
from holdfast.elastic.events import Event
from holdfast.elastic.groups import reform
from holdfast.elastic.loop.loss_watch import LossWatch
from holdfast.elastic.loop.run import Run
from holdfast.elastic.tracked.cursor import Cursor
from holdfast.elastic.tracked.protection import Protection


def all_collectives(world: reform.GenerationWorld, _folder: Path) -> dict[str, Any]:
    rank, size = world.rank, world.size
    found: dict[str, Any] = {}
    total = torch.full((3,), float(rank + 1))
    dist.all_reduce(total)
    found["all_reduce"] = total.tolist()
    highest = torch.tensor([float(rank)])
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    found["max"] = highest.item()
    gathered = torch.zeros(size)
    dist.all_gather_single(gathered, torch.tensor([float(rank)]))
    found["all_gather"] = gathered.tolist()
    part = torch.zeros(2)
    dist.reduce_scatter_single(part, torch.arange(2.0 * size))
    found["reduce_scatter"] = part.tolist()
    root = torch.tensor([float(rank)])
    dist.broadcast(root, src=size - 1)
    found["broadcast"] = root.item()
    lists = [torch.zeros(1) for _ in range(size)]
    dist.all_gather(lists, torch.tensor([10.0 * rank]))
    found["list"] = [item.item() for item in lists]
    swapped = torch.zeros(size)
    dist.all_to_all_single(swapped, torch.arange(size) + 10.0 * rank)
    found["all_to_all"] = swapped.tolist()
    if rank == 0:
        dist.send(torch.tensor([7.0]), dst=1)
    elif rank == 1:
        received = torch.zeros(1)
        dist.recv(received, src=0)
        found["received"] = received.item()
    work = dist.all_reduce(torch.ones(1), async_op=True)
    assert work is not None
    work.wait()
    found["gather"] = world.gather({"rank": rank, "text": "x" * rank})
    world.barrier()
    reform.leave()
    return found


def reduce_until_hurt(world: reform.GenerationWorld, folder: Path) -> float:
    tensor = torch.ones(1 << 14)
    for turn in range(1_000_000):
        dist.all_reduce(tensor)
        tensor.div_(world.size)
        if turn == 50:
            (folder / f"warm-{world.rank}").touch()
    return 0.0


def plan_alone(world: reform.GenerationWorld, folder: Path) -> dict[str, Any]:
    """Change the state at rank 0 only, while the other rank goes on to reduce gradients."""
    world.plans.timeout_s = 0.5
    slots = folder / str(world.rank)
    slots.mkdir()
    snapshots = Snapshotter(
        FakeSidecar(directory=slots),
        run="test",
        generation=1,
        rank=world.rank,
        world_size=world.size,
        gather=world.gather_plans,
    )
    state: dict[str, Any] = {"model": nn.Linear(2, 2)}
    sums, error = [], ""
    for step in range(3):
        if step == 1 and world.rank == 0:
            state["model"].register_buffer("extra", torch.zeros(3))
        try:
            snapshots.snapshot(state, step)
        except StateError as alone:
            error = error or str(alone)
        gradients = torch.full((1 << 12,), float(world.rank + 1))
        dist.all_reduce(gradients)
        sums.append(gradients.unique().tolist())
    snapshots.close()
    world.barrier()
    return {"sums": sums, "error": error, "taken": snapshots.stats.taken}


def await_files(files: list[Path]) -> None:
    deadline = time.monotonic() + 60
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline, files
        time.sleep(0.005)


def form_again_and_again(rank: int, stores: list[str], folder: Path) -> list[float]:
    """Fail to form generation 1 (a member never comes), then form ten without it."""
    if rank == 2:
        time.sleep(3600)
    try:
        enter(rank, stores, folder)
    except GenerationOverError:
        (folder / f"parked-{rank}").touch()
    reform.leave()
    await_files([folder / "parked-0", folder / "parked-1"])
    found = []
    for number in range(2, 12):
        world = enter(rank, stores[:2], folder, number=number)
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total)
        found.append(total.item())
        world.barrier()
        reform.leave()
    return found


class Net(nn.Module):
    """Plain and tied parameters, a buffer, layers of uneven sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 24)
        self.layers = nn.ModuleList([nn.Linear(24, 37), nn.Linear(37, 24)])
        self.head = nn.Linear(24, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.embed(text)
        for layer in self.layers:
            x = torch.nn.functional.dropout(torch.tanh(layer(x)), 0.1)
        logits = self.head(x).flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, ((text + 1) % 50).flatten())


class Keeping:
    """Stands for the keeper: a cursor, and nothing kept."""

    def __init__(self, settings: Settings) -> None:
        self.cursor, self.of_leader = Cursor(settings), set[str]()
        self.client: Any = None

    def track(self, state: Any, *, own: Any = None) -> None: ...
    def begin(self, count: int, *, prepare: Any = None) -> None: ...
    def fence(self) -> None: ...
    def fence_steps_of(self, optimizer: Any) -> None: ...
    def finish(self) -> None: ...
    def close(self) -> None: ...
    def keep_unfinished(self) -> None: ...

    def keep(self, *, last: bool, wished: bool = False, due: bool = False) -> None: ...

    def stall_s(self) -> float:
        return 0.0

    def protection(self) -> Protection:
        return Protection(step=-1, age_s=0.0)


class Listening:
    """Stands for the channel: remembers the emitted events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def beat(self, *, step: int, phase: Any, limit_s: float = 0.0) -> None: ...

    def leaving(self) -> bool:
        return False

    def halts(self, generation: int) -> bool:
        return False


def run_of(world: reform.GenerationWorld, settings: Settings) -> tuple[Run, Listening]:
    """A run without agents and sidecars."""
    channel: Any = Listening()
    keeper: Any = Keeping(settings)
    losses = LossWatch(settings.loss_guard) if settings.loss_guard else None
    run = Run(channel, settings, world, pulse=Pulse(channel), keeper=keeper, losses=losses)
    return run, channel


def wrapped(model: Net, world: reform.GenerationWorld, how: str) -> nn.Module:
    """Wrap a model as the name says: ``hsdp`` is two replicas, as soon as there are two ranks."""
    if how == "plain":
        return model
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    mesh, policy = world.mesh, MixedPrecisionPolicy()
    if how == "hsdp":
        replicas = min(world.size, 2)
        sizes = (replicas, world.size // replicas)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
    if how == "mixed":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    if how == "widened":
        model = model.to(torch.bfloat16)
        policy = MixedPrecisionPolicy(param_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def train(world: reform.GenerationWorld, folder: Path, *, exact: Exact, how: str) -> dict[str, Any]:
    """Train a few steps; return the hash of the weights and the observations of each step."""
    settings = Settings(batch=Batch(microbatches=5, size=3), exact=exact, seed=7)
    run, _ = run_of(world, settings)
    torch.manual_seed(1)
    model = wrapped(Net(), world, how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run.track(model=model, optimizer=optimizer)
    data = torch.arange(40 * 8).reshape(40, 8) * 7 % 50
    norms, mine = [], 0
    for step in run.steps(8):
        for batch in run.microbatches(data):
            mine += 1
            loss = model(batch) * (1000.0 if step == 5 else 1.0)
            run.backward(loss)
            run.log(loss=loss)
        norms.append(run.clip_grad_norm_(model.parameters(), 0.8))
        run.step(optimizer)
    run._finish()
    digest = state_hash({"model": model, "optimizer": optimizer})
    run._close()
    return {
        "hash": digest,
        "norms": norms,
        "loss": run.metrics["loss"],
        "microbatches": mine,
        "bounds": run._keeper.cursor.bounds,
    }


def train_in_turn(
    world: reform.GenerationWorld, folder: Path, *, ways: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Train in several ways, one after the other, in the same processes."""
    found, board = {}, world.board
    for name, how in ways.items():
        # a rank's note that it left one loop is not about the next one
        world.board = None if board is None else PrefixStore(name, board)
        found[name] = train(world, folder, **how)
    return found
