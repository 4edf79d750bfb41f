"""The boxes of a global tensor that one rank holds, each a view of live memory."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from functools import partial, reduce
from math import prod
from typing import Final, SupportsIndex, TypeAlias, cast

import msgspec
import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from holdfast.ckpt import torch_private
from holdfast.ckpt.checks import shown
from holdfast.ckpt.errors import ArgumentError, StateError
from holdfast.ckpt.geometry.layout import (
    Box,
    Region,
    Run,
    Split,
    TensorSpec,
    at_origin,
    flat_boxes,
    is_nested,
    regions_of,
    shard_runs,
)
from holdfast.ckpt.state import torch_dtypes


class TensorShard:
    """This rank's box of a larger tensor that is no DTensor: a stack of experts, a hand-made shard.

    A state may hold it wherever it may hold a tensor. ``tensor`` is the local one (any strides),
    which lies at ``offset`` of the global tensor of ``shape``. Ranks may hold different boxes, the
    same one (replicas) or an empty one. An optimizer's state for ``tensor`` is split in the same
    way.

    Raises ``ArgumentError`` if the box does not lie within ``shape``.
    """

    __slots__ = ("offset", "shape", "tensor")

    def __init__(
        self, tensor: torch.Tensor, *, shape: Sequence[int], offset: Sequence[int]
    ) -> None:
        _check_local("TensorShard", tensor)
        self.tensor = tensor
        self.shape = _numbers("TensorShard", "shape", shape)
        self.offset = _numbers("TensorShard", "offset", offset)
        ends = map(operator.add, self.offset, tensor.shape)
        if (
            not len(self.shape) == len(self.offset) == tensor.ndim
            or min(self.offset, default=0) < 0
            or any(map(operator.gt, ends, self.shape))
        ):
            raise ArgumentError(
                f"a TensorShard of shape {list(tensor.shape)} at offset {list(self.offset)} does "
                f"not lie within a tensor of shape {list(self.shape)}; give one offset per dim, in "
                "elements"
            )

    def __repr__(self) -> str:
        return (
            f"TensorShard({list(self.tensor.shape)} at {list(self.offset)} of {list(self.shape)})"
        )


class FlatShard:
    """This rank's contiguous range of a flattened tensor, as FSDP1 and ZeRO hold it.

    A state may hold it wherever it may hold a tensor. ``tensor`` (1-D) has the elements from
    ``start`` on, in C order, of a global tensor of ``shape``; it may be empty. An optimizer's state
    for ``tensor`` is split in the same way.

    Raises ``ArgumentError`` if the range does not lie within ``shape``.
    """

    __slots__ = ("shape", "start", "tensor")

    def __init__(self, tensor: torch.Tensor, *, shape: Sequence[int], start: int) -> None:
        _check_local("FlatShard", tensor)
        self.tensor, self.shape = tensor, _numbers("FlatShard", "shape", shape)
        (self.start,) = _numbers("FlatShard", "start", [start])
        if tensor.ndim != 1 or not 0 <= self.start <= prod(self.shape) - tensor.numel():
            raise ArgumentError(
                f"a FlatShard of shape {list(tensor.shape)} from element {start} on does not lie "
                f"within a flattened tensor of shape {list(self.shape)}; give a 1-D tensor and the "
                "number of elements before it"
            )

    def __repr__(self) -> str:
        end = self.start + self.tensor.numel()
        return f"FlatShard({self.start} to {end} of {list(self.shape)})"


Leaf: TypeAlias = torch.Tensor | TensorShard | FlatShard
"""The types that a state accepts as a tensor."""

SHARDS: Final = (TensorShard, FlatShard)
LEAVES = (torch.Tensor, *SHARDS)

_COUNTED_ELEMENTS: Final = 1 << 24


class LocalBox(msgspec.Struct, frozen=True, kw_only=True):
    """A box that this rank holds, and a view of the live memory of it, in the box's shape."""

    box: Box
    local: torch.Tensor


def _check_local(kind: str, tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(f"a {kind} of a {type(tensor).__name__}: give a tensor of this rank")
    if isinstance(tensor, DTensor):
        raise ArgumentError(f"a {kind} of a DTensor: a DTensor knows its place; put it in as it is")


def _numbers(kind: str, name: str, given: Iterable[SupportsIndex]) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, given))
    except TypeError as error:
        raise ArgumentError(f"{kind}({name}={shown(given)}): give numbers of elements") from error


