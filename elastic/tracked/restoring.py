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
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

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
from holdfast.ckpt.state.restore import RestoreReport, live_keys, restore
from holdfast.ckpt.state.saved import ShardSource
from holdfast.elastic.channel.base import Channel
from holdfast.elastic.errors import StateLostError
from holdfast.elastic.events import RestoreFailed
from holdfast.elastic.groups.reform import GenerationWorld
from holdfast.elastic.membership.records import Origin
from holdfast.elastic.neighbors.marks import ApproximateMark
from holdfast.elastic.tracked.sources.opening import Opening
from holdfast.elastic.tracked.sources.replacing import Replacing
from holdfast.elastic.tracked.sources.restored import Restored
from holdfast.elastic.tracked.sources.spilled import spilled_points
from holdfast.elastic.tracked.sources.stored import StoredCheckpoints

_log = logging.getLogger(__name__)

_ADOPT_LIMIT_S = 3.0
_ADOPT_POLL_S = 0.01


class Restorer(Closing):
    """Restores one rank's part of the state, in step with all other ranks.

    ``replacing`` sets lost stages from others, None if the run does not want that.
    """

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
        self._down_to = self._sought_above = sys.maxsize
        self._elsewhere: list[str] = []
        self._opening: Opening | None = None
        self.replacing: Replacing | None = None

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
        left, ``JobFailedError`` if there are checkpoints and none of them can be read,
        ``StoreError`` if the store refuses the first generation of a job.
        """
        if self._world.record.mesh.pp > 1:
            live = live_keys(flatten(state, rank=self._world.rank))
            self._elsewhere = self._world.unite(sorted(live))
        course = self._first()
        while course.point is not None:
            if (newer := self._newer(state, course.point, root=root)) is not None:
                return newer
            if (near := self._near(state, course.point, root=root)) is not None:
                return near
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
                report, mark = self._filled(state, memory)
            except (CapacityError, CorruptError, NotFoundError, PeerError, StoreError) as error:
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
                how=f"{memory.how}; {mark.origins}" if mark else memory.how,
                step=report.step,
                bytes=report.bytes,
                sent_bytes=memory.sent_bytes,
                tiers=tiers,
                ranks=report.ranks,
                mark=mark,
            )
            return restored, []

    def _cores(self) -> int:
        """Return this rank's share of the node's cores; all its ranks restore at once."""
        ranks = self._world.record.snapshots.rank_nodes.count(self._channel.node)
        return max(1, len(os.sched_getaffinity(0)) // max(ranks, 1))

    def _filled(
        self, state: Mapping[str, Any], memory: MemorySource
    ) -> tuple[RestoreReport, ApproximateMark | None]:
        """Restore this rank's part; stages that the point does without are set from others."""
        if not memory.point.lost:
            return self._fill(state, memory), None
        if self.replacing is None:
            raise CorruptError(f"{memory.origin}: stages are lost; use another restore point")
        return self.replacing.fill(
            state, memory, elsewhere=self._elsewhere, generation=self._world.generation
        )

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

    # -- from the store and from disks -----------------------------------------------------------

    def _newer(
        self, state: Mapping[str, Any], point: RestorePoint, *, root: str | None
    ) -> Restored | None:
        """Restore a checkpoint or a spilled snapshot newer than ``point``; None if there is none.

        Memory as a rule has the newest step, and then nothing is looked for: a store takes its
        time. It may not if it lost the newest generation's snapshots, or if their blocks turn out
        to be damaged.
        """
        record = self._world.record
        timeline = record.before
        if not timeline and record.restore is not None and point.step < record.restore.step:
            timeline = record.timeline
        if not timeline or point.step >= self._sought_above:
            return None
        self._sought_above = point.step
        why = f"newer than step {point.step} of generation {point.world.generation} in memory"
        return self._after(state, point.step, root=root, timeline=timeline, why=why)

    def _near(
        self, state: Mapping[str, Any], point: RestorePoint, *, root: str | None
    ) -> Restored | None:
        """Restore a checkpoint or a spilled snapshot that is hardly older than ``point``.

        Only where the point does without stages: then it is better to go back a few steps.
        """
        if not point.lost or self.replacing is None:
            return None
        beyond, timeline = self.replacing.beyond, self._world.record.timeline
        why = f"instead of step {point.step}, of which stages are lost: at most {beyond} steps back"
        return self._after(state, point.step - beyond - 1, root=root, timeline=timeline, why=why)

    def _after(
        self,
        state: Mapping[str, Any],
        step: int,
        *,
        root: str | None,
        timeline: Sequence[Origin],
        why: str,
    ) -> Restored | None:
        """Restore the newest step after ``step`` in the store or on disks, None for none."""
        if root is None:
            newer = self._from_disk(state, step + 1, root=None, timeline=timeline)
        else:
            stored = self._stored(state, root, timeline=timeline)
            newer = stored.newer(step, timeline=timeline)
            self._touched |= stored.touched
        if newer is None:
            return None
        self._settle(None)
        return dataclasses.replace(newer, how=f"{newer.how}: {why}")

    def _without_memory(
        self, state: Mapping[str, Any], course: Course, *, root: str | None
    ) -> Restored:
        self._settle(None)
        why = f"{course.why}: " if course.reasons else ""
        if root is None:
            found = self._from_disk(state, -1, root=None)
        else:
            stored = self._stored(state, root)
            found = stored.newest(course.reasons)
            self._touched |= stored.touched
        if found is not None:
            is_stored = found.tier == "checkpoint"
            return dataclasses.replace(found, how=f"{why}{found.how}") if is_stored else found
        if self._touched:
            raise StateLostError(
                f"{why}there is no checkpoint; training starts anew ({'; '.join(course.reasons)})"
            )
        return Restored(tier="none", how=f"{why}nothing to restore", step=0)

    def _stored(
        self, state: Mapping[str, Any], root: str, *, timeline: Sequence[Origin] | None = None
    ) -> StoredCheckpoints:
        return StoredCheckpoints(
            root,
            run=self._channel.run,
            world=self._world,
            fill=lambda source: self._fill(state, source),
            tell=self._channel.emit,
            spilled=lambda least: self._from_disk(state, least, root=root, timeline=timeline),
        )

    def _from_disk(
        self,
        state: Mapping[str, Any],
        least: int,
        *,
        root: str | None,
        timeline: Sequence[Origin] | None = None,
    ) -> Restored | None:
        """Restore the newest snapshot on the nodes' disks that can be read, of ``least`` or later.

        Blocks that cannot be read are rebuilt from parity. The disks are asked once for a step.
        """
        if self._disk is None or least >= self._down_to:
            return None
        self._down_to = least
        points = spilled_points(
            self._channel,
            self._world,
            self._disk,
            root=root,
            least=least,
            timeline=self._world.record.timeline if timeline is None else timeline,
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


def _key(point: RestorePoint | None) -> tuple[int, int] | None:
    return (point.world.generation, point.step) if point else None
