"""Finds the snapshots that nodes spilled to their own disks, when memory has no restore point."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import msgspec

from holdfast.ckpt.errors import CkptError
from holdfast.ckpt.memory.records import Inventory, RestorePoint
from holdfast.ckpt.memory.target import DiskTarget
from holdfast.ckpt.parity.stripes import restore_points
from holdfast.ckpt.sidecar.client import SidecarClient
from holdfast.ckpt.sidecar.core.messages import Spilled
from holdfast.elastic.channel.base import Channel
from holdfast.elastic.events import DiskRefused
from holdfast.elastic.groups.reform import GenerationWorld
from holdfast.elastic.membership.records import Origin
from holdfast.elastic.planning.plan import on_timeline

_log = logging.getLogger(__name__)
_ASKED_AT_ONCE: Final = 16


def spilled_points(
    channel: Channel,
    world: GenerationWorld,
    disk: DiskTarget,
    *,
    root: str | None,
    least: int,
    timeline: Sequence[Origin],
) -> list[RestorePoint]:
    """Return the snapshots on the nodes' disks that can be restored, the newest step first.

    Snapshots before step ``least`` are left out, and those that a roll-back in the ``timeline``
    abandoned. Collective: rank 0 asks all sidecars, which verify their files. The event
    ``disk_refused`` reports a snapshot that is on too few disks, with the missing parts and the
    newest checkpoint.
    """
    found: list[RestorePoint] = []
    if world.rank == 0:
        found = world.guard.call(
            lambda: _ask(channel, world, disk, root, least=least, timeline=timeline),
            name="find-spilled",
        )
    points = world.gather([msgspec.to_builtins(point) for point in found])[0]
    return [msgspec.convert(point, RestorePoint) for point in points]


def _ask(
    channel: Channel,
    world: GenerationWorld,
    disk: DiskTarget,
    root: str | None,
    *,
    least: int,
    timeline: Sequence[Origin],
) -> list[RestorePoint]:
    def ask(address: str) -> list[Spilled]:
        client = SidecarClient(address, channel.key)
        try:
            return client.spilled(disk)
        except CkptError:
            return []  # a sidecar that does not answer offers nothing
        finally:
            client.close()

    peers = world.record.snapshots.peers
    with ThreadPoolExecutor(_ASKED_AT_ONCE, thread_name_prefix="spilled") as pool:
        answers = pool.map(ask, [peer.address for peer in peers])
        offers = {peer.node: answer for peer, answer in zip(peers, answers, strict=True)}
    choice = choose(offers, run=channel.run, timeline=timeline, least=least)
    if choice.refused is not None:
        newest = f"step {least} in {root}" if least >= 0 else "there is none"
        reason = f"{choice.reason}; the newest checkpoint: {newest}"
        _log.warning("the nodes' disks: %s", reason)
        channel.emit(DiskRefused(step=choice.refused, reason=reason, newest_checkpoint=least))
    return list(choice.points)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The restorable snapshots, the newest step first.

    ``refused`` is the newest step that is on some disks and newer than these, None if there is
    none; ``reason`` says what it lacks.
    """

    points: tuple[RestorePoint, ...]
    refused: int | None
    reason: str


def choose(
    offers: Mapping[str, Sequence[Spilled]],
    *,
    run: str,
    timeline: Sequence[Origin],
    least: int,
) -> Choice:
    """Return the restorable snapshots among the nodes' ``offers``.

    Leaves out steps before ``least``, and steps of ``run`` that a roll-back abandoned.
    """
    inventories = []
    for node, there in sorted(offers.items()):
        valid = [
            each
            for each in there
            if each.step >= least
            if each.run != run or on_timeline(each.generation, step=each.step, timeline=timeline)
        ]
        worlds = {each.world.generation: each.world for each in valid}
        inventories.append(
            Inventory(
                node=node,
                worlds=tuple(worlds.values()),
                blocks=tuple(entry for each in valid for entry in each.blocks),
                parities=tuple(entry for each in valid for entry in each.parities),
                sealed=tuple(entry for each in valid for entry in each.sealed),
            )
        )
    points, _ = restore_points(inventories)
    points.sort(key=lambda point: (point.step, point.world.generation), reverse=True)
    newest = points[0].step if points else -1
    on_disks = {entry.step for each in inventories for entry in each.sealed}
    refused = max((step for step in on_disks if step > newest), default=None)
    reason = "" if refused is None else _why_not(inventories, refused)
    return Choice(points=tuple(points), refused=refused, reason=reason)


def _why_not(inventories: Sequence[Inventory], step: int) -> str:
    """Return why a step cannot be restored, as a readable phrase."""
    alone = [
        msgspec.structs.replace(
            each,
            blocks=tuple(entry for entry in each.blocks if entry.step == step),
            parities=tuple(entry for entry in each.parities if entry.step == step),
            sealed=tuple(entry for entry in each.sealed if entry.step == step),
        )
        for each in inventories
    ]
    _, reason = restore_points(alone)
    return f"step {step} cannot be restored: {reason.partition('cannot be restored: ')[2]}"
