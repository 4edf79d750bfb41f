"""Restore of the state at a generation's start: from memory, disk, a checkpoint, or not at all.

All ranks use the same source. A rank that finds a faulty block tells the others. Each rank then
computes the same next attempt (`holdfast.ckpt.recovery.fallback`) inside the same generation. Every
attempt overwrites everything that the previous one may have written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from holdfast.ckpt.checkpoints import catalog
from holdfast.ckpt.checkpoints.source import StoreSource
from holdfast.ckpt.closing import Closing
from holdfast.ckpt.errors import (
    CapacityError,
    CkptError,
    CorruptError,
    NotFoundError,
    PeerError,
    StoreError,
)
from holdfast.ckpt.memory.maps import SlotMaps
from holdfast.ckpt.memory.records import RestorePoint
from holdfast.ckpt.memory.target import DiskTarget
from holdfast.ckpt.recovery import fallback
from holdfast.ckpt.recovery.fallback import Course, ReadFault
from holdfast.ckpt.recovery.memory_source import TIERS, MemorySource
from holdfast.ckpt.recovery.prefetched import Ahead
from holdfast.ckpt.sidecar.client import SidecarClient
from holdfast.ckpt.state.flatten import flatten
from holdfast.ckpt.state.restore import RestoreReport, ShardSource, live_keys, restore
from holdfast.ckpt.state.trees.per_rank import Inheritance
from holdfast.ckpt.store.places import open_store
from holdfast.elastic.channel.base import Channel
from holdfast.elastic.errors import JobFailedError, StateLostError
from holdfast.elastic.events import RestoreFailed
from holdfast.elastic.groups.reform import GenerationWorld
from holdfast.elastic.tracked.opening import Opening
from holdfast.elastic.tracked.spilled import spilled_points

_log = logging.getLogger(__name__)

_PROBE = ".writable"
_ADOPT_LIMIT_S = 3.0
_ADOPT_POLL_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """The source of the restored state: its ``step``, and the farthest ``tier`` of its bytes.

    ``tier`` is ``arena``, ``prefetched``, ``peer``, ``parity``, ``disk``, ``checkpoint`` or
    ``none``; ``tiers`` gives the bytes of each tier and the seconds that threads spent on them.
    ``sent_bytes`` were sent by sidecars while the other ranks waited. ``ranks`` says what became
    of per-rank values.
    """

    tier: str
    how: str
    step: int
    bytes: int = 0
    sent_bytes: int = 0
    tiers: dict[str, dict[str, float]] = field(default_factory=dict)
    ranks: Inheritance = field(default_factory=Inheritance)


class Restorer(Closing):
    """Restores one rank's part of the state, in step with all other ranks."""

    def __init__(
        self,
        channel: Channel,
        world: GenerationWorld,
        *,
        client: SidecarClient,
        maps: SlotMaps,
        ahead: Ahead | None = None,
        disk: DiskTarget | None = None,
    ) -> None:
        self._channel, self._world, self._client, self._maps = channel, world, client, maps
        self._addresses = {peer.node: peer.address for peer in world.record.snapshots.peers}
        self._disk, self._ahead = disk, ahead
        self._touched = False
        self._down_to = -1
        self._elsewhere: list[str] = []
        self._opening: Opening | None = None

    def open_ahead(self) -> None:
        """Begin to open the blocks of the first attempt; `restore` uses them."""
        if (point := self._first().point) is not None and self._opening is None:
            self._opening = Opening(self._source(point))

    def close(self) -> None:
        """Release the blocks that were opened but not used, and the prefetched chunks."""
        opening, self._opening, self._ahead = self._opening, None, None
        if opening is not None:
            opening.close()

    def restore(self, state: Mapping[str, Any], *, root: str | None) -> Restored:
        """Overwrite ``state`` with the newest readable restore point; collective.

        Raises ``StateLostError`` if an attempt may have changed the state and no restore point is
        left, ``JobFailedError`` if there are checkpoints and none of them can be read.
        """
        if self._world.record.mesh.pp > 1:
            live = live_keys(flatten(state, rank=self._world.rank))
            self._elsewhere = self._world.unite(sorted(live))
        course = self._first()
        while course.point is not None:
            restored, faults = self._attempt(state, course.point)
            faults = self._agree(faults)
            if restored is not None and not faults:
                self._settle(course.point)
                how = f"{course.why}: {restored.how}" if course.why else restored.how
                return dataclasses.replace(restored, how=how)
            failed, course = course.point, fallback.next_course(course, faults)
            self._tell(failed, course)
        return self._without_memory(state, course, root=root)

    # -- from memory -----------------------------------------------------------------------------

    def _first(self) -> Course:
        record = self._world.record
        return fallback.first_course(record.restore, record.fallbacks, nodes=self._addresses)

    def _source(self, point: RestorePoint) -> MemorySource:
        return MemorySource(
            point,
            local=self._client,
            local_node=self._channel.node,
            addresses=self._addresses,
            key=self._channel.key,
            maps=self._maps,
            ahead=self._ahead,
            poll=self._world.guard.check,
            cores=self._cores(),
        )

    def _open(self, point: RestorePoint) -> MemorySource:
        """Return a source; its blocks are open already if that began ahead."""
        opening, self._opening = self._opening, None
        if opening is not None and (source := opening.take()) is not None:
            if source.point == point:
                return source
            source.close()
        return self._source(point)

    def _attempt(
        self, state: Mapping[str, Any], point: RestorePoint
    ) -> tuple[Restored | None, list[ReadFault]]:
        """Restore from ``point``; return the result, and the faults found."""
        with self._open(point) as memory:
            try:
                report = self._fill(state, memory)
            except (CapacityError, CorruptError, NotFoundError, PeerError) as error:
                self._world.guard.check()
                self._touched |= memory.touched
                memory.distrust()
                faults = memory.faults_of(error)
                _log.warning("step %d cannot be restored: %s", point.step, error)
                return None, faults
            self._touched |= memory.touched
            tiers = memory.tiers()
            used = [tier for tier in TIERS if tiers.get(tier, {}).get("bytes")]
            restored = Restored(
                tier=used[-1] if used else TIERS[0],
                how=memory.how,
                step=report.step,
                bytes=report.bytes,
                sent_bytes=memory.sent_bytes,
                tiers=tiers,
                ranks=report.ranks,
            )
            return restored, []

    def _cores(self) -> int:
        """Return this rank's share of the node's cores; all its ranks restore at once."""
        ranks = self._world.record.snapshots.rank_nodes.count(self._channel.node)
        return max(1, len(os.sched_getaffinity(0)) // max(ranks, 1))

    def _fill(self, state: Mapping[str, Any], source: ShardSource) -> RestoreReport:
        """Restore this rank's part; it excludes state that belongs to other pipeline stages."""
        return restore(
            state,
            source,
            rank=self._world.rank,
            world_size=self._world.size,
            elsewhere=self._elsewhere,
        )

    def _agree(self, faults: list[ReadFault]) -> list[ReadFault]:
        """Return the faults found by any rank; note whether any rank's state was touched."""
        said = self._world.gather([msgspec.to_builtins(faults), self._touched])
        self._touched = any(touched for _, touched in said)
        return [msgspec.convert(fault, ReadFault) for theirs, _ in said for fault in theirs]

    def _tell(self, failed: RestorePoint, course: Course) -> None:
        """Record the decision, once for all ranks."""
        if self._world.rank == 0:
            now = course.point
            self._channel.emit(
                RestoreFailed(
                    generation=self._world.generation,
                    step=failed.step,
                    of=failed.world.generation,
                    reason=course.reasons[-1],
                    next_step=now.step if now else None,
                    next=course.why,
                )
            )

    def _settle(self, point: RestorePoint | None) -> None:
        """Make the sidecars drop snapshots newer than the point that was actually restored.

        Those belong to an abandoned timeline; no later generation may restore them.
        """
        planned, world = self._world.record.restore, self._world.record.snapshots
        if self._world.rank or planned is None or _key(point) == _key(planned):
            return
        for peer in world.peers:
            client = SidecarClient(peer.address, self._channel.key)
            try:
                with contextlib.suppress(CkptError):  # an unreachable sidecar leaves the group soon
                    self._roll_back(client, point)
            finally:
                client.close()

    def _roll_back(self, client: SidecarClient, point: RestorePoint | None) -> None:
        deadline_s = time.monotonic() + _ADOPT_LIMIT_S
        while True:
            try:
                return client.roll_back(self._world.generation, restore=point)
            except NotFoundError:  # its agent has not yet told it of this generation
                if time.monotonic() > deadline_s:
                    raise
            self._world.guard.check()
            time.sleep(_ADOPT_POLL_S)

    # -- without memory --------------------------------------------------------------------------

    def _without_memory(
        self, state: Mapping[str, Any], course: Course, *, root: str | None
    ) -> Restored:
        self._settle(None)
        if (spilled := self._from_disk(state, root)) is not None:
            return spilled
        found = self._from_checkpoint(state, root, course) if root else None
        if found is not None:
            return found
        why = f"{course.why}: " if course.reasons else ""
        if self._touched:
            raise StateLostError(
                f"{why}there is no checkpoint; training starts anew ({'; '.join(course.reasons)})"
            )
        return Restored(tier="none", how=f"{why}nothing to restore", step=0)

    def _from_disk(
        self, state: Mapping[str, Any], root: str | None, *, least: int | None = None
    ) -> Restored | None:
        """Restore the newest snapshot on the nodes' disks that can be read, of ``least`` or later.

        By default ``least`` is the newest checkpoint. Blocks that cannot be read are rebuilt from
        parity.
        """
        if self._disk is None or (least is not None and least >= self._down_to):
            return None
        points, self._down_to = spilled_points(
            self._channel, self._world, self._disk, root=root, least=least
        )
        course = fallback.first_course(
            points[0] if points else None, points[1:], nodes=self._addresses
        )
        while course.point is not None:
            restored, faults = self._attempt(state, course.point)
            faults = self._agree(faults)
            if restored is not None and not faults:
                return restored
            course = fallback.next_course(course, faults)
        return None

    def _from_checkpoint(
        self, state: Mapping[str, Any], root: str, course: Course
    ) -> Restored | None:
        """Restore the newest checkpoint that all ranks can read; None if there is none.

        If newer ones are there but cannot be read, a snapshot on the nodes' disks comes first that
        is at least as new as the next.
        """
        candidates: Iterator[int] = iter(())
        if self._world.rank == 0:
            probe(root)
            candidates = catalog.verified(root)
        failed = ""
        while True:
            began_s = time.perf_counter()
            step, damage = self._agree_on(candidates, root)
            lower = -1 if step is None else step
            if (spilled := self._from_disk(state, root, least=lower)) is not None:
                return spilled
            if damage:
                raise JobFailedError(damage)
            if step is None:
                if failed:
                    before = "".join(f"; {reason}" for reason in course.reasons)
                    raise JobFailedError(
                        f"{root}: no checkpoint can be read in full: {failed}{before}; bring back "
                        "a good one, or choose another directory"
                    )
                return None
            error, report = "", None
            try:
                with StoreSource(root, step) as store:
                    report = self._fill(state, store)
            except (CorruptError, NotFoundError) as lost:
                error = str(lost)
            errors = [found for found in self._world.gather(error) if found]
            if report is not None and not errors:
                seconds = time.perf_counter() - began_s
                why = f"{course.why}: " if course.reasons else ""
                return Restored(
                    tier="checkpoint",
                    how=f"{why}{root}, step {step}",
                    step=report.step,
                    bytes=report.bytes,
                    tiers={"checkpoint": {"bytes": report.bytes, "seconds": seconds}},
                    ranks=report.ranks,
                )
            failed = errors[0]
            _log.warning("step %d cannot be read, trying another one: %s", step, failed)

    def _agree_on(self, candidates: Iterator[int], root: str) -> tuple[int | None, str]:
        """Return rank 0's next candidate on all ranks, or why none can be trusted; collective."""
        step, damage = None, ""
        if self._world.rank == 0:
            try:
                step = self._world.guard.call(
                    lambda: next(candidates, None), name="find-checkpoint"
                )
            except CorruptError as error:
                damage = f"{root}: no checkpoint can be trusted: {error}"
        chosen: tuple[int | None, str] = self._world.gather((step, damage))[0]
        return chosen


def _key(point: RestorePoint | None) -> tuple[int, int] | None:
    return (point.world.generation, point.step) if point else None


def probe(root: str) -> None:
    """Write to the checkpoint root and clean up, to fail now and not at the first checkpoint.

    Raises ``StoreError`` for every failure that a retry cannot fix.
    """
    try:
        store = open_store(root)
        store.write(_PROBE, [b"writable\n"])
        store.delete([_PROBE])
    except NotFoundError as error:
        raise StoreError(f"checkpoints cannot be written: {error}") from error
