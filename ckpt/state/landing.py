"""Where saved bytes land: live tensors as arrays that a source can fill.

A tensor on the CPU is filled where it lies. One on another device gets room in host memory first,
a bounded amount at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Protocol, TypeAlias

import torch

from holdfast.ckpt.geometry.layout import Box, TensorSpec
from holdfast.ckpt.geometry.reshard import plan
from holdfast.ckpt.geometry.scatter import ByChunk, grouped
from holdfast.ckpt.geometry.shard_index import ShardIndex
from holdfast.ckpt.state import torch_dtypes

Targets: TypeAlias = Mapping[str, tuple[TensorSpec, Sequence[tuple[Box, torch.Tensor]]]]
"""Per saved name its boxes that are wanted, and the live tensor (of the box's shape) for each."""

_STAGED_BYTES: Final = 256 << 20


class LandingSource(Protocol):
    """What is needed of a source of shards."""

    def scatter(self, deliveries: ByChunk) -> int:
        """Read regions of chunks to where they belong, verified; return the bytes read."""


def fill(source: LandingSource, saved: Sequence[ShardIndex], targets: Targets) -> int:
    """Fill live tensors with what was saved of their boxes; return the bytes read.

    Raises ``CorruptError`` where bytes are damaged or missing; tensors may be half filled then.
    """
    return sum(_fill(source, saved, batch) for batch in _batches(targets))


def _fill(source: LandingSource, saved: Sequence[ShardIndex], targets: Targets) -> int:
    want = {fqn: (spec, tuple(box for box, _ in parts)) for fqn, (spec, parts) in targets.items()}
    rooms = {fqn: [_room(tensor) for _, tensor in parts] for fqn, (_, parts) in targets.items()}
    arrays = {
        fqn: [torch_dtypes.as_carrier(room).numpy() for room in each] for fqn, each in rooms.items()
    }
    read = source.scatter(grouped(plan(saved, want, strict=False), arrays))
    with torch.no_grad():
        for fqn, (_, parts) in targets.items():
            for (_, tensor), room in zip(parts, rooms[fqn], strict=True):
                if room is not tensor:
                    tensor.copy_(room)
    return read


def _room(tensor: torch.Tensor) -> torch.Tensor:
    """Return host memory to be filled: the tensor itself where it lies there."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def _batches(targets: Targets) -> Iterator[Targets]:
    """Yield all tensors on the CPU at once, the others by what may be staged."""
    here = {
        fqn: wanted
        for fqn, wanted in targets.items()
        if all(tensor.device.type == "cpu" for _, tensor in wanted[1])
    }
    if here:
        yield here
    batch: dict[str, tuple[TensorSpec, Sequence[tuple[Box, torch.Tensor]]]] = {}
    size = 0
    for fqn, wanted in targets.items():
        if fqn in here:
            continue
        nbytes = sum(tensor.nbytes for _, tensor in wanted[1])
        if batch and size + nbytes > _STAGED_BYTES:
            yield batch
            batch, size = {}, 0
        batch[fqn] = wanted
        size += nbytes
    if batch:
        yield batch
