"""Every layout of tensors over ranks loads from every other, cell by cell, bit for bit.

The ranks are simulated in one process: real capture, index, plan and restore, real DTensors,
without a process group. The expected result of each rank comes from torch's own splitting of the
whole tensor, not from our arithmetic; the value of a cell is a function of its name and index.
"""

from __future__ import annotations

import itertools
import zlib
from dataclasses import dataclass
from math import prod
from typing import Any

import pytest
import torch
from doubles.shards import MemoryShards, capture_world
from exploring import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from holdfast.ckpt.errors import StateError
from holdfast.ckpt.state import torch_dtypes
from holdfast.ckpt.state.flatten import flatten
from holdfast.ckpt.state.local_boxes import FlatShard, Leaf, TensorShard, local_of
from holdfast.ckpt.state.restore import live_keys, restore
from holdfast.ckpt.state.saved import read_tensors

KINDS = ("whole", "mesh", "strided", "fsdp over tp", "flat", "zero", "parts", "owned")
EXTENTS = st.sampled_from([0, 1, 2, 3, 5, 7, 11, 13])
SHAPES = st.lists(EXTENTS, min_size=0, max_size=3).map(tuple)
MESHES = {
    1: [(1,), (1, 1)],
    2: [(2,), (1, 2), (2, 1)],
    3: [(3,), (3, 1)],
    4: [(4,), (2, 2), (2, 1, 2)],
    6: [(6,), (2, 3), (3, 2), (1, 2, 3)],
    8: [(8,), (2, 4), (4, 2), (2, 2, 2)],
}
PLAIN = ["float32", "int64", "bfloat16"]
DTYPES = st.sampled_from(PLAIN) | st.sampled_from(sorted(torch_dtypes.BY_NAME))


@dataclass(frozen=True)
class Tensor:
    """One tensor of a model, and how it lies before and after."""

    fqn: str
    full: torch.Tensor
    kinds: tuple[str, str]


def contents(fqn: str, shape: tuple[int, ...], name: str) -> torch.Tensor:
    """Return bytes that depend on name and index: numbers, infinities and NaNs of all kinds."""
    dtype = torch_dtypes.BY_NAME[name]
    generator = torch.Generator().manual_seed(zlib.crc32(fqn.encode()))
    top = 2 if name == "bool" else 256
    count = prod(shape) * dtype.itemsize
    raw = torch.randint(0, top, (count,), dtype=torch.uint8, generator=generator)
    return raw.view(torch_dtypes.carrier(dtype)).reshape(shape).view(dtype)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(torch_dtypes.as_carrier(tensor.contiguous()).reshape(-1).view(torch.uint8).numpy())


def one_of(draw: st.DrawFn, choices: list[Any]) -> Any:
    return draw(st.sampled_from(choices))


def split(full: torch.Tensor, mesh: tuple[int, ...], placed: list[Placement], where: Any) -> Any:
    """Cut as ``distribute_tensor`` does: by one mesh axis after the other."""
    local = torch_dtypes.as_carrier(full)
    for size, place, at in zip(mesh, placed, where, strict=True):
        if not isinstance(place, Replicate):
            local = place._split_tensor(local, size, with_padding=False)[0][at]
    return local.clone().view(full.dtype)


def on_mesh(full: torch.Tensor, mesh: tuple[int, ...], placed: list[Placement]) -> list[Leaf]:
    ranks = torch.arange(prod(mesh)).reshape(mesh)
    found: list[Leaf] = []
    for rank, where in enumerate(itertools.product(*map(range, mesh))):
        world = DeviceMesh("cpu", ranks, _init_backend=False, _rank=rank)
        found.append(dtensor(split(full, mesh, placed, where), full, world, placed))
    return found


def dtensor(
    local: torch.Tensor, full: torch.Tensor, mesh: DeviceMesh, placed: list[Placement]
) -> DTensor:
    return DTensor.from_local(
        local, mesh, placed, run_check=False, shape=full.shape, stride=full.stride()
    )


@st.composite
def meshes(draw: st.DrawFn, full: torch.Tensor, world: int, *, strided: bool) -> list[Leaf]:
    mesh = one_of(draw, MESHES[world])
    choices: list[Placement] = [Replicate(), *map(Shard, range(full.ndim))]
    if strided:
        choices += [_StridedShard(d, split_factor=f) for d in range(full.ndim) for f in (2, 3)]
    return on_mesh(full, mesh, [one_of(draw, choices) for _ in mesh])


@st.composite
def fsdp_over_tp(draw: st.DrawFn, full: torch.Tensor, world: int) -> list[Leaf]:
    """FSDP2 cuts the local tensor of tensor parallelism, whatever the placements say of it."""
    dp, tp = one_of(draw, [mesh for mesh in MESHES[world] if len(mesh) == 2] or [(world, 1)])
    dim = draw(st.integers(0, full.ndim - 1)) if full.ndim else None
    if dim is None or tp == 1:
        return on_mesh(full, (world,), [Replicate()])
    placed = [_StridedShard(dim, split_factor=tp), Shard(dim)]
    ranks, found = torch.arange(world).reshape(dp, tp), []
    for rank, (d, t) in enumerate(itertools.product(range(dp), range(tp))):
        mesh = DeviceMesh("cpu", ranks, _init_backend=False, _rank=rank)
        inner = split(full, (tp,), [Shard(dim)], (t,))
        found.append(dtensor(split(inner, (dp,), [Shard(dim)], (d,)), full, mesh, placed))
    return found


