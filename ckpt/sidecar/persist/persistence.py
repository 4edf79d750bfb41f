"""Writing of protected snapshots to the store: packs by all sidecars, the commit by rank 0's node.

A failure here (a full disk, say) is reported and harms nothing else: the snapshot stays in memory
as long as any other. A checkpoint in progress when the generation changes, or when a sidecar is
killed, is carried over: every node tells the committing node which packs it has written and which
blocks it still holds, and lost blocks are rebuilt from parity. There is no other path.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Final

from holdfast.ckpt.events import (
    CheckpointCarried,
    CheckpointDone,
    CheckpointFailed,
    CheckpointProgress,
    CheckpointRetried,
    CheckpointSkipped,
    CheckpointStarted,
)
from holdfast.ckpt.memory.records import BlockEntry, RestorePoint, SnapshotWorld
from holdfast.ckpt.memory.target import CheckpointTarget
from holdfast.ckpt.sidecar.core.book import Snapshot, SnapshotKey, SnapshotPhase
from holdfast.ckpt.sidecar.core.core import Core, Op, Refusable
from holdfast.ckpt.sidecar.core.durable_note import Note
from holdfast.ckpt.sidecar.core.lease_page import LeasePage
from holdfast.ckpt.sidecar.core.messages import (
    Durable,
    OpenBlock,
    PendingCheckpoint,
    PendingCheckpoints,
    Persisted,
    PersistOrder,
    PersistProgress,
)
from holdfast.ckpt.sidecar.core.news import News
from holdfast.ckpt.sidecar.core.slots import Slot
from holdfast.ckpt.sidecar.parity.exchange import ParityExchange
from holdfast.ckpt.sidecar.persist import pending
from holdfast.ckpt.sidecar.persist.committer import Committer
from holdfast.ckpt.sidecar.persist.outcomes import Outcomes
from holdfast.ckpt.sidecar.persist.packing import Packing, words
from holdfast.ckpt.sidecar.persist.pending import CheckpointJob
from holdfast.ckpt.sidecar.persist.queue import BeginWriting, Complete, Decision, Queue, Skip
from holdfast.ckpt.sidecar.persist.save_on_stop import LateSave
from holdfast.ckpt.transport import Request
from holdfast.ckpt.types import Json

_log = logging.getLogger(__name__)

PROGRESS_S: Final = 2.0
"""The seconds between two progress messages of a node."""


class Persistence:
    """Checkpoints that are wanted, being written, or done; its state is guarded by the lock.

    ``rebuild(request, answer, refusable)`` rebuilds a lost block. Nothing is published past the
    time of ``lease``.
    """

    def __init__(
        self,
        core: Core,
        exchange: ParityExchange,
        *,
        rebuild: Callable[[OpenBlock, Callable[[Slot], None], Refusable], None],
        lease: LeasePage | None = None,
    ) -> None:
        self._core, self._exchange, self._rebuild = core, exchange, rebuild
        self._packing = Packing(
            core,
            lease=lease,
            written=self._written,
            committed=self._committed,
            progressed=self._progressed,
            retried=self._retried,
        )
        self._committer = Committer(core, exchange)
        self.news, self._outcomes = News(core), Outcomes(core)
        self._stage = 0
        self.late = LateSave(
            core,
            exchange,
            committer=self._committer,
            outcomes=self._outcomes,
            want=self._want_late,
            begin=self._begin_due,
        )
        self._note = Note(core.arena.directory, pending.NOTE)
        self._jobs: dict[SnapshotKey, CheckpointJob] = {}
        self._queue = Queue()
        self._unheard: set[str] = set()
        self._reports: dict[str, tuple[PendingCheckpoint, ...]] = {}
        self._waiting: list[CheckpointJob] = []
        self._carried: set[int] = set()
        for job in pending.load(self._note):
            self._jobs[job.key] = job

    def ops(self) -> dict[str, Op]:
        """Return the operations of this part."""
        return {
            "persisted": (Persisted, self._hear_persisted),
            "persist_progress": (PersistProgress, self._hear_progress),
            "persist_order": (PersistOrder, self._hear_order),
            "persist_pending": (PendingCheckpoints, self._hear_pending),
            "durable": (Durable, self._hear_durable),
            **self._outcomes.ops(),
            **self.late.ops(),
            **self.news.ops(),
        }

    def close(self) -> None:
        """Write no more; writes in progress end at their next piece."""
        self._packing.writer.close()

    def status(self) -> dict[str, Json]:
        """Return the finished checkpoints, those in progress, and the last error."""
        return {
            **self._outcomes.status(),
            "persist_priority": self._packing.writer.priority,
            "persist_pending": [
                {
                    "generation": job.key[0],
                    "step": job.step,
                    "due": job.due,
                    "begun": job.begun,
                    "written_bytes": job.group_bytes,
                    "total_bytes": job.total_bytes,
                }
                for job in self._jobs.values()
            ],
        }

    def want(self, entry: BlockEntry, target: CheckpointTarget) -> None:
        """Record that a block sealed here must be written once it is protected."""
        world = self._core.book.require(entry.generation)
        key = (entry.generation, entry.step)
        job = self._jobs.setdefault(key, CheckpointJob(world=world, step=entry.step, target=target))
        job.ranks.add(entry.rank)
        self._outcomes.try_again(entry.step)
        self._store()

    def _store(self) -> None:
        try:
            pending.store(self._note, self._jobs.values())
        except OSError as error:
            _log.warning(
                ("running checkpoints cannot be recorded, so a crash would lose them: %s"), error
            )

    # -- generations -----------------------------------------------------------------------------

    def adopted(self, world: SnapshotWorld, restore: RestorePoint | None) -> None:
        """Begin anew with what is not durable: tell who commits now."""
        if world.stage != self._stage:
            self._stage = world.stage
            self._outcomes.begin_stage()
        self._queue, self._waiting = Queue(), []
        self._carried.clear()
        for job in list(self._jobs.values()):
            self._carry(job, restore)
        report = PendingCheckpoints(
            sent_in=world.generation,
            node=self._core.node,
            checkpoints=tuple(job.pending() for job in self._jobs.values()),
        )
        self._reports, self._unheard = {}, set()
        if self._committer.is_here:
            self._unheard = {peer.node for peer in world.peers}
            self._take(report)
        else:
            self._committer.tell("persist_pending", report)

    def _carry(self, job: CheckpointJob, restore: RestorePoint | None) -> None:
        """Keep a checkpoint, if its snapshot was complete and was not rolled back."""
        snapshot = self._core.book.snapshots.get(job.key)
        job.due = job.due or (snapshot is not None and snapshot.phase is not SnapshotPhase.SEALING)
        job.begun = False
        if not job.due:
            self._drop(job)
        elif job.is_past(restore):
            self._pin(job)
        else:
            self._roll_back(job)

    def _roll_back(self, job: CheckpointJob) -> None:
        why = f"checkpoint of step {job.step}: given up, the snapshot was rolled back or lost"
        message = Durable(generation=job.key[0], step=job.step, error=why, given_up=True)
        self._end(message)
        self._announce(job, message)
        self._carry_out(self._queue.end(job.key))

    def _hear_pending(self, request: Request, body: PendingCheckpoints) -> None:
        self._core.book.require(body.sent_in)
        self._take(body)
        request.reply()

    def _take(self, body: PendingCheckpoints) -> None:
        if body.node not in self._unheard:
            return
        self._unheard.discard(body.node)
        self._reports[body.node] = body.checkpoints
        if self._unheard:
            return
        for job, lost in self._merged():
            self._jobs[job.key] = job
            self.news.add(CheckpointCarried(step=job.step, rebuilt=tuple(sorted(lost))))
            for rank in sorted(lost):
                self._recover(job, rank)
            ranks = len(job.world.rank_nodes)
            self._carry_out(self._queue.due(job.key, ranks=ranks, receipts=job.receipts))
        self._store()
        waiting, self._waiting = self._waiting, []
        for job in waiting:
            self._begin_due(job)

    def _merged(self) -> Iterable[tuple[CheckpointJob, set[int]]]:
        """Yield the checkpoints to carry over, oldest first, and the ranks with lost blocks."""
        reported = [each for checkpoints in self._reports.values() for each in checkpoints]
        for key in sorted({(each.world.generation, each.step) for each in reported}):
            parts = [
                CheckpointJob.of(each)
                for each in reported
                if (each.world.generation, each.step) == key
            ]
            job = self._jobs.get(key, parts[0])
            covered = {rank for part in parts for rank in part.ranks}
            for part in parts:
                job.receipts |= part.receipts
                job.total_bytes = max(job.total_bytes, part.total_bytes)
            yield job, set(range(len(job.world.rank_nodes))) - covered - set(job.receipts)

    def _recover(self, job: CheckpointJob, rank: int) -> None:
        """Rebuild a block that no living node has, and write it from here."""
        job.ranks.add(rank)
        if self._core.slots.holding((*job.key, rank)) is not None:
            self._pin(job)
            return
        job.busy.add(rank)

        def have(slot: Slot) -> None:
            job.busy.discard(rank)
            if not job.over:
                self._pin_slot(job, rank, slot)
            if self._queue.active == job.key:
                self._start(job)

        body = OpenBlock(world=job.world, step=job.step, rank=rank, rebuilt=True)
        self._rebuild(body, have, _Recovery(lambda error: self._not_recovered(job, rank, error)))

    def _not_recovered(self, job: CheckpointJob, rank: int, error: Exception) -> None:
        if job.over:
            return
        why = (
            f"checkpoint of step {job.step}: given up, the block of rank {rank} was lost with its "
            f"node: {error}"
        )
        self._report(job.key, error=why, given_up=True)

    # -- beginning -------------------------------------------------------------------------------

    def protected(self, snapshot: Snapshot) -> None:
        """Begin the checkpoint of a snapshot, where one is wanted."""
        if (job := self._jobs.get(snapshot.key)) is None or job.due:
            return
        job.due = True
        job.total_bytes = sum(entry.payload_bytes for entry in snapshot.entries.values())
        self._pin(job)
        self._store()
        if self._committer.is_here and self._unheard:
            self._waiting.append(job)
        elif self._committer.is_here:
            self._begin_due(job)

    def _begin_due(self, job: CheckpointJob) -> None:
        if job.over:
            return
        ranks = len(job.world.rank_nodes)
        self._carry_out(self._queue.due(job.key, ranks=ranks, receipts=job.receipts))

    def _pin(self, job: CheckpointJob) -> None:
        """Pin the blocks that are still to be written, so that they survive a release."""
        for rank in job.ranks - set(job.receipts) - set(job.slots) - job.busy:
            slot = self._core.slots.holding((*job.key, rank))
            if slot is not None:
                self._pin_slot(job, rank, slot)

    def _pin_slot(self, job: CheckpointJob, rank: int, slot: Slot) -> None:
        self._core.slots.pin(slot)
        slot.persisting += 1
        job.slots[rank] = slot

    def _base(self, target: CheckpointTarget) -> int | None:
        durable = self._outcomes.durable
        return durable if target.incremental and durable >= 0 else None

    def _unpin(self, job: CheckpointJob, rank: int) -> None:
        slot = job.slots.pop(rank)
        slot.persisting -= 1
        self._core.unpin(slot)

    def released(self, key: SnapshotKey) -> None:
        """Give up the checkpoint of a snapshot that was abandoned or rolled back."""
        if (job := self._jobs.get(key)) is None:
            return
        book = self._core.book
        if not job.due:  # a rank gave it up
            self._drop(job)
        elif book.newest(SnapshotPhase.PROTECTED, generation=book.generation) < 0:
            self._roll_back(job)  # not superseded: the ranks continued from an older step

    def _carry_out(self, decisions: list[Decision]) -> None:
        for each in decisions:
            match each:
                case BeginWriting(key=key) if key[1] in self._carried:
                    self._report(key, error=None)  # the generation began with this very state
                case BeginWriting(key=key):
                    self._clear_before(key)
                    self._order(key, begin=True)
                case Skip(key=key, newer=newer):
                    self.news.add(
                        CheckpointSkipped(
                            step=key[1],
                            reason=f"the store was still busy when step {newer[1]} was due",
                        )
                    )
                    self._order(key, begin=False)
                case Complete(key=key, receipts=receipts):
                    if (job := self._jobs.get(key)) is not None:
                        self._packing.commit(job, receipts)

    def _clear_before(self, key: SnapshotKey) -> None:
        """Make room: of a failed checkpoint some packs may lie on the store."""
        if (steps := self._outcomes.take_remains()) and (job := self._jobs.get(key)) is not None:
            self._packing.clear(job, steps)

    def _order(self, key: SnapshotKey, *, begin: bool) -> None:
        generation = self._core.book.generation
        order = PersistOrder(sent_in=generation, generation=key[0], step=key[1], begin=begin)
        self._exchange.tell_all("persist_order", order)
        self._follow(order)

    def _hear_order(self, request: Request, body: PersistOrder) -> None:
        self._core.book.require(body.sent_in)
        self._follow(body)
        request.reply()

    def _follow(self, order: PersistOrder) -> None:
        if (job := self._jobs.get((order.generation, order.step))) is None:
            return
        if not order.begin:
            self._outcomes.skip(job.step)
            self._drop(job)
            return
        if not job.begun:
            job.begun = True
            job.began_s = job.told_s = monotonic()
            if self._committer.is_here:
                self.news.add(CheckpointStarted(step=job.step, bytes=job.total_bytes))
        for rank in job.ranks & set(job.receipts):  # written before the committing node changed
            self._send_persisted(job, rank, receipt=job.receipts[rank])
        self._pin(job)
        self._start(job)

    def _start(self, job: CheckpointJob) -> None:
        """Write every block that is not written yet."""
        for rank in sorted(job.ranks - set(job.receipts) - job.busy):
            if (slot := job.slots.get(rank)) is None:
                why = f"the block of rank {rank} was released before it could be written"
                self._send_persisted(job, rank, error=words(why, job))
                continue
            job.busy.add(rank)
            self._packing.write(job, rank, slot, base=self._base(job.target))

    def _want_late(self, job: CheckpointJob) -> CheckpointJob:
        job = self._jobs.setdefault(job.key, job)
        job.due = True
        self._pin(job)
        return job

    # -- written ---------------------------------------------------------------------------------

    def _written(self, job: CheckpointJob, rank: int, receipt: Json, failed: str | None) -> None:
        job.busy.discard(rank)
        if rank in job.slots and (job.over or failed is None):
            self._unpin(job, rank)
        if job.over or self._packing.writer.closed:
            return
        if failed is None:
            job.receipts[rank] = receipt
            self._store()
        self._send_persisted(job, rank, receipt=receipt, error=failed)

    # -- messages to the committing node ---------------------------------------------------------

    def _send_persisted(
        self, job: CheckpointJob, rank: int, *, receipt: Json = None, error: str | None = None
    ) -> None:
        message = self._committer.persisted(job, rank, receipt=receipt, error=error)
        if self._committer.is_here:
            self._collect(message)
        else:
            self._committer.tell("persisted", message)

    def _retried(self, job: CheckpointJob, attempt: int, error: str) -> None:
        self.news.add(CheckpointRetried(step=job.step, attempt=attempt, error=error))

    def _progressed(self, job: CheckpointJob) -> None:
        if (now_s := monotonic()) - job.told_s >= PROGRESS_S:
            job.told_s = now_s
            with self._core.lock:
                self._tell_progress(job)

    def _tell_progress(self, job: CheckpointJob) -> None:
        if self._committer.is_here:
            self.news.add(
                CheckpointProgress(
                    step=job.step, bytes=job.group_bytes, total_bytes=job.total_bytes
                )
            )
            return
        self._committer.tell("persist_progress", self._committer.progress(job))

    # -- committing ------------------------------------------------------------------------------

    def _hear_progress(self, request: Request, body: PersistProgress) -> None:
        if (job := self._jobs.get((body.generation, body.step))) is not None:
            job.others_bytes[body.node] = body.written_bytes
        request.reply()

    def _hear_persisted(self, request: Request, body: Persisted) -> None:
        self._core.book.require(body.sent_in)
        self._collect(body)
        request.reply()

    def _collect(self, message: Persisted) -> None:
        key = (message.generation, message.step)
        if (job := self._jobs.get(key)) is None:
            return
        if message.error is not None:
            self._report(key, error=message.error)
            return
        job.receipts[message.rank] = message.receipt
        self._carry_out(self._queue.receive(key, message.rank, message.receipt))

    def _committed(self, job: CheckpointJob, error: str | None) -> None:
        if not job.over and not self._packing.writer.closed:
            self._report(job.key, error=error)

    def _report(self, key: SnapshotKey, *, error: str | None, given_up: bool = False) -> None:
        """Record the outcome, tell the group, add the event, and begin the next checkpoint."""
        job = self._jobs.get(key)
        message = Durable(generation=key[0], step=key[1], error=error, given_up=given_up)
        self._end(message)
        self._exchange.tell_all("durable", message)
        if job is not None:
            self._announce(job, message)
        self._carry_out(self._queue.end(key))
        self._core.changed()

    def _announce(self, job: CheckpointJob, message: Durable) -> None:
        seconds = monotonic() - job.began_s
        if message.error is None:
            rate = job.total_bytes / seconds if seconds > 0 else 0.0
            self.news.add(
                CheckpointDone(
                    step=job.step,
                    seconds=round(seconds, 3),
                    bytes=job.total_bytes,
                    bytes_per_s=round(rate),
                )
            )
            return
        self.news.add(
            CheckpointFailed(
                step=job.step,
                error=message.error,
                in_a_row=self._outcomes.failed_in_a_row,
                fatal=self._outcomes.is_fatal(message, job.target),
                newest=self._outcomes.durable,
            )
        )

    def _hear_durable(self, request: Request, body: Durable) -> None:
        self._end(body)
        self._core.changed()
        request.reply()

    def _end(self, message: Durable) -> None:
        """Record how a checkpoint ended, and release its blocks."""
        self._outcomes.note(message)
        if message.error is None and message.generation < self._core.book.generation:
            self._carried.add(message.step)
        if (job := self._jobs.get((message.generation, message.step))) is not None:
            self._drop(job)

    def _drop(self, job: CheckpointJob) -> None:
        """Release a checkpoint; a thread that is writing a block releases that one itself."""
        job.over = True
        self._jobs.pop(job.key, None)
        for rank in set(job.slots) - job.busy:
            self._unpin(job, rank)
        self._store()


class _Recovery:
    """Stands for the request of a rebuild that this node itself starts."""

    def __init__(self, refused: Callable[[Exception], None]) -> None:
        self._refused = refused

    def refuse(self, error: Exception) -> None:
        """Handle the error."""
        self._refused(error)
