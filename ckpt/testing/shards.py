"""Shards without a sidecar or a store: captured from a state, or described as random bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from holdfast.ckpt.geometry.layout import Box
from holdfast.ckpt.geometry.shard_index import Chunk, ShardIndex, TensorEntry
from holdfast.ckpt.native.isal import crc32c

INDEX_ROOM_BYTES = 4096

Shard = tuple[ShardIndex, bytearray]


def capture(
    state: Mapping[str, Any],
    *,
    step: int = 0,
    generation: int = 1,
    rank: int = 0,
    world_size: int = 1,
    gather: Callable[[Any], list[Any]] | None = None,
) -> Shard:
    """Return this rank's index and payload of ``state``, copied now."""
    from holdfast.ckpt.state.capture import CapturePlan, flatten, gather_alone  # imports torch

    flat = flatten(state, rank=rank)
    plan = CapturePlan.build(flat, rank=rank, world_size=world_size, gather=gather or gather_alone)
    payload = bytearray(plan.payload_bytes)
    index = plan.write(flat, memoryview(payload), run="test", step=step, generation=generation)
    return index, payload


def make_index(
    payload: bytes, *, run: str, generation: int, step: int, rank: int, world_size: int
) -> ShardIndex:
    """Return an index of ``payload`` as two halves of one tensor per rank."""
    half = len(payload) // 2
    chunks = tuple(
        Chunk(
            box=Box(offset=(at,), shape=(len(part),)),
            at=at,
            nbytes=len(part),
            crc32c=crc32c(part),
        )
        for at, part in ((0, payload[:half]), (half, payload[half:]))
    )
    return ShardIndex(
        run=run,
        generation=generation,
        step=step,
        writer=rank,
        world_size=world_size,
        payload_bytes=len(payload),
        tensors={f"w{rank}": TensorEntry(dtype="uint8", shape=(len(payload),), chunks=chunks)},
    )
