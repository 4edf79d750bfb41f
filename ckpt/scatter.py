"""Bring saved regions to where they belong, from sources that yield whole chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ckpt.index import ChunkRef
from ckpt.layout import Box
from ckpt.reshard import ReshardPlan

Array: TypeAlias = npt.NDArray[Any]

ByChunk: TypeAlias = Sequence[tuple[ChunkRef, list[tuple[Box, Array]]]]
"""Per chunk its regions, each with the array (of that shape and element width) that takes it."""

Targets: TypeAlias = Mapping[str, Sequence[Array]]
"""Per wanted name an array for each wanted box."""


def grouped(plan: ReshardPlan, targets: Targets) -> ByChunk:
    """Return a plan's copies as regions with the parts of ``targets`` that they fill."""
    return [
        (
            group[0].ref,
            [(copy.src, targets[copy.fqn][copy.box][copy.dst.slices]) for copy in group],
        )
        for group in plan.by_chunk()
    ]


Read: TypeAlias = Callable[[Sequence[ChunkRef]], Iterator[tuple[ChunkRef, memoryview]]]


def scatter_whole(read: Read, deliveries: ByChunk) -> int:
    """Fill the targets from a source that yields whole, verified chunks; return the bytes read."""
    total = 0
    chunks = read([ref for ref, _ in deliveries])
    for (ref, data), (_, regions) in zip(chunks, deliveries, strict=True):
        total += ref.chunk.nbytes
        for region, target in regions:
            if target.size == ref.chunk.box.size and target.flags.c_contiguous:
                np.copyto(target.reshape(-1).view(np.uint8), np.frombuffer(data, np.uint8))
                continue
            kind = np.dtype((np.void, target.itemsize))
            chunk = np.frombuffer(data, kind).reshape(ref.chunk.box.shape)
            np.copyto(target.view(kind), chunk[region.slices])
    return total
