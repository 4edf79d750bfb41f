"""Who keeps snapshots together, what they hold, and what can be restored from it. Pure values."""

from __future__ import annotations

import msgspec

from ckpt.types import learn


class SidecarPeer(msgspec.Struct, frozen=True, kw_only=True):
    """A node's sidecar: the node's name and the ``tcp://host:port`` it serves at."""

    node: str
    address: str


class SnapshotWorld(msgspec.Struct, frozen=True, kw_only=True):
    """The group that guards the snapshots of one generation.

    ``peers`` are all nodes of the parity group, in the order that places stripes, including
    nodes that hold no rank; ``rank_nodes[r]`` is the node of rank ``r``; any ``parity`` of the
    nodes may vanish; the ``keep`` newest protected steps stay in memory.
    """

    run: str
    generation: int
    peers: tuple[SidecarPeer, ...]
    rank_nodes: tuple[str, ...]
    parity: int
    keep: int

    def __post_init__(self) -> None:
        names = [peer.node for peer in self.peers]
        if len(set(names)) != len(names):
            raise ValueError(f"node names {names} repeat")
        if missing := set(self.rank_nodes) - set(names):
            raise ValueError(f"ranks lie on nodes {sorted(missing)} outside the group {names}")
        if not 0 <= self.parity < max(len(names), 1):
            raise ValueError(f"parity {self.parity} needs more than {len(names)} nodes")
        if self.keep < 1:
            raise ValueError(f"keep is {self.keep}, at least one snapshot must stay")


class BlockEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A sealed, verified shard in a node's arena: rank's payload and index of (generation, step).

    A *block* is the slot's bytes behind its header: payload, then the index JSON.
    """

    generation: int
    step: int
    rank: int
    payload_bytes: int
    index_bytes: int
    index_crc32c: int


class ParityEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A sealed, verified parity fragment: number ``row`` of ``stripe`` of (generation, step)."""

    generation: int
    step: int
    stripe: int
    row: int
    nbytes: int
    crc32c: int


class Inventory(msgspec.Struct, frozen=True, kw_only=True):
    """What one sidecar can serve; ``worlds`` holds the group of every generation named in it.

    ``sealed`` repeats the block entries of *all* ranks that this sidecar has heard of, so that
    the shape of a lost node's blocks is known to the survivors. ``spoiled`` are the blocks that
    this sidecar rebuilt from parity and found wrong.
    """

    node: str
    worlds: tuple[SnapshotWorld, ...]
    blocks: tuple[BlockEntry, ...]
    parities: tuple[ParityEntry, ...]
    sealed: tuple[BlockEntry, ...]
    spoiled: tuple[BlockEntry, ...] = ()


class BlockSource(msgspec.Struct, frozen=True, kw_only=True):
    """Where rank's block is to be had: ``node`` holds it, or rebuilds it from parity."""

    rank: int
    node: str
    rebuilt: bool = False


class RestorePoint(msgspec.Struct, frozen=True, kw_only=True):
    """A step every needed byte of which is readable: the saving group and a source per rank."""

    world: SnapshotWorld
    step: int
    sources: tuple[BlockSource, ...]


learn(globals())
