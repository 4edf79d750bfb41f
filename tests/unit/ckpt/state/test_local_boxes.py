"""A rank's local boxes agree with torch's placement: each box, and its memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from math import prod

import pytest
import torch
import torch.distributed as dist
from fake_ranks import rank_of
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from holdfast.ckpt.errors import ArgumentError, StateError
from holdfast.ckpt.state.local_boxes import (
    FlatShard,
    LocalBox,
    TensorShard,
    empty_like,
    like,
    local_boxes_of,
    mark_of,
    spec_of,
    writes_of,
)

STRIDED = _StridedShard


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(prod(shape), dtype=torch.int64).reshape(shape)


def box_of(full: torch.Tensor, part: LocalBox) -> torch.Tensor:
    spans = zip(part.box.offset, part.box.shape, strict=True)
    return full[..., *(slice(o, o + n) for o, n in spans)]


def check_world(shape: tuple[int, ...], mesh: tuple[int, ...], placed: list[Placement]) -> int:
    """Compare every rank's boxes with what ``distribute_tensor`` gave it; return the most boxes."""
    full, seen, most = numbered(shape), torch.zeros(shape, dtype=torch.int64), 0
    for rank in range(prod(mesh)):
        with rank_of(rank, mesh) as world:
            tensor = distribute_tensor(full, world, placed, src_data_rank=None)
            parts = local_boxes_of("t", tensor)
            assert sum(part.local.numel() for part in parts) == tensor._local_tensor.numel()
            for part in parts:
                assert part.local.shape == part.box.shape
                assert torch.equal(part.local, box_of(full, part))
                box_of(seen, part).add_(1)
            most = max(most, len(parts))
    replicas = prod(n for n, p in zip(mesh, placed, strict=True) if isinstance(p, Replicate))
    assert (seen == replicas).all()
    return most


@pytest.mark.parametrize(
    ("shape", "mesh", "placements"),
    [
        ((7, 3), (3,), [Shard(0)]),
        ((2, 3), (4,), [Shard(0)]),
        ((7, 5), (2, 3), [Shard(1), Shard(0)]),
        ((7, 5), (2, 3), [Shard(0), Shard(0)]),
        ((7, 5), (2, 2), [Replicate(), Shard(1)]),
        ((7, 5, 3), (2, 2, 2), [Shard(0), Replicate(), Shard(2)]),
        ((0, 5), (2,), [Shard(0)]),
        ((), (2,), [Replicate()]),
        ((12, 2), (3, 2), [STRIDED(0, split_factor=2), Shard(0)]),
        ((9, 2), (2, 2), [STRIDED(0, split_factor=2), Shard(0)]),
        ((9, 2), (2, 2), [STRIDED(0, split_factor=2), Shard(1)]),
        ((9, 2), (3,), [STRIDED(0, split_factor=4)]),
        ((11, 4), (2, 3), [STRIDED(0, split_factor=3), STRIDED(1, split_factor=2)]),
        ((16, 2), (2, 2, 2), [STRIDED(0, split_factor=4), Shard(0), Shard(0)]),
        ((10, 7), (2, 2), [Shard(0), STRIDED(0, split_factor=2)]),
    ],
)
def test_boxes_are_what_torch_distributes(
    shape: tuple[int, ...], mesh: tuple[int, ...], placements: list[Placement]
) -> None:
    check_world(shape, mesh, placements)


def test_a_strided_shard_alone_is_several_boxes() -> None:
    assert check_world((12, 2), (3,), [STRIDED(0, split_factor=2)]) == 2
    assert check_world((9, 6), (3,), [STRIDED(1, split_factor=2)]) == 2


def fsdp_over_tp(rows: int, mesh: tuple[int, int]) -> Iterator[tuple[DTensor, torch.Tensor]]:
    for rank in range(prod(mesh)):
        with rank_of(rank, mesh) as world:
            layer = nn.Linear(2, rows, bias=False)
            full = numbered((rows, 2)).float()
            with torch.no_grad():
                layer.weight.copy_(full)
            parallelize_module(layer, world["b"], ColwiseParallel(), src_data_rank=None)
            assert isinstance(layer.weight, DTensor)
            fully_shard(layer, mesh=world["a"])
            yield layer.weight, full


@pytest.mark.parametrize(("rows", "mesh"), [(12, (3, 2)), (9, (4, 2)), (7, (2, 3)), (5, (2, 4))])
def test_boxes_are_what_fsdp_over_tensor_parallelism_cuts(rows: int, mesh: tuple[int, int]) -> None:
    """Nine rows over 4 x 2: placements would put a row elsewhere than FSDP2 really does."""
    seen = torch.zeros(rows, 2)
    for weight, full in fsdp_over_tp(rows, mesh):
        for part in local_boxes_of("t", weight):
            assert torch.equal(part.local, box_of(full, part))
            box_of(seen, part).add_(1)
    assert (seen == 1).all()


def test_a_layout_that_cannot_be_told_apart_is_refused() -> None:
    refused = 0
    for rank in range(12):
        with rank_of(rank, (3, 4)) as world:
            placements = [STRIDED(0, split_factor=4), Shard(0)]
            tensor = distribute_tensor(numbered((27, 1)), world, placements, src_data_rank=None)
            try:
                local_boxes_of("t", tensor)
            except StateError as error:
                assert "t: " in str(error) and "one of two ways" in str(error)
                refused += 1
    assert refused == 1


