"""Thread work of checkpoints: write a rank's pack, publish a manifest."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from time import monotonic

import msgspec

from holdfast.ckpt.errors import CkptError, FencedError, GivenUpError, NotFoundError
from holdfast.ckpt.geometry.shard_index import decode_index
from holdfast.ckpt.sidecar.core.core import Core, WaitingWork
from holdfast.ckpt.sidecar.core.lease_page import LeasePage
from holdfast.ckpt.sidecar.core.slots import Slot
from holdfast.ckpt.sidecar.persist.paced_writer import PACK_THREADS, PacedWriter
from holdfast.ckpt.sidecar.persist.pending import CheckpointJob
from holdfast.ckpt.types import Json

_log = logging.getLogger(__name__)


class Packing:
    """Writes packs and manifests, and reports through callbacks.

    ``written(job, rank, receipt, error)`` and ``committed(job, error)`` end each piece of work, and
    ``retried(job, attempt, error)`` reports failures that are tried again; all three are called
    under the lock. ``progressed(job)`` is called after every few bytes, without the lock. Past the
    time of ``lease`` nothing is published.
    """

    def __init__(
        self,
        core: Core,
        *,
        lease: LeasePage | None,
        written: Callable[[CheckpointJob, int, Json, str | None], None],
        committed: Callable[[CheckpointJob, str | None], None],
        progressed: Callable[[CheckpointJob], None],
        retried: Callable[[CheckpointJob, int, str], None],
    ) -> None:
        self._core, self._lease, self.writer = core, lease, PacedWriter()
        self._on_written, self._on_committed = written, committed
        self._on_progress, self._on_retry = progressed, retried

    def write(self, job: CheckpointJob, rank: int, slot: Slot, *, base: int | None) -> None:
        """Write a rank's pack on a thread, against the durable step ``base`` if there is one."""
        self._submit(job, functools.partial(self._write, job, rank, slot, base))

    def commit(self, job: CheckpointJob, receipts: tuple[Json, ...]) -> None:
        """Publish the manifest on a thread."""
        self._submit(job, functools.partial(self._commit, job, receipts))

    def clear(self, job: CheckpointJob, steps: list[int]) -> None:
        """Remove on a thread the files of failed checkpoints before ``job``."""
        self._submit(job, functools.partial(_clear, job, steps))

    def _submit(self, job: CheckpointJob, work: Callable[[], None]) -> None:
        """Run ``work`` on threads that yield to the trainers, unless no trainer is left."""
        if job.urgent:
            self._core.submit(None, work, kind=WaitingWork.STORE)
            return

        def modestly() -> None:
            self.writer.yield_to_others()
            work()

        self._core.submit(None, modestly, kind=WaitingWork.CHECKPOINT)

    def _write(self, job: CheckpointJob, rank: int, slot: Slot, base: int | None) -> None:
        began_s = monotonic()
        receipt: Json = None
        failed: str | None = words("see the sidecar's log", job)
        try:
            receipt = self.writer.persevere(
                lambda: self._write_pack(job, slot, base),
                job.target,
                failed=functools.partial(self._again, job),
            )
            nbytes = slot.entry.payload_bytes if slot.entry else 0
            self._core.meters.add("persist", monotonic() - began_s, nbytes)
            failed = None
        except (CkptError, OSError) as error:
            failed = words(error, job)
        finally:
            with self._core.lock:
                self._on_written(job, rank, receipt, failed)

    def _write_pack(self, job: CheckpointJob, slot: Slot, base: int | None) -> Json:
        from holdfast.ckpt.checkpoints import commit as persist

        if (entry := slot.entry) is None:
            raise NotFoundError("a block is gone")
        receipt = persist.write_pack(
            job.target.root,
            step=entry.step,
            index=decode_index(slot.file.index_view(entry), origin=slot.file.path.name),
            payload=slot.file.block(entry.payload_bytes),
            options=persist.PackOptions(
                compression=job.target.compression,
                base=base,
                threads=PACK_THREADS if job.urgent or job.target.compression else 0,
                watch=functools.partial(self._watch, job),
                around_cache=True,
            ),
        )
        return msgspec.to_builtins(receipt)

    def _watch(self, job: CheckpointJob, nbytes: int) -> None:
        """Count bytes that went to the store, and keep the pace."""
        self._require(job)
        job.written_bytes += nbytes
        self._on_progress(job)
        self.writer.pace(nbytes, bytes_per_s=job.target.bytes_per_s)

    def _again(self, job: CheckpointJob, attempt: int, error: Exception) -> None:
        self._require(job)
        reason = words(error, job)
        _log.warning("%s; retrying (%d of %d)", reason, attempt, job.target.retries)
        with self._core.lock:
            self._on_retry(job, attempt, reason)

    @staticmethod
    def _require(job: CheckpointJob) -> None:
        if job.over:
            raise GivenUpError(f"the checkpoint of step {job.step} was cancelled")

    def _check_lease(self, job: CheckpointJob) -> None:
        """Raise ``FencedError`` if others may go on without this node.

        The last save of a stopped job needs no lease: the coordinator may be gone already.
        """
        if self._lease is not None and self._lease.expired and not job.urgent:
            raise FencedError(f"the lease of node {self._core.node} ran out; others may publish")

    def _commit(self, job: CheckpointJob, receipts: tuple[Json, ...]) -> None:
        from holdfast.ckpt.checkpoints import commit as persist
        from holdfast.ckpt.checkpoints import fence

        failed: str | None = words("see the sidecar's log", job)
        try:
            found = [msgspec.convert(receipt, persist.WriterReceipt) for receipt in receipts]
            self.writer.persevere(
                lambda: persist.commit(
                    job.target.root,
                    run=job.world.run,
                    step=job.step,
                    generation=job.key[0],
                    receipts=found,
                    mesh={"dp": len(job.world.rank_nodes)},
                    right=fence.RightToPublish(
                        run=job.world.run,
                        generation=self._core.book.generation,
                        check=functools.partial(self._check_lease, job),
                    ),
                ),
                job.target,
                failed=functools.partial(self._again, job),
            )
            failed = None
        except (CkptError, OSError, msgspec.ValidationError) as error:
            failed = words(error, job)
        finally:
            with self._core.lock:
                self._on_committed(job, failed)


def _clear(job: CheckpointJob, steps: list[int]) -> None:
    from holdfast.ckpt.checkpoints.attempts import EndedSaves, remove_remains
    from holdfast.ckpt.checkpoints.catalog import run_tag
    from holdfast.ckpt.store.places import open_store

    ended = EndedSaves(reached={run_tag(job.world.run): job.key})
    try:
        remove_remains(open_store(job.target.root), steps=steps, ended=ended)
    except (CkptError, OSError) as error:
        _log.warning("files of failed checkpoints of steps %s stay: %s", steps, error)


def words(error: Exception | str, job: CheckpointJob) -> str:
    """Return the message about a checkpoint that failed."""
    return f"checkpoint of step {job.step} to {job.target.root} failed: {error}"