def spec_of(fqn: str, leaf: Leaf) -> TensorSpec:
    """Return the global dtype and shape of a tensor under the name ``fqn``."""
    dtype = torch_dtypes.NAME_OF[local_of(leaf).dtype]
    return TensorSpec(fqn=fqn, dtype=dtype, shape=tuple(leaf.shape))


def local_of(leaf: Leaf) -> torch.Tensor:
    """Return the tensor in this process's memory. It shares version and memory with ``leaf``."""
    if isinstance(leaf, SHARDS):
        return leaf.tensor
    return torch_private.local_part_of(leaf) if isinstance(leaf, DTensor) else leaf


def counted_of(leaf: Leaf) -> list[torch.Tensor]:
    """Return the tensors that count the in-place writes to ``leaf``, by their versions.

    An operation on a DTensor is counted there, one on its local part at the part. Tensors of
    inference mode count nothing.
    """
    local = local_of(leaf)
    found = [local, leaf] if isinstance(leaf, DTensor) else [local]
    return [tensor for tensor in found if not tensor.is_inference()]


def writes_of(leaf: Leaf) -> int:
    """Return the count of in-place writes to ``leaf``; 0 for a tensor of inference mode."""
    return sum(map(torch_private.version_of, counted_of(leaf)))


def mark_of(leaf: Leaf) -> tuple[int, int]:
    """Return the address of a tensor and its count of in-place writes."""
    return local_of(leaf).data_ptr(), writes_of(leaf)


