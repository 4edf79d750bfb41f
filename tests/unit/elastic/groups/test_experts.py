"""Experts along a mesh axis: groups, sums, refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, _random
from torch.distributed.tensor.debug import (
    _clear_fast_path_sharding_prop_cache,
    _clear_python_sharding_prop_cache,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from holdfast.ckpt import torch_private
from holdfast.ckpt.errors import ArgumentError
from holdfast.elastic.config import Exact, Mesh
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.gradients.mean import Gradients
from holdfast.elastic.gradients.summing import Replicas
from holdfast.elastic.groups.alltoall import all_to_all
from holdfast.elastic.groups.reform import (
    MODEL_AXES,
    GradientGroups,
    groups_of,
    meshes_of,
)
from holdfast.elastic.groups.shards import counts_here, experts_of, is_reduced_by_fsdp, local_of
from holdfast.elastic.membership.records import MeshSize


@contextmanager
def rank_of(
    rank: int, size: MeshSize, mesh_config: Mesh
) -> Iterator[tuple[DeviceMesh, DeviceMesh]]:
    """Be one rank of a world whose others are not there; give its meshes."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size.ranks)
    try:
        yield meshes_of(size, mesh_config.axes)
    finally:
        dist.destroy_process_group()
        _clear_python_sharding_prop_cache()
        _clear_fast_path_sharding_prop_cache()


@pytest.fixture
def meshes() -> Iterator[tuple[DeviceMesh, DeviceMesh]]:
    """Those of rank 0 of 4, two and two of which have all experts."""
    with rank_of(0, MeshSize(dp=4, ep=2), Mesh(ep=2)) as found:
        yield found


def ranks_in(group: dist.ProcessGroup | None) -> list[int] | None:
    return None if group is None else dist.get_process_group_ranks(group)


@pytest.mark.parametrize(
    ("size", "mesh_config", "ep", "data", "dp", "edp"),
    [
        (MeshSize(dp=4, ep=2), Mesh(ep=2), [2, 3], [0, 1, 2, 3], None, [1, 3]),
        (MeshSize(dp=4), Mesh(ep=(2, 1)), [3], [0, 1, 2, 3], None, None),
        (MeshSize(dp=4, ep=4), Mesh(ep=4), [0, 1, 2, 3], [0, 1, 2, 3], None, [3]),
        (MeshSize(dp=4, tp=2, ep=2), Mesh(ep=2, tp=2), [1, 3], [1, 3, 5, 7], [1, 3, 5, 7], [3, 7]),
        (
            MeshSize(dp=8, ep=2, shard=4),
            Mesh(ep=2, shard=4),
            [2, 3],
            [[0, 1, 2, 3], [4, 5, 6, 7]],
            None,
            [1, 3, 5, 7],
        ),
        (
            MeshSize(dp=4, tp=2, ep=2, shard=2),
            Mesh(ep=2, shard=2, tp=2),
            [1, 3],
            [[1, 3], [5, 7]],
            [1, 3, 5, 7],
            [3, 7],
        ),
    ],
)
def test_experts_are_carved_out_of_the_data_parallel_ranks(
    size: MeshSize,
    mesh_config: Mesh,
    ep: list[int],
    data: list[Any],
    dp: list[int] | None,
    edp: list[int] | None,
) -> None:
    """As rank 3 sees it."""
    with rank_of(3, size, mesh_config) as (mesh, data_mesh):
        assert mesh.mesh_dim_names == mesh_config.axes
        assert mesh["ep"].mesh.tolist() == ep
        assert data_mesh.mesh.tolist() == data
        assert data_mesh.mesh_dim_names == (
            ("replicate", "shard") if mesh_config.shard else ("dp",)
        )
        groups: GradientGroups = groups_of(mesh, size, data_mesh=data_mesh)
        assert ranks_in(groups.dp) == dp
        assert ranks_in(groups.edp) == edp


@pytest.mark.parametrize(
    ("size", "mesh_config"),
    [
        (MeshSize(dp=1, tp=2), Mesh(tp=2)),
        (MeshSize(dp=1, tp=2, pp=2), Mesh(tp=2, pp=2)),
        (MeshSize(dp=1, pp=2), Mesh(pp=2)),
        (MeshSize(dp=2, ep=2), Mesh(ep=2)),
        (MeshSize(dp=1), Mesh(tp=(2, 1), pp=(2, 1))),
        (MeshSize(dp=1), Mesh(ep=(2, 1))),
        (MeshSize(dp=2, tp=2), Mesh(tp=2)),
    ],
)
def test_no_axis_of_the_model_has_the_default_group(size: MeshSize, mesh_config: Mesh) -> None:
    with rank_of(0, size, mesh_config) as (mesh, _):
        names = {mesh.get_group(a).group_name for a in mesh_config.axes if a in MODEL_AXES}
        assert names
        assert dist.group.WORLD is not None
        assert dist.group.WORLD.group_name not in names
        for axis in mesh_config.axes:
            group = mesh[axis].get_group()
            assert ranks_in(group) == mesh[axis].mesh.tolist()


