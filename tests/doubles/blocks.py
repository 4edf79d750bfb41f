"""Blocks of random bytes, and a worker that writes them: for tests of arenas and sidecars."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from holdfast.ckpt.geometry.shard_index import encode_index
from holdfast.ckpt.memory.arena import FixedPart, SlotFile
from holdfast.ckpt.memory.records import BlockEntry, SidecarPeer, SnapshotWorld
from holdfast.ckpt.memory.target import CheckpointTarget
from holdfast.ckpt.native.isal import crc32c
from holdfast.ckpt.sidecar.client import SidecarClient
from holdfast.ckpt.testing.shards import INDEX_ROOM_BYTES, make_index


def random_payload(nbytes: int, *, seed: Sequence[int]) -> bytes:
    """Return bytes that depend on ``seed`` alone."""
    return np.random.default_rng(list(seed)).bytes(nbytes)


def make_block(
    payload: bytes, *, generation: int = 1, step: int = 1, rank: int = 0, world_size: int = 1
) -> tuple[BlockEntry, bytes]:
    """Return a whole block and its entry."""
    index = make_index(
        payload,
        run="test",
        generation=generation,
        step=step,
        rank=rank,
        world_size=world_size,
    )
    text = encode_index(index)
    entry = BlockEntry(
        generation=generation,
        step=step,
        rank=rank,
        payload_bytes=len(payload),
        index_bytes=len(text),
        index_crc32c=crc32c(text),
    )
    return entry, payload + bytes(-len(payload) % 8) + text


def make_world(
    addresses: dict[str, str],
    *,
    run: str = "test",
    rank_nodes: Sequence[str] | None = None,
    generation: int = 1,
    parity: int = 0,
    keep: int = 2,
    groups: tuple[tuple[str, ...], ...] = (),
    columns: int = 0,
) -> SnapshotWorld:
    """Return a world; one rank per node unless ``rank_nodes`` says otherwise."""
    return SnapshotWorld(
        run=run,
        generation=generation,
        peers=tuple(SidecarPeer(node=node, address=at) for node, at in addresses.items()),
        rank_nodes=tuple(addresses if rank_nodes is None else rank_nodes),
        parity=parity,
        keep=keep,
        groups=groups,
        columns=columns,
    )


def write_block(
    client: SidecarClient,
    world: SnapshotWorld,
    *,
    step: int,
    rank: int,
    nbytes: int,
    persist: CheckpointTarget | None = None,
    seed: int | None = None,
    timeout_s: float = 10.0,
) -> bytes:
    """Write a snapshot as a worker does; return its payload, random with ``seed`` or the step."""
    drawn = step if seed is None else seed
    payload = random_payload(nbytes, seed=(world.generation, drawn, rank))
    write_payload(
        client, world, payload, step=step, rank=rank, persist=persist, timeout_s=timeout_s
    )
    return payload


def write_payload(
    client: SidecarClient,
    world: SnapshotWorld,
    payload: bytes,
    *,
    step: int,
    rank: int,
    persist: CheckpointTarget | None = None,
    timeout_s: float = 10.0,
    fixed: FixedPart | None = None,
) -> None:
    """Write a snapshot of these bytes as a worker does; those of a ``fixed`` part only once."""
    nbytes = len(payload)
    index = make_index(
        payload,
        run=world.run,
        generation=world.generation,
        step=step,
        rank=rank,
        world_size=len(world.rank_nodes),
    )
    grant = client.acquire(
        generation=world.generation,
        step=step,
        rank=rank,
        size_bytes=nbytes + INDEX_ROOM_BYTES,
        timeout_s=timeout_s,
        fixed=fixed,
    )
    fills = fixed is not None and not grant.has_fixed
    slot = SlotFile.open(grant.path, fill=fills)
    start = fixed.nbytes if fixed is not None and not fills else 0
    slot.block(nbytes)[start:] = payload[start:]
    entry = slot.finish(index)
    if fixed is not None:
        entry = msgspec.structs.replace(entry, fixed=fixed.number, fixed_bytes=fixed.nbytes)
    client.seal(slot_id=grant.slot_id, entry=entry, persist=persist)
    slot.close()
