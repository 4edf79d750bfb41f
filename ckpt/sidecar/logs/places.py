"""The nodes that hold the copies of a log.

A log has as many whole copies as the world has parity: any ``m`` nodes may vanish. Whole copies and
not parity fragments, because a log is small and grows by every append: at 12 bytes a token (eight
sequences, four tokens of each a record, framed, ids of 32 bits) a worker that samples 2,000 tokens
a second writes 24 KB/s. So two copies of its last ten minutes are 29 MB, and each batch of 50 ms is
one message of 1.2 KB to each holder. Fragments of ``k`` columns would save at most ``(k-1)/k`` of
those megabytes. But a batch would be spread over ``k + m`` nodes, a record of 400 bytes would be
read back from ``k`` of them, and the tail of a stripe would be encoded again with every batch.
"""

from __future__ import annotations

import hashlib

from holdfast.ckpt.memory.records import SidecarPeer, SnapshotWorld
from holdfast.ckpt.parity.domains import domains_of


def group_of(world: SnapshotWorld, node: str) -> tuple[str, ...]:
    """Return the nodes of ``node``'s parity group, empty if it is in none."""
    return next((group for group in world.parity_groups() if node in group), ())


def holders_of(world: SnapshotWorld, node: str) -> tuple[SidecarPeer, ...]:
    """Return the holders of copies of logs written on ``node``: as many as the parity.

    They are the next nodes of its group; nodes come first that share no failure domain with it or
    with each other, or only wide ones.
    """
    peers = {peer.node: peer for peer in world.peers}
    group = group_of(world, node)
    at = group.index(node) if node in group else 0
    ring = [peers[name] for name in (*group[at + 1 :], *group[:at])]
    used = {*domains_of(peers[node].domain)} if node in peers else set()
    holders: list[SidecarPeer] = []
    while ring and len(holders) < world.parity:
        # of equals the first: the next of the group
        best = min(ring, key=lambda peer: len(used.intersection(domains_of(peer.domain))))
        ring.remove(best)
        holders.append(best)
        used |= {*domains_of(best.domain)}
    return tuple(holders)


def keepers_of(
    world: SnapshotWorld, node: str, name: str, *, among: tuple[str, ...]
) -> tuple[SidecarPeer, ...]:
    """Return the keepers of a log that its writer's node has lost: one more than the parity.

    They are chosen by rendezvous hashing (Thaler and Ravishankar, 1998), so that all holders name
    the same nodes, and a loss moves only the lost copies.
    """

    def weight(peer: SidecarPeer) -> bytes:
        text = f"{node}\0{name}\0{peer.node}"
        return hashlib.blake2b(text.encode(), digest_size=8).digest()

    able = [peer for peer in world.peers if peer.node in among and peer.node != node]
    return tuple(sorted(able, key=weight)[: world.parity + 1])
