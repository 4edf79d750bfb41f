"""Sums over ranks: of whole tensors in flat buckets, of sharded tensors to their shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Placement, Shard

from holdfast.elastic.errors import ConfigError
from holdfast.elastic.groups.shards import data_axes

BUCKET_BYTES = 32 << 20
"""Largest size of one collective sum, unless one tensor is larger."""


class Reducer(Protocol):
    """Reduces a tensor over some ranks, in place."""

    def max_(self, tensor: torch.Tensor) -> None:
        """Reduce to the maximum."""

    def sum_(self, tensor: torch.Tensor) -> None:
        """Reduce to the sum."""

    def start_sum(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Start the sum; return a function that waits for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """The ranks that sum a gradient: those with the same ``dense`` part, or the same experts."""

    dense: Reducer
    experts: Reducer


def sum_whole(tensors: Sequence[torch.Tensor], sum_: Callable[[torch.Tensor], None]) -> None:
    """Add up every rank's ``tensors`` of any dtypes, in place, through ``sum_`` of flat buckets."""
    for tensor, total in zip(tensors, sums_of(tensors, sum_), strict=True):
        if total is not tensor:
            tensor.copy_(total)


def sums_of(
    tensors: Sequence[torch.Tensor], sum_: Callable[[torch.Tensor], None]
) -> list[torch.Tensor]:
    """Return the sums of every rank's ``tensors``, as `sum_whole` makes them; may reuse these."""
    found: list[torch.Tensor] = []
    for bucket in _buckets(tensors):
        if (flat := _adjacent(bucket)) is not None:
            sum_(flat)
            found += bucket
            continue
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        sum_(flat)
        parts = torch.split(flat, [tensor.numel() for tensor in bucket])
        found += [part.view(each.shape) for each, part in zip(bucket, parts, strict=True)]
    return found


def _adjacent(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return contiguous tensors of one dtype as one, flat, if they lie adjacent in memory."""
    first, end = tensors[0], tensors[0].data_ptr()
    for tensor in tensors:
        apart = tensor.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
        if apart or tensor.data_ptr() != end or not tensor.is_contiguous():
            return None
        end += tensor.nbytes
    count = (end - first.data_ptr()) // first.itemsize
    return first.as_strided((count,), (1,), first.storage_offset())


def sum_shards(totals: Sequence[torch.Tensor], like: Sequence[DTensor]) -> list[torch.Tensor]:
    """Return this rank's shard of every sum over the ranks of the parameters' mesh.

    ``totals`` have the shape of the whole parameters on every rank (of its part of the model, with
    tensor parallelism). ``like`` gives each one's sharding: along at most one data-parallel axis of
    its mesh, in chunks like FSDP2's. Raises ``ConfigError`` for other placements.
    """
    found: list[torch.Tensor] = []
    at = 0
    for bucket in _buckets(totals, keys=[(p.device_mesh, p.placements) for p in like]):
        found += _sum_shards(bucket, like[at : at + len(bucket)])
        at += len(bucket)
    return found


def _sum_shards(totals: Sequence[torch.Tensor], like: Sequence[DTensor]) -> list[torch.Tensor]:
    mesh, placements = like[0].device_mesh, like[0].placements
    axes = data_axes(like[0])
    axis = _sharded_axis(placements, axes)
    if axis is None:
        mine = torch.cat([total.reshape(-1) for total in totals])
    else:
        shard = cast(Shard, placements[axis])
        ranks = mesh.size(axis)
        rows = torch.cat([_chunked(total, ranks, dim=shard.dim) for total in totals], dim=1)
        mine = rows[0]
        if ranks > 1:
            mine = torch.empty_like(mine)
            dist.reduce_scatter_single(mine, rows.reshape(-1), group=mesh.get_group(axis))
    for other in axes:
        if other != axis and mesh.size(other) > 1:
            dist.all_reduce(mine, group=mesh.get_group(other))
    return list(_cut(mine, totals, like, axis=axis))


def _chunked(total: torch.Tensor, ranks: int, *, dim: int) -> torch.Tensor:
    """Return a row for every rank: its chunk of ``total``, flat, padded with zeros."""
    chunks = total.chunk(ranks, dim)
    rows = total.new_zeros(ranks, chunks[0].numel())
    for row, chunk in zip(rows, chunks, strict=False):
        row[: chunk.numel()] = chunk.reshape(-1)
    return rows


def _cut(
    flat: torch.Tensor, totals: Sequence[torch.Tensor], like: Sequence[DTensor], *, axis: int | None
) -> Iterator[torch.Tensor]:
    at = 0
    for total, parameter in zip(totals, like, strict=True):
        local = parameter.to_local()
        yield flat[at : at + local.numel()].view(local.shape)
        if axis is None:
            at += total.numel()
        else:
            shard = cast(Shard, parameter.placements[axis])
            at += total.chunk(parameter.device_mesh.size(axis), shard.dim)[0].numel()


def _sharded_axis(placements: tuple[Placement, ...], axes: Sequence[int]) -> int | None:
    sharded = [axis for axis in axes if not placements[axis].is_replicate()]
    if len(sharded) > 1 or any(placements[axis].is_partial() for axis in sharded):
        raise ConfigError(
            f"gradients placed as {placements} cannot be summed beside their parameters: shard "
            "along one data-parallel axis of the mesh"
        )
    return sharded[0] if sharded else None


def _buckets(
    tensors: Sequence[torch.Tensor], keys: Sequence[object] | None = None
) -> Iterator[Sequence[torch.Tensor]]:
    """Split a sequence into runs of one dtype and one key, of limited size."""
    start, size_bytes = 0, 0
    for at, tensor in enumerate(tensors):
        before = tensors[at - 1] if at > start else tensor
        differs = before.dtype is not tensor.dtype or before.device != tensor.device
        if keys is not None and at > start:
            differs = differs or keys[at] != keys[at - 1]
        if at > start and (differs or size_bytes + tensor.nbytes > BUCKET_BYTES):
            yield tensors[start:at]
            start, size_bytes = at, 0
        size_bytes += tensor.nbytes
    if start < len(tensors):
        yield tensors[start:]
