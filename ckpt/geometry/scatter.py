"""Deliveries of chunk regions: a plan's copies, each with the array that it fills."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy.typing as npt

from holdfast.ckpt.geometry.layout import Box
from holdfast.ckpt.geometry.reshard import ReshardPlan
from holdfast.ckpt.geometry.shard_index import ChunkRef

Array: TypeAlias = npt.NDArray[Any]

Delivery: TypeAlias = tuple[ChunkRef, list[tuple[Box, Array]]]

ByChunk: TypeAlias = Sequence[Delivery]
"""Per chunk its regions, each with the array (of that shape and element width) that it fills."""

Targets: TypeAlias = Mapping[str, Sequence[Array]]
"""Per wanted name an array for each wanted box."""


def grouped(plan: ReshardPlan, targets: Targets) -> ByChunk:
    """Return a plan's copies as regions with the parts of ``targets`` that they fill."""
    return [
        (
            group[0].ref,
            [(copy.src, _part(targets[copy.fqn][copy.box], copy.dst)) for copy in group],
        )
        for group in plan.by_chunk()
    ]


def _part(target: Array, box: Box) -> Array:
    return target if target.shape == box.shape else target[box.slices]


def cut(deliveries: Sequence[Delivery], limit_bytes: int) -> Iterator[list[Delivery]]:
    """Split ``deliveries`` into runs of one writer of at most ``limit_bytes`` (or one chunk)."""
    run: list[Delivery] = []
    size = 0
    for delivery in deliveries:
        ref = delivery[0]
        full = size + ref.chunk.nbytes > limit_bytes
        if run and (full or run[0][0].writer != ref.writer):
            yield run
            run, size = [], 0
        run.append(delivery)
        size += ref.chunk.nbytes
    if run:
        yield run
