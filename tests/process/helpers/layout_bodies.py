"""Models in every layout of four ranks, and their expected contents, for real processes."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from holdfast import ckpt
from holdfast.ckpt.checkpoints.source import StoreSource
from holdfast.ckpt.state.flatten import flatten
from holdfast.ckpt.state.local_boxes import TensorShard, local_boxes_of
from holdfast.ckpt.state.restore import restore

State = dict[str, Any]
BLOCKS = 4
HIDDEN = 6


class Block(nn.Module):
    """Ten rows: uneven over four ranks, and over two of what tensor parallelism leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, 10)
        self.down = nn.Linear(10, HIDDEN)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """Any run of blocks: all of them, or those of a pipeline stage, under the names of all."""

    def __init__(self, first: int = 0, last: int = BLOCKS) -> None:
        super().__init__()
        blocks = {str(i): Block() for i in range(first, last)}
        self.blocks = nn.ModuleDict(blocks)
        if first == 0 < last:
            self.embed = nn.Embedding(7, HIDDEN)
            self.frozen = nn.Parameter(torch.ones(3, 2), requires_grad=False)
        if last == BLOCKS:
            self.head = nn.Linear(HIDDEN, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) if hasattr(self, "embed") else torch.ones(*tokens.shape, HIDDEN)
        for block in self.blocks.values():
            x = block(x)
        x = self.head(x) if hasattr(self, "head") else x
        return x.square().mean()


def alone() -> Net:
    return Net()


def fsdp2() -> nn.Module:
    model = Net()
    mesh = DeviceMesh("cpu", [0, 1, 2, 3])
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh, ignored_params={model.frozen})


def hsdp() -> nn.Module:
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("replicate", "shard"))
    model = Net()
    return fully_shard(model, mesh=mesh, ignored_params={model.frozen})