def test_placements_that_are_no_regions_are_refused_by_name() -> None:
    with rank_of(0, (2,)) as world:
        tensor = DTensor.from_local(torch.ones(2), world, [Partial()], run_check=False)
        with pytest.raises(StateError, match=r"w: placement P\(sum\) cannot.*redistribute"):
            local_boxes_of("w", tensor)
        wrong = DTensor.from_local(
            torch.ones(3), world, [Shard(0)], run_check=False, shape=torch.Size([4]), stride=(1,)
        )
        with pytest.raises(StateError, match=r"w: .*gives \[2\], but this rank holds \[3\]"):
            local_boxes_of("w", wrong)


def test_writes_to_a_dtensor_and_to_its_local_part_are_counted() -> None:
    with rank_of(0, (2,)) as world:
        tensor = distribute_tensor(numbered((4, 2)), world, [Shard(0)], src_data_rank=None)
        marks = [mark_of(tensor)]
        for write in (lambda: tensor.mul_(2), lambda: tensor.to_local().add_(1)):
            write()
            marks.append(mark_of(tensor))
        assert [writes - marks[0][1] for _, writes in marks] == [0, 1, 2]
    with torch.inference_mode():
        assert writes_of(torch.ones(2)) == 0


def test_a_rank_outside_the_mesh_holds_nothing() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    try:
        mesh = dist.DeviceMesh("cpu", [0, 1])
        tensor = DTensor.from_local(
            torch.empty(0), mesh, [Shard(0)], run_check=False, shape=torch.Size([4]), stride=(1,)
        )
        assert local_boxes_of("t", tensor) == ()
    finally:
        dist.destroy_process_group()


def test_views_are_of_the_live_memory() -> None:
    weight = nn.Parameter(torch.zeros(2))
    local_boxes_of("w", weight)[0].local.fill_(1)  # and autograd does not mind
    assert weight.sum() == 2
    base = torch.zeros(6, 4)
    (part,) = local_boxes_of("t", TensorShard(base[:, 1:3], shape=(6, 8), offset=(0, 4)))
    part.local.fill_(1)
    assert base.sum() == 12
    flat = torch.zeros(11)
    for part in local_boxes_of("t", FlatShard(flat, shape=(4, 5), start=3)):
        part.local.copy_(box_of(numbered((4, 5)).float(), part))
    assert torch.equal(flat, torch.arange(3.0, 14.0))


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4), (2, 2, 3, 2), (3, 1, 1), (0, 4)])
def test_every_flat_range_is_a_few_contiguous_boxes(shape: tuple[int, ...]) -> None:
    full, count = numbered(shape), prod(shape)
    for start, end in itertools.combinations_with_replacement(range(count + 1), 2):
        local = torch.arange(start, end)
        parts = local_boxes_of("t", FlatShard(local, shape=shape, start=start))
        assert len(parts) <= max(2 * len(shape) - 1, 1)
        assert sum(part.local.numel() for part in parts) == end - start
        for part in parts:
            assert part.local.is_contiguous()
            assert part.local.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
            assert torch.equal(part.local, box_of(full, part))


def test_parts_that_do_not_fit_are_refused() -> None:
    for wrong in (
        lambda: TensorShard(torch.ones(2, 2), shape=(4, 2), offset=(3, 0)),
        lambda: TensorShard(torch.ones(2, 2), shape=(4, 2), offset=(-1, 0)),
        lambda: TensorShard(torch.ones(2), shape=(4, 2), offset=(0, 0)),
    ):
        with pytest.raises(ArgumentError, match="does not lie within a tensor of shape"):
            wrong()
    for wrong in (
        lambda: FlatShard(torch.ones(2, 2), shape=(4, 2), start=0),
        lambda: FlatShard(torch.ones(3), shape=(4, 2), start=6),
        lambda: FlatShard(torch.ones(3), shape=(4, 2), start=-1),
    ):
        with pytest.raises(ArgumentError, match="does not lie within a flattened tensor"):
            wrong()
    with rank_of(0, (2,)) as world:
        tensor = distribute_tensor(torch.ones(2), world, [Shard(0)], src_data_rank=None)
        with pytest.raises(ArgumentError, match="a DTensor knows its place"):
            TensorShard(tensor, shape=(2,), offset=(0,))
    with pytest.raises(ArgumentError, match="a TensorShard of a list: give a tensor"):
        TensorShard([1.0], shape=(2,), offset=(0,))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"FlatShard\(start=\[0\.5\]\): give numbers"):
        FlatShard(torch.ones(1), shape=(2,), start=0.5)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"TensorShard\(shape=2\): give numbers"):
        TensorShard(torch.ones(1), shape=2, offset=(0,))  # type: ignore[arg-type]


def test_state_of_a_part_lies_as_the_part() -> None:
    part = TensorShard(torch.zeros(2, 3), shape=(4, 3), offset=(2, 0))
    state = like("s", part, torch.ones(2, 3))
    assert isinstance(state, TensorShard)
    assert (state.offset, state.shape) == ((2, 0), (4, 3))
    step = torch.tensor(3.0)
    assert like("s", part, step) is step
    with pytest.raises(
        StateError, match=r"s: a state of shape \[2, 1\].*TensorShard\(\[2, 3\] at \[2, 0\]"
    ):
        like("s", part, torch.ones(2, 1))
    room = empty_like(FlatShard(torch.ones(5), shape=(3, 3), start=4), dtype=torch.bfloat16)
    assert isinstance(room, FlatShard)
    assert (room.start, spec_of("r", room).dtype) == (4, "bfloat16")
    assert repr(room) == "FlatShard(4 to 9 of [3, 3])"