def check_tensor(fqn: str, leaf: Leaf) -> None:
    """Raise ``StateError`` if the tensor is not plain bytes, or not materialised."""
    local = local_of(leaf)
    if local.is_nested:
        raise StateError(f"{fqn}: a nested tensor cannot be captured; keep what unbind() returns")
    if nn.parameter.is_lazy(local) or local.is_meta:
        raise StateError(f"{fqn}: not materialised yet; run the model or call to_empty() first")
    if local.layout != torch.strided:
        raise StateError(f"{fqn}: layout {local.layout} cannot be captured; use a dense tensor")
    if local.dtype not in torch_dtypes.NAME_OF:
        raise StateError(
            f"{fqn}: dtype {local.dtype} cannot be captured; keep its integer values and scales"
        )
    if type(local).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise StateError(
            f"{fqn}: tensor subclass {type(local).__name__} cannot be captured; keep the plain "
            "tensors it is made of"
        )


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Say whether several elements of a local tensor share memory, as after ``expand``.

    A tensor of more than 16 million elements may be said to, if its strides are interleaved.
    """
    if tensor.is_contiguous():
        return False
    dims = sorted(
        (stride, n) for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if n > 1
    )
    reach = 0
    for stride, n in dims if tensor.numel() else ():
        if stride <= reach:
            break
        reach += stride * (n - 1)
    else:
        return False
    if tensor.numel() > _COUNTED_ELEMENTS or dims[0][0] == 0:
        return True
    places = reduce(np.add.outer, [np.arange(n) * stride for stride, n in dims])
    return len(np.unique(places)) < places.size


def local_boxes_of(fqn: str, leaf: Leaf) -> tuple[LocalBox, ...]:
    """Return the boxes this rank holds, none of them empty, without communication.

    Raises ``StateError`` naming ``fqn`` for placements that are not regions (Partial).
    """
    found = regions(fqn, leaf)
    return tuple([LocalBox(box=each.box, local=view_of(leaf, each).detach()) for each in found])


def view_of(leaf: Leaf, region: Region) -> torch.Tensor:
    """Return a view of the memory in which this rank holds ``region``, in the shape of its box."""
    local, box = local_of(leaf), region.box
    if isinstance(leaf, FlatShard):
        local = local.detach()[region.at[0] : region.at[0] + box.size].view(box.shape)
    elif local.shape != box.shape:
        local = local.detach()
        for dim, (at, length) in enumerate(zip(region.at, box.shape, strict=True)):
            local = local.narrow(dim, at, length)
    return local


def regions(fqn: str, leaf: Leaf) -> tuple[Region, ...]:
    """Return each box that this rank holds, with its offset in the local tensor.

    The boxes are those of `local_boxes_of`. The offset in a `FlatShard` is a single number, in
    elements.
    """
    if isinstance(leaf, FlatShard):
        return _flat_regions(leaf)
    if isinstance(leaf, DTensor):
        return regions_of(_runs(fqn, leaf))
    local = tuple(local_of(leaf).shape)
    if 0 in local:
        return ()
    origin = at_origin(local)
    box = Box(offset=leaf.offset, shape=local) if isinstance(leaf, TensorShard) else origin
    return (Region(box=box, at=origin.offset),)


def _flat_regions(leaf: FlatShard) -> tuple[Region, ...]:
    found, at = [], 0
    for box in flat_boxes(leaf.shape, start=leaf.start, length=leaf.tensor.numel()):
        found.append(Region(box=box, at=(at,)))
        at += box.size
    return tuple(found)


def _runs(fqn: str, tensor: DTensor) -> tuple[tuple[Run, ...], ...]:
    """Return per dim the indices that this rank holds of a DTensor.

    Uneven strided shards lie in one of two ways. The local shape tells which one, except for rare
    sizes where both give the same shape. Those are refused, never guessed.
    """
    mesh, placements = tensor.device_mesh, tensor.placements
    axes = [_axis(fqn, placement) for placement in placements]
    if (coordinate := mesh.get_coordinate()) is None:
        return ((),) * max(tensor.ndim, 1)
    runs = partial(shard_runs, tensor.shape, mesh=mesh.shape, coordinate=coordinate, axes=axes)
    ways = [runs()]
    if is_nested(mesh=mesh.shape, axes=axes) and (nested := runs(nested=True)) != ways[0]:
        ways.append(nested)
    local = tuple(torch_private.local_part_of(tensor).shape)
    fitting = [way for way in ways if _extents(way) == local]
    if len(fitting) == 1:
        return fitting[0]
    where = f"{fqn}: {tuple(placements)} of {list(tensor.shape)} over {tuple(mesh.shape)}"
    if fitting:
        raise StateError(
            f"{where}: its rows lie in one of two ways, which this rank's {list(local)} does not "
            "tell apart; choose a size that the strided axes divide, or redistribute it first"
        )
    raise StateError(
        f"{where} gives {list(_extents(ways[0]))}, but this rank holds {list(local)}; its sharding "
        "is not what its placements say: keep it as a Part instead"
    )


def _extents(runs: Sequence[Sequence[Run]]) -> tuple[int, ...]:
    return tuple(sum(length for _, length in found) for found in runs)


def _axis(fqn: str, placement: object) -> Split | None:
    if isinstance(placement, Replicate):
        return None
    if (after := torch_private.split_factor_of(placement)) is not None:
        return Split(dim=cast(Shard, placement).dim, after=after)
    if isinstance(placement, Shard):
        return Split(dim=placement.dim)
    raise StateError(
        f"{fqn}: placement {placement} cannot be captured; redistribute it to Shard or Replicate"
    )


def like(fqn: str, leaf: Leaf, tensor: torch.Tensor) -> Leaf:
    """Return ``tensor``, an optimizer state of the parameter ``leaf``, split as the parameter is.

    Scalars stay whole. Raises ``StateError`` if the state of a part has another shape than the
    part.
    """
    if not isinstance(leaf, SHARDS) or tensor.ndim == 0:
        return tensor
    if tensor.shape != leaf.tensor.shape:
        raise StateError(
            f"{fqn}: a state of shape {list(tensor.shape)} for a parameter of which this rank "
            f"holds {leaf!r}: where it lies cannot be known; keep such state in an object with "
            "state_dict() that gives it as Part"
        )
    if isinstance(leaf, TensorShard):
        return TensorShard(tensor, shape=leaf.shape, offset=leaf.offset)
    return FlatShard(tensor, shape=leaf.shape, start=leaf.start)


def empty_like(leaf: Leaf, *, dtype: torch.dtype) -> Leaf:
    """Return uninitialised memory with the shape and placement of ``leaf``; no communication."""
    local = torch.empty_like(local_of(leaf).detach(), dtype=dtype)
    if not isinstance(leaf, DTensor):
        return local if isinstance(leaf, torch.Tensor) else like("", leaf, local)
    return DTensor.from_local(
        local,
        leaf.device_mesh,
        leaf.placements,
        run_check=False,
        shape=leaf.shape,
        stride=leaf.stride(),
    )
