"""Offers of runs that train one policy each."""

from __future__ import annotations

from holdfast.adapters.rl.config import preset
from holdfast.adapters.rl.server.meeting import Offer
from holdfast.ckpt.memory.records import SidecarPeer, SnapshotWorld
from holdfast.elastic.membership.records import GenerationRecord


def offer(generation: int = 1, *, reached: int = 3) -> Offer:
    """Return the offer of a run of two nodes."""
    peers = tuple(SidecarPeer(node=node, address=f"tcp://{node}") for node in "ab")
    world = SnapshotWorld(
        run="r", generation=generation, peers=peers, rank_nodes=("a", "b"), parity=1, keep=3
    )
    record = GenerationRecord(
        number=generation, members=(), snapshots=world, restore=None, reason="a test"
    )
    return Offer(
        run="r",
        seed=0,
        plan=preset("tiny").plan,
        names=("critic.weight",),
        generation=record,
        leader="tcp://leader",
        reached=reached,
    )