def expert(mesh: DeviceMesh, *placements: Placement) -> nn.Parameter:
    return nn.Parameter(DTensor.from_local(torch.ones(2, 3), mesh, placements, run_check=False))


class Net(nn.Module):
    """One dense parameter and two experts."""

    def __init__(self, experts: nn.Parameter) -> None:
        super().__init__()
        self.dense, self.experts = nn.Parameter(torch.ones(3)), experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.dense).sum() + (local_of(self.experts) * x).sum()


@pytest.mark.parametrize("shard", [None, 2])
def test_each_of_the_experts_is_counted_once(shard: int | None) -> None:
    size = MeshSize(dp=4, ep=2, shard=shard or 1)
    found, sharded = [], []
    for rank in range(4):
        with rank_of(rank, size, Mesh(ep=2, shard=shard)) as (mesh, _):
            if counts_here(expert(mesh["ep"], Shard(0)), rank=rank, first=0):
                found.append(rank)
            copies = mesh["replicate", "edp"] if shard else mesh["edp"]
            layer = nn.ParameterList([expert(mesh["ep"], Shard(0))])
            fully_shard(layer, mesh=copies)
            parameter = layer[0]
            assert is_reduced_by_fsdp(parameter)
            if counts_here(parameter, rank=rank, first=0):
                sharded.append(rank)
    assert found == [0, 1], "of the first copy"
    assert sharded == ([0, 1] if shard else [0, 1, 2, 3])


class Times:
    """Some equal ranks, so many."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def max_(self, tensor: torch.Tensor) -> None: ...

    def sum_(self, tensor: torch.Tensor) -> None:
        tensor.mul_(self.ranks)

    def start_sum(self, tensor: torch.Tensor) -> Callable[[], None]:
        return lambda: self.sum_(tensor)


@pytest.mark.parametrize("exact", [None, "float32", "int64"])
def test_experts_are_summed_over_those_who_have_the_same_and_divided_as_all_is(
    exact: Exact, meshes: tuple[DeviceMesh, DeviceMesh]
) -> None:
    mesh, _ = meshes
    model = Net(expert(mesh["ep"], Shard(0)))
    gradients = Gradients(
        {"model": model},
        Times(4),
        replicas=Replicas(dense=Times(4), experts=Times(2)),
        microbatches=8,
        exact=exact,
        bounds={},
    )
    for turn in range(3):  # the first has no buckets yet
        gradients.begin_pass()
        for last in (False, True):
            gradients.begin_microbatch(last=last)
            gradients.backward(model(torch.full((3,), 1.0 + turn)))
        gradients.end_pass(backwards=2)
        assert model.dense.grad is not None
        assert model.experts.grad is not None
        assert model.dense.grad.tolist() == [1.0 + turn] * 3
        assert local_of(model.experts.grad).tolist() == [[(1.0 + turn) / 2] * 3] * 2
        assert isinstance(model.experts.grad, DTensor)
        gradients.clear()
    gradients.close()


def track(model: nn.Module) -> None:
    Gradients({"model": model}, Times(1), microbatches=1, exact=None, bounds={}).close()


def test_what_nobody_would_sum_rightly_is_refused_by_name(
    meshes: tuple[DeviceMesh, DeviceMesh],
) -> None:
    mesh, _ = meshes
    whole = expert(mesh["ep"], Replicate())
    assert experts_of(whole) == Replicate()
    with pytest.raises(ConfigError, match=r"model\.experts is a DTensor that lies R.* along"):
        track(Net(whole))
    both = expert(mesh, Replicate(), Shard(0))
    with pytest.raises(ConfigError, match=r"model\.experts is a DTensor over data-parallel axes"):
        track(Net(both))
    both.requires_grad_(False)
    track(Net(both))
    track(Net(expert(mesh["ep"], Shard(0))))


@pytest.mark.parametrize(
    ("send", "receive"), [([1, 1], [1, 1]), ([2, 0, 1], [1, 1]), ([2, 1], [3])]
)
def test_counts_that_do_not_fit_are_refused(
    send: list[int], receive: list[int], meshes: tuple[DeviceMesh, DeviceMesh]
) -> None:
    with pytest.raises(ArgumentError, match="all_to_all of 3 rows along an axis of 2 ranks"):
        all_to_all(torch.ones(3, 2), send=send, receive=receive, axis=meshes[0]["ep"])


def test_random_operations_on_devices_broadcast_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bool] = []

    class Tracker:
        def __init__(self, mesh: object, run_state_sync: bool = True) -> None:
            made.append(run_state_sync)

    monkeypatch.setattr(_random, "OffsetBasedRNGTracker", Tracker)
    monkeypatch.setattr(_random, "_rng_tracker", None)
    for _ in range(2):
        torch_private.keep_random_states(cast(DeviceMesh, None))
    assert made == [False], "the first mesh's; no other is needed"
