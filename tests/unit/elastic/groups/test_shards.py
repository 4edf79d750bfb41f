"""The part of a tensor that each rank counts, and the gradients that FSDP2 reduces."""

from __future__ import annotations

from math import prod

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.debug import (
    _clear_fast_path_sharding_prop_cache,
    _clear_python_sharding_prop_cache,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from holdfast.elastic.groups.shards import (
    counts_here,
    is_reduced_by_fsdp,
    local_of,
    settled,
    with_local,
)

SHAPE, NAMES = (2, 2, 2), ("replicate", "shard", "tp")


def cut(mesh: DeviceMesh, *placements: Placement) -> DTensor:
    return DTensor.from_local(torch.ones(2, 3), mesh, placements, run_check=False)


def ranks_that_count(axes: str, *placements: Placement) -> list[int]:
    """Return the ranks of the mesh that count a tensor which lies on some of its axes."""
    found = []
    for rank in range(prod(SHAPE)):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=prod(SHAPE))
        try:
            mesh = init_device_mesh("cpu", SHAPE, mesh_dim_names=NAMES)
            tensor = cut(mesh[tuple(axes.split())], *placements) if axes else torch.ones(2)
            if counts_here(tensor, rank=rank, first=0):
                found.append(rank)
        finally:
            dist.destroy_process_group()
            _clear_python_sharding_prop_cache()
            _clear_fast_path_sharding_prop_cache()
    return found


@pytest.mark.parametrize(
    ("axes", "placements", "expected"),
    [
        ("", (), [0]),
        ("tp", (Shard(0),), [0, 1]),
        ("tp", (Replicate(),), [0]),
        ("shard", (Shard(0),), [0, 2]),
        ("replicate shard", (Replicate(), Shard(0)), [0, 2]),
        ("replicate shard tp", (Replicate(), Shard(0), Shard(1)), [0, 1, 2, 3]),
        ("replicate shard tp", (Replicate(), Shard(0), Replicate()), [0, 2]),
    ],
)
def test_every_part_of_a_tensor_is_counted_by_one_rank(
    axes: str, placements: tuple[Placement, ...], expected: list[int]
) -> None:
    assert ranks_that_count(axes, *placements) == expected


def test_what_only_tensor_parallelism_cuts_is_reduced_by_us() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        by_tp, by_both = cut(mesh["tp"], Shard(0)), cut(mesh, Shard(0), Shard(0))
        unnamed = cut(DeviceMesh("cpu", [0, 1, 2, 3]), Shard(0))
        assert [is_reduced_by_fsdp(t) for t in (torch.ones(1), by_tp, by_both, unnamed)] == [
            False,
            False,
            True,
            True,
        ]
    finally:
        dist.destroy_process_group()


def test_a_partial_gradient_is_added_up_to_lie_as_its_parameter() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        parameter, gradient = cut(mesh, Replicate()), cut(mesh, Partial())
        assert settled(gradient, parameter).placements == parameter.placements
        assert settled(parameter, parameter) is parameter
        plain = nn.Parameter(torch.ones(2))
        assert settled(plain, plain) is plain
        doubled = with_local(parameter, local_of(parameter) * 2)
        assert isinstance(doubled, DTensor)
        assert (doubled.placements, doubled.shape) == (parameter.placements, parameter.shape)
        assert local_of(doubled).unique().tolist() == [2.0]
    finally:
        dist.destroy_process_group()
