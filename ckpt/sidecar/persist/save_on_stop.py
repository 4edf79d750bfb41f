"""The save of the newest protected step: when a job is stopped, or was left inside a step."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.ckpt.memory.target import CheckpointTarget
from holdfast.ckpt.sidecar.core.book import SnapshotPhase
from holdfast.ckpt.sidecar.core.core import Core, Op, WaitingWork
from holdfast.ckpt.sidecar.core.messages import PersistLate, PersistTo
from holdfast.ckpt.sidecar.parity.exchange import ParityExchange
from holdfast.ckpt.sidecar.persist.committer import Committer
from holdfast.ckpt.sidecar.persist.outcomes import Outcomes
from holdfast.ckpt.sidecar.persist.pending import CheckpointJob
from holdfast.ckpt.transport import Request


class LateSave:
    """Saves the newest protected step when the job is stopped. Used under the lock.

    The committing node chooses the step; ``begin(job)`` has it written there, as any other.
    ``want(job)`` registers the checkpoint, at every node.
    """

    def __init__(
        self,
        core: Core,
        exchange: ParityExchange,
        *,
        committer: Committer,
        outcomes: Outcomes,
        want: Callable[[CheckpointJob], CheckpointJob],
        begin: Callable[[CheckpointJob], None],
    ) -> None:
        self._core, self._exchange = core, exchange
        self._committer, self._outcomes = committer, outcomes
        self._want, self._begin = want, begin
        self._target: CheckpointTarget | None = None
        self._step: int | None = None

    def ops(self) -> dict[str, Op]:
        """Return the operations of this part."""
        return {
            "persist_to": (PersistTo, self._hear_target),
            "persist_late": (PersistLate, self._hear_late),
        }

    def save_newest(self) -> float:
        """Begin to save the newest protected step; return how many seconds to wait for it."""
        book, target = self._core.book, self._target
        if target is None:
            return 0.0
        step = book.newest(SnapshotPhase.PROTECTED, generation=book.generation)
        if self._committer.is_here and step > self._outcomes.durable:
            late = PersistLate(
                sent_in=book.generation, generation=book.generation, step=step, target=target
            )
            self._exchange.tell_all("persist_late", late)
            self._begin(self._take(late))
        elif self._committer.is_here:
            self._step = step
        return target.grace_s

    def has_saved(self) -> bool:
        """Return whether nothing is left to wait for."""
        step, outcomes = self._step, self._outcomes
        return step is not None and (step <= outcomes.durable or outcomes.has_failed(step))

    def _hear_target(self, request: Request, body: PersistTo) -> None:
        before, self._target = self._target, body.target
        self._core.submit(None, _prepare, kind=WaitingWork.STORE)
        if body.now:
            self.save_newest()
            self._target = before
        request.reply()

    def _hear_late(self, request: Request, body: PersistLate) -> None:
        self._core.book.require(body.sent_in)
        self._take(body)
        request.reply()

    def _take(self, late: PersistLate) -> CheckpointJob:
        book, key = self._core.book, (late.generation, late.step)
        self._step = late.step
        job = CheckpointJob(
            world=book.require(late.generation), step=late.step, target=late.target, urgent=True
        )
        job.ranks = {slot.entry.rank for slot in self._core.slots.of(key) if slot.entry}
        if (snapshot := book.snapshots.get(key)) is not None:
            job.total_bytes = sum(entry.payload_bytes for entry in snapshot.entries.values())
        return self._want(job)


def _prepare() -> None:
    """Import the modules for writing now: at the end, that would take much of the time."""
    import holdfast.ckpt.checkpoints.commit  # noqa: F401
