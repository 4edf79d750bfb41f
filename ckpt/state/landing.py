"""Transfer of saved bytes into live tensors, which a source fills as arrays.

A CPU tensor is filled in place. A tensor on another device is filled through host memory, a bounded
amount at a time.
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
"""Per saved name: its spec, and each wanted box with the live tensor (of its shape) to fill."""

_STAGED_BYTES: Final = 256 << 20


class LandingSource(Protocol):
    """The part of a shard source that this module needs."""

    def scatter(self, deliveries: ByChunk) -> int:
        """Read regions of chunks into their destinations, verified; return the bytes read."""


def fill(source: LandingSource, saved: Sequence[ShardIndex], targets: Targets) -> int:
    """Fill live tensors with the saved bytes of their boxes; return the bytes read.

    Raises ``CorruptError`` if bytes are damaged or missing; tensors may be half filled then.
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
    """Return the host memory to fill: a CPU tensor itself, else a new buffer (pinned for CUDA)."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def _batches(targets: Targets) -> Iterator[Targets]:
    """Yield all CPU tensors as one batch, then the others in batches of bounded size."""
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