def fsdp_tp() -> nn.Module:
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    model = Net()
    plan = {
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tp"], plan)
    return fully_shard(model, mesh=mesh["dp"], ignored_params={model.frozen})


def fsdp1(*, original: bool, strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD) -> nn.Module:
    model = Net()
    options: dict[str, Any] = {
        "use_orig_params": original,
        "device_id": torch.device("cpu"),
        "sharding_strategy": strategy,
    }
    frozen = model.frozen
    for name in list(model.blocks):
        model.blocks[name] = FullyShardedDataParallel(model.blocks[name], **options)
    wrapped = FullyShardedDataParallel(model, ignored_states=[frozen], **options)
    assert isinstance(wrapped, nn.Module)
    return wrapped


def ddp() -> nn.Module:
    return DistributedDataParallel(Net())


def pipeline(stages: int) -> nn.Module:
    """Two stages of two replicas, or three of which the last has two."""
    stage = min(dist.get_rank() * stages // 4, stages - 1)
    bounds = [0, 2, BLOCKS] if stages == 2 else [0, 1, 3, BLOCKS]
    return Net(bounds[stage], bounds[stage + 1])


LAYOUTS: dict[str, Callable[[], nn.Module]] = {
    "fsdp2": fsdp2,
    "hsdp": hsdp,
    "fsdp1": lambda: fsdp1(original=True),
    "fsdp_tp": fsdp_tp,
    "fsdp1_flat": lambda: fsdp1(original=False),
    "pipeline2": lambda: pipeline(2),
    "fsdp1_zero2": lambda: fsdp1(original=True, strategy=ShardingStrategy.SHARD_GRAD_OP),
    "pipeline3": lambda: pipeline(3),
    "fsdp1_whole": lambda: fsdp1(original=False, strategy=ShardingStrategy.NO_SHARD),
    "ddp": ddp,
}


def build(make: Callable[[], nn.Module], *, seed: int = 0) -> State:
    """Return a state that has taken one step: two groups, a frozen parameter, a schedule."""
    torch.manual_seed(seed)
    model = make()
    trained = [p for p in model.parameters() if p.requires_grad]
    frozen = [p for p in model.parameters() if not p.requires_grad]
    groups = [{"params": trained}, {"params": frozen, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01 * (1 + seed))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    model(torch.arange(4)).backward()
    optimizer.step()
    schedule.step()
    return {"model": model, "optimizer": optimizer, "schedule": schedule, "seen": {"n": seed}}


def pattern(fqn: str, shape: tuple[int, ...], salt: int) -> torch.Tensor:
    """Return a tensor whose values tell its name and every index; scalars are all alike."""
    if not shape:
        return torch.tensor(float(salt))
    start = zlib.crc32(f"{salt} {fqn}".encode()) % 99_991
    return torch.arange(start, start + prod(shape)).float().reshape(shape)


def each_box(state: State, salt: int) -> Any:
    for fqn, leaf in flatten(state).tensors.items():
        full = pattern(fqn, tuple(leaf.shape), salt)
        for part in local_boxes_of(fqn, leaf):
            spans = zip(part.box.offset, part.box.shape, strict=True)
            yield fqn, part.local, full[..., *(slice(o, o + n) for o, n in spans)]


def paint(state: State, salt: int) -> None:
    for _, local, want in each_box(state, salt):
        local.copy_(want)


def check(state: State, salt: int) -> int:
    count = 0
    for fqn, local, want in each_box(state, salt):
        assert torch.equal(local, want), (fqn, salt)
        count += local.numel()
    return count


def check_alone(root: Path, salt: int) -> None:
    """Load into one whole model, which has no layout."""
    state = build(alone, seed=50)
    with StoreSource(root, salt) as source:
        report = restore(state, source, rank=0)
    assert report.tensors == len(flatten(state).tensors)
    for fqn, leaf in flatten(state).tensors.items():
        assert isinstance(leaf, torch.Tensor)
        assert torch.equal(leaf, pattern(fqn, tuple(leaf.shape), salt)), (fqn, salt)
    assert state["optimizer"].param_groups[0]["lr"] == 0.01 * (1 + salt)
    assert state["optimizer"].param_groups[1]["weight_decay"] == 0.0
    assert state["seen"] == {"n": salt}


def ring(root: Path) -> None:
    """Save in every layout, and load that alone, in the next layout, and back again."""
    names = list(LAYOUTS)
    states = {name: build(make, seed=salt) for salt, (name, make) in enumerate(LAYOUTS.items())}
    for salt, name in enumerate(names):
        paint(states[name], salt)
        ckpt.save(root, states[name], step=salt)
        if dist.get_rank() == salt % 4:
            check_alone(root, salt)
    for salt, name in enumerate(names):
        following = states[names[(salt + 1) % len(names)]]
        report = ckpt.load(root, following, step=salt)
        assert (report.missing, report.extra) == ((), ())
        assert check(following, salt) > 0
        assert following["seen"] == {"n": salt}
        following["model"](torch.arange(4)).backward()  # and it goes on
        following["optimizer"].step()
        ckpt.load(root, states[name], step=salt)
        check(states[name], salt)


class Experts(nn.Module):
    """Four experts as one stack: of them this rank has a few, and a router that all have."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.stack = nn.Parameter(torch.zeros(count, 3, 2))
        self.router = nn.Linear(2, 4)


def stacked(first: int, count: int) -> State:
    experts = Experts(count)
    optimizer = torch.optim.AdamW(experts.parameters())
    for parameter in experts.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    stack = TensorShard(experts.stack, shape=(4, 3, 2), offset=(first, 0, 0))
    router = {"weight": experts.router.weight, "bias": experts.router.bias}
    return {"moe": {"stack": stack, "router": router}, "optimizer": optimizer}


def separate(mine: list[int]) -> State:
    experts = nn.ModuleDict({str(i): nn.Linear(3, 2) for i in mine})
    optimizer = torch.optim.SGD(experts.parameters(), lr=0.1, momentum=0.9)
    for parameter in experts.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {"experts": experts, "optimizer": optimizer}


def experts(root: Path) -> None:
    """Experts stacked or each for itself, two per rank pair, three and one, or all in one place."""
    rank = dist.get_rank()
    two = stacked(2 * (rank % 2), 2)
    paint(two, 1)
    ckpt.save(root / "stack", two, step=1)
    uneven = stacked([0, 3, 4, 0][rank], [3, 1, 0, 4][rank])
    ckpt.load(root / "stack", uneven)
    check(uneven, 1)
    if rank == 0:
        whole = stacked(0, 4)
        with StoreSource(root / "stack", 1) as source:
            restore(whole, source, rank=0)
        check(whole, 1)

    each = separate([[0, 1], [2], [3], []][rank] or [3])
    paint(each, 2)
    ckpt.save(root / "each", each, step=1)
    other = separate([[3, 1], [0], [2], [0, 2]][rank])
    report = ckpt.load(root / "each", other)
    check(other, 2)
    assert report.extra == ()
    members = [f"experts.{i}.{kind}" for i in range(4) for kind in ("weight", "bias")]
    with ckpt.open(root / "each") as checkpoint:
        assert sorted(checkpoint.values["optimizer.groups.0.params"]) == sorted(members)


class Tied(nn.Module):
    """Two names for one parameter, which FSDP1 without original parameters forgets."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).sum()


def flat_parameters(root: Path) -> None:
    """FSDP1 alone: tied parameters, gathered ones, state of several that shares one step."""
    for original in (True, False):
        options: dict[str, Any] = {
            "use_orig_params": original,
            "device_id": torch.device("cpu"),
            "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP,
        }
        tied = FullyShardedDataParallel(Tied(), **options)
        loss = tied(torch.ones(2, 3))  # and gathered it stays until the backward pass
        ckpt.save(root / f"tied-{original}", {"model": tied}, step=1)
        loss.backward()
        plain = Tied()
        with StoreSource(root / f"tied-{original}", 1) as source:
            restore({"model": plain}, source, rank=0)
            assert source.manifest.aliases == {"model.second.weight": "model.first.weight"}
        ckpt.load(root / f"tied-{original}", {"model": tied})
        with FullyShardedDataParallel.summon_full_params(tied):
            full = dict(tied.module.named_parameters())["first.weight"]
            assert torch.equal(full, plain.first.weight)
            try:
                flatten({"model": tied})
            except ckpt.StateError as error:
                assert "leave summon_full_params first" in str(error)
            else:
                raise AssertionError("gathered")

    model = build(alone)["model"]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    optimizer.state[model.head.bias]["step"].fill_(7)
    ckpt.save(root / "steps", {"model": model, "optimizer": optimizer}, step=1)
    flat = fsdp1(original=False)
    trained = [p for p in flat.parameters() if p.requires_grad]
    state: State = {"model": flat, "optimizer": torch.optim.AdamW(trained)}
    try:
        ckpt.load(root / "steps", state, strict="ignore")
    except ckpt.MismatchError as error:
        assert "model.head.bias.step" in str(error)
        assert "are one tensor here" in str(error)
    else:
        raise AssertionError("one step for several")


def refusals(root: Path) -> None:
    """Check that a difference on one rank is reported on all ranks, and that nothing is written."""
    rank = dist.get_rank()
    state: State = {"t": torch.ones(2), "progress": {"seed": rank // 3}}
    try:
        ckpt.save(root, state, step=1)
    except ckpt.StateError as error:
        text = str(error)
        assert text.startswith("progress: the ranks have different values"), text
        assert 'rank 0: {"seed":0}' in text, text
        assert 'rank 3: {"seed":1}' in text, text
        assert "PerRank" in text
    else:
        raise AssertionError("saved")
    lost = ckpt.TensorShard(torch.ones(1), shape=(4,), offset=(min(rank, 2),))
    try:
        ckpt.save(root, {"t": lost}, step=1)
    except ckpt.StateError as error:
        assert "t: the ranks hold 3 elements of shape (4,)" in str(error)
    else:
        raise AssertionError("saved")
    twisted = ckpt.TensorShard(torch.ones(2), shape=(4,), offset=([0, 1, 0, 1][rank],))
    try:
        ckpt.save(root, {"t": twisted}, step=1)
    except ckpt.StateError as error:
        assert "t: what the ranks hold" in str(error), error
    else:
        raise AssertionError("saved")
    model = Net(*((0, 2), (2, 4))[rank // 2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + rank // 2)
    try:
        ckpt.save(root, {"model": model, "optimizer": optimizer}, step=1)
    except ckpt.StateError as error:
        assert "optimizer.groups.0.lr" in str(error)
    else:
        raise AssertionError("saved")
    assert not root.exists() or not any(root.iterdir())


def body(rank: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=4)
    refusals(folder / "refused")
    experts(folder / "experts")
    flat_parameters(folder / "flat")
    ring(folder / "ring")
    dist.barrier()
    dist.destroy_process_group()
