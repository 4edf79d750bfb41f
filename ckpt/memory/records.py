"""The nodes that guard snapshots, the blocks they hold, and restore points. Pure values."""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from holdfast.ckpt.types import learn


def ancestor(run: str, generation: int) -> int:
    """Return the negative generation under which a later run finds this one's spilled snapshots.

    It is older than every generation of any run that reads it, and the same on all nodes.
    """
    digest = blake2b(f"{run}/{generation}".encode(), digest_size=6).digest()
    return -1 - int.from_bytes(digest, "little")


class SidecarPeer(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A node's sidecar: the node's name and the ``tcp://host:port`` at which it serves.

    ``domain`` labels its failure domain (a rack, or ``hall/rack``); "": it fails alone.
    """

    node: str
    address: str
    domain: str = ""


class SnapshotWorld(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes that guard the snapshots of one generation.

    ``peers`` are all nodes, including those that hold no rank; ``rank_nodes[r]`` is the node of
    rank ``r``; the ``keep`` newest protected steps stay in memory. ``groups`` partitions the node
    names into parity groups, in the order that places stripes (empty: one group of all peers). Any
    ``parity`` nodes of each group may vanish. ``columns`` is the number of data columns of a
    stripe: 0 for as many as a group allows (least memory), 1 for plain copies. ``memory_bytes`` is
    the host memory that a node may spend on all of it, 0 for no declared budget. ``stage`` is the
    number of the stage of the job to which the snapshots belong. ``pp`` and ``tp`` are the sizes of
    these axes of the mesh, which tell a rank's place in the pipeline.
    """

    run: str
    generation: int
    peers: tuple[SidecarPeer, ...]
    rank_nodes: tuple[str, ...]
    parity: int
    keep: int
    groups: tuple[tuple[str, ...], ...] = ()
    columns: int = 0
    memory_bytes: int = 0
    stage: int = 0
    pp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        names = [peer.node for peer in self.peers]
        known = set(names)
        if len(known) != len(names):
            raise ValueError(f"node names {names} repeat")
        if missing := set(self.rank_nodes) - known:
            raise ValueError(f"ranks lie on nodes {sorted(missing)} outside the group {names}")
        if not 0 <= self.parity < max(len(names), 1):
            raise ValueError(f"parity {self.parity} needs more than {len(names)} nodes")
        if self.keep < 1:
            raise ValueError(f"keep is {self.keep}, at least one snapshot must stay")
        if self.memory_bytes < 0:
            raise ValueError(f"memory_bytes is {self.memory_bytes}; give 0 for no budget")
        if min(self.pp, self.tp) < 1:
            raise ValueError(f"pp is {self.pp} and tp {self.tp}; an axis has a size of 1 or more")
        self._check_groups(known)

    def _check_groups(self, names: set[str]) -> None:
        grouped = [name for group in self.groups for name in group]
        if self.groups and (len(grouped) != len(names) or set(grouped) != names):
            nodes = sorted(names)
            raise ValueError(f"groups {self.groups} do not hold each of the nodes {nodes} once")
        least = min((len(group) for group in self.parity_groups()), default=0)
        if names and least <= self.parity:
            raise ValueError(f"a group of {least} nodes cannot have parity {self.parity}")
        if not 0 <= self.columns <= max(least - self.parity, 0):
            raise ValueError(
                f"{self.columns} data columns and parity {self.parity} need groups of "
                f"{self.columns + self.parity} nodes, the smallest has {least}"
            )

    def parity_groups(self) -> tuple[tuple[str, ...], ...]:
        """Return the groups: the stated ones, else one of all nodes in the order of ``peers``."""
        return self.groups or (tuple(peer.node for peer in self.peers),)

    def place_of(self, rank: int) -> int:
        """Return a rank's index along the pipeline."""
        return rank // self.tp % self.pp


class BlockEntry(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A sealed, verified shard in a node's arena: a rank's payload and index of a snapshot.

    A *block* is the slot's bytes behind its header: payload, then the index JSON. Its first
    ``fixed_bytes`` are the rank's *fixed part* with the number ``fixed``, which is the same in
    every block of this generation and rank that names it.
    """

    generation: int
    step: int
    rank: int
    payload_bytes: int
    index_bytes: int
    index_crc32c: int
    fixed_bytes: int = 0
    fixed: int = 0


class ParityEntry(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A sealed, verified parity fragment: number ``row`` of ``stripe`` of (generation, step)."""

    generation: int
    step: int
    stripe: int
    row: int
    nbytes: int
    crc32c: int


class Inventory(msgspec.Struct, frozen=True, kw_only=True):
    """The contents that one sidecar can serve.

    ``worlds`` holds the group of every generation named in it. ``sealed`` repeats the block entries
    of *all* ranks that this sidecar knows, so that the survivors know the lengths of a lost node's
    blocks. ``spoiled`` are the blocks that this sidecar rebuilt from parity and found wrong.
    ``durable`` is the newest step that it knows to be in the checkpoint store, -1 for none.
    """

    node: str
    worlds: tuple[SnapshotWorld, ...]
    blocks: tuple[BlockEntry, ...]
    parities: tuple[ParityEntry, ...]
    sealed: tuple[BlockEntry, ...]
    spoiled: tuple[BlockEntry, ...] = ()
    durable: int = -1


class BlockSource(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The source of a rank's block: ``node`` holds it, or rebuilds it from parity."""

    rank: int
    node: str
    rebuilt: bool = False


class RestorePoint(msgspec.Struct, frozen=True, kw_only=True):
    """A step every needed byte of which is readable: the saving group and a source per rank.

    Ranks without a source are `lost`: their part of the state comes from elsewhere.
    """

    world: SnapshotWorld
    step: int
    sources: tuple[BlockSource, ...]

    @property
    def lost(self) -> tuple[int, ...]:
        """The ranks whose blocks nobody has, in order; none of a complete point."""
        if len(self.sources) == len(self.world.rank_nodes):
            return ()
        there = {source.rank for source in self.sources}
        return tuple(r for r in range(len(self.world.rank_nodes)) if r not in there)


learn(globals())
