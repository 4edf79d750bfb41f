"""Finds what the nodes spilled to their own disks, when memory has nothing to restore from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import msgspec

from ckpt import catalog
from ckpt.errors import CkptError
from ckpt.sidecar.client import SidecarClient
from ckpt.sidecar.messages import Spilled
from ckpt.stripes import restore_points
from ckpt.target import DiskTarget
from ckpt.world import Inventory, RestorePoint
from elastic.channel import Channel
from elastic.plan import on_timeline
from elastic.records import Origin
from elastic.reform import World

_ASKED_AT_ONCE: Final = 16


def spilled_points(
    channel: Channel, world: World, disk: DiskTarget, *, root: str | None
) -> list[RestorePoint]:
    """Return the snapshots on the nodes' disks that can be restored, the newest step first.

    Those that are older than the newest checkpoint in ``root`` are left out. Collective: rank 0
    asks all sidecars, which verify what they have.
    """
    found: list[RestorePoint] = []
    if world.rank == 0:
        found = world.guard.call(lambda: _ask(channel, world, disk, root), name="find-spilled")
    told = world.gather([msgspec.to_builtins(point) for point in found])[0]
    return [msgspec.convert(point, RestorePoint) for point in told]


def _ask(channel: Channel, world: World, disk: DiskTarget, root: str | None) -> list[RestorePoint]:
    def ask(address: str) -> list[Spilled]:
        client = SidecarClient(address, channel.key)
        try:
            return client.spilled(disk)
        except CkptError:
            return []  # who does not answer has nothing to offer
        finally:
            client.close()

    peers = world.record.snapshots.peers
    with ThreadPoolExecutor(_ASKED_AT_ONCE, thread_name_prefix="spilled") as pool:
        answers = pool.map(ask, [peer.address for peer in peers])
        offers = {peer.node: answer for peer, answer in zip(peers, answers, strict=True)}
    least = max(catalog.committed_steps(root), default=-1) if root else -1
    return choose(offers, run=channel.run, timeline=world.record.timeline, least=least)


def choose(
    offers: Mapping[str, Sequence[Spilled]],
    *,
    run: str,
    timeline: Sequence[Origin],
    least: int,
) -> list[RestorePoint]:
    """Return what can be restored of the nodes' ``offers``, the newest step first.

    Left out are steps before ``least``, and futures of ``run`` that were rolled back.
    """
    inventories = []
    for node, there in sorted(offers.items()):
        valid = [
            each
            for each in there
            if each.step >= least
            if each.run != run or on_timeline(each.generation, step=each.step, timeline=timeline)
        ]
        blocks = tuple(entry for each in valid for entry in each.blocks)
        worlds = {each.world.generation: each.world for each in valid}
        inventories.append(
            Inventory(
                node=node, worlds=tuple(worlds.values()), blocks=blocks, parities=(), sealed=blocks
            )
        )
    points, _ = restore_points(inventories)
    return sorted(points, key=lambda point: (point.step, point.world.generation), reverse=True)