@st.composite
def flat(draw: st.DrawFn, full: torch.Tensor, world: int, *, even: bool) -> list[Leaf]:
    """Cut the flattened tensor: evenly with the rest last (ZeRO), or anywhere (FSDP1)."""
    count = full.numel()
    if even:
        each = -(-count // world)
        cuts = [min(rank * each, count) for rank in range(world + 1)]
    else:
        inner = draw(st.lists(st.integers(0, count), min_size=world - 1, max_size=world - 1))
        cuts = [0, *sorted(inner), count]
    line = torch_dtypes.as_carrier(full).reshape(-1)
    return [
        FlatShard(line[a:b].clone().view(full.dtype), shape=full.shape, start=a)
        for a, b in itertools.pairwise(cuts)
    ]


@st.composite
def parts(draw: st.DrawFn, full: torch.Tensor, world: int) -> list[Leaf]:
    """Cut one dim anywhere, some ranks nothing; each half of an even world may be a replica."""
    if not full.ndim:
        return [TensorShard(full.clone(), shape=(), offset=()) for _ in range(world)]
    dim = draw(st.integers(0, full.ndim - 1))
    different = world // 2 if world % 2 == 0 and draw(st.booleans()) else world
    extent = full.shape[dim]
    inner = draw(st.lists(st.integers(0, extent), min_size=different - 1, max_size=different - 1))
    cuts = [0, *sorted(inner), extent]
    found: list[Leaf] = []
    for rank in range(world):
        a, b = cuts[rank % different], cuts[rank % different + 1]
        local = torch_dtypes.as_carrier(full).narrow(dim, a, b - a).clone().view(full.dtype)
        offset = [0] * full.ndim
        offset[dim] = a
        found.append(TensorShard(local, shape=full.shape, offset=offset))
    return found


def laid_out(draw: st.DrawFn, kind: str, full: torch.Tensor, world: int) -> list[Leaf | None]:
    """Return the part of ``full`` on each rank; None if a rank does not have the tensor."""
    copies = [torch_dtypes.as_carrier(full).clone().view(full.dtype) for _ in range(world)]
    if kind == "whole":
        return list(copies)
    if kind == "owned":
        owner = draw(st.integers(0, world - 1))
        return [copy if rank == owner else None for rank, copy in enumerate(copies)]
    strategies = {
        "mesh": meshes(full, world, strided=False),
        "strided": meshes(full, world, strided=True),
        "fsdp over tp": fsdp_over_tp(full, world),
        "flat": flat(full, world, even=False),
        "zero": flat(full, world, even=True),
        "parts": parts(full, world),
    }
    return list(draw(strategies[kind]))


@st.composite
def worlds(draw: st.DrawFn, pair: tuple[str, str]) -> Any:
    """Draw a model, and its states in two worlds: per rank a mapping of names to leaves."""
    count = draw(st.integers(1, 3))
    tensors = []
    for i in range(count):
        kinds = pair if i == 0 else (one_of(draw, [*KINDS]), one_of(draw, [*KINDS]))
        full = contents(f"t{i}", draw(SHAPES), draw(DTYPES))
        tensors.append(Tensor(f"t{i}", full, kinds))
    sides = []
    for side in (0, 1):
        world = one_of(draw, list(MESHES))
        states: list[dict[str, Leaf]] = [{} for _ in range(world)]
        for tensor in tensors:
            each = laid_out(draw, tensor.kinds[side], tensor.full, world)
            for state, leaf in zip(states, each, strict=True):
                if leaf is not None:
                    state[tensor.fqn] = leaf
        sides.append(states)
    return tensors, *sides


@pytest.mark.parametrize("pair", list(itertools.product(KINDS, KINDS)), ids=" to ".join)
@settings(max_examples=examples(8), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_cell_arrives_in_every_other_layout(
    pair: tuple[str, str], data: st.DataObject
) -> None:
    tensors, before, after = data.draw(worlds(pair))
    try:
        shards = MemoryShards(capture_world(before))
        expected = [{fqn: bits(local_of(leaf)) for fqn, leaf in state.items()} for state in after]
        for state in after:
            for leaf in state.values():
                torch_dtypes.as_carrier(local_of(leaf)).zero_()
        keys = {key for state in after for key in live_keys(flatten(state))}
        for rank, state in enumerate(after):
            report = restore(state, shards, rank=rank, elsewhere=keys)
            assert report.tensors == len(state)
            assert {fqn: bits(local_of(leaf)) for fqn, leaf in state.items()} == expected[rank]
    except StateError as error:
        assert "one of two ways" in str(error)  # rare sizes are refused, never guessed
        return
    for tensor in tensors:
        (whole,) = read_tensors(shards, [tensor.fqn]).values()
        assert whole.shape == tensor.full.shape
        assert bits(whole) == bits(tensor.full)
