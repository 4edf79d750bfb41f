"""Snapshots in the background: a thread copies the state into a slot of the sidecar.

Parameters and optimizer state do not change between two optimizer steps, so they are copied during
the next forward and backward pass. Tensors and values that may change there (buffers, loose
tensors, plain values) are copied before `Snapshotter.snapshot` returns. A pre-hook of every
optimizer waits for the copy, and helps with it. If a tensor is written to in spite of that, its
version counter or a second look at a sample (`holdfast.ckpt.snapshot.tearing`) shows it, and the
snapshot is discarded, never torn.

Tensors that do not change from step to step lie in memory once, in the *fixed part* of all blocks
(`holdfast.ckpt.snapshot.fixed_part`); they are checked, not copied.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from holdfast.ckpt.errors import (
    BudgetError,
    CapacityError,
    CkptError,
    CorruptError,
    GivenUpError,
    StateError,
    StoreError,
)
from holdfast.ckpt.memory.arena import SlotFile
from holdfast.ckpt.memory.block import block_bytes, index_offset
from holdfast.ckpt.memory.maps import SlotMaps
from holdfast.ckpt.memory.records import BlockEntry
from holdfast.ckpt.memory.target import CheckpointTarget
from holdfast.ckpt.meters import Meters
from holdfast.ckpt.native.isal import crc32c
from holdfast.ckpt.native.sums import SUM_BYTES, Sums
from holdfast.ckpt.snapshot.change_watch import ChangeWatch
from holdfast.ckpt.snapshot.copy_job import CLOSED, CopyJob
from holdfast.ckpt.snapshot.copy_program import PayloadBuffer, Program
from holdfast.ckpt.snapshot.discards import Discards
from holdfast.ckpt.snapshot.fixed_part import FixedPieces, PieceKey
from holdfast.ckpt.snapshot.lanes import CudaLanes, Lanes, refuse_captured, refuse_devices
from holdfast.ckpt.snapshot.pacing import Pacer
from holdfast.ckpt.snapshot.settings import (
    CopySettings,
    OptimizerFence,
    SlotOwner,
    SnapshotStats,
    WritableSlot,
)
from holdfast.ckpt.snapshot.store_gather import at_step
from holdfast.ckpt.snapshot.tearing import ChecksumSample, DeviceSample
from holdfast.ckpt.snapshot.touched import Rows, TouchedRows
from holdfast.ckpt.state.capture import CapturePlan, FlatState, Gather

__all__ = ["ACQUIRE_TIMEOUT_S", "CopySettings", "SnapshotStats", "Snapshotter"]

_log = logging.getLogger(__name__)

ACQUIRE_TIMEOUT_S = 30.0
STARVED_TIMEOUT_S = 1.0
"""The timeout of the wait for a slot, after a snapshot was left out for lack of one."""

_POLL_S = 0.005
_ANY_CRC = 0xFFFFFFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """One snapshot, as handed to the thread."""

    step: int
    persist: CheckpointTarget | None
    flat: FlatState
    program: Program
    job: CopyJob
    began_s: float


class Snapshotter:
    """Takes the snapshots of one rank in one generation; not safe to share between threads.

    ``gather`` is collective over the ranks, and is called whenever the state's shape is new. Where
    that may happen at one rank alone, it must not use the training's group (see `StoreGather`).
    ``poll`` is called while the training thread waits for a copy and may raise to stop waiting.
    ``before_step`` is called before each step of an optimizer in the state, in place of `copied`,
    which it must call. ``inspect`` sees every state before it is copied, and may refuse it by an
    error. ``together``, where ranks may change the shape of their state one by one, is collective:
    it tells all whether any did. ``checkpoint`` is the destination of snapshots with ``persist``.
    ``stats`` and ``meters`` (``stall``, ``copy``, ``wait``) report the cost.
    """

    def __init__(  # noqa: PLR0913 - a rank's position takes four
        self,
        client: SlotOwner,
        *,
        run: str,
        generation: int,
        rank: int,
        world_size: int,
        gather: Gather,
        checkpoint: CheckpointTarget | None = None,
        maps: SlotMaps | None = None,
        poll: Callable[[], None] | None = None,
        before_step: Callable[[], None] | None = None,
        copying: CopySettings | None = None,
        lanes: Lanes | None = None,
        inspect: Callable[[FlatState, CapturePlan], None] | None = None,
        together: Callable[[bool], bool] | None = None,
    ) -> None:
        self._inspect, self._together = inspect, together
        self._client, self._gather, self._checkpoint, self._poll = client, gather, checkpoint, poll
        self._run, self._generation = run, generation
        self._rank, self._world_size = rank, world_size
        self._maps = SlotMaps() if maps is None else maps
        self._owns_maps = maps is None
        self._settings = CopySettings() if copying is None else copying
        self._lanes = lanes
        self._watch = ChangeWatch(rank=rank)
        self._fixed = FixedPieces(
            generation=generation, rank=rank, least_bytes=self._settings.fixed_bytes
        )
        self._plan: CapturePlan | None = None
        self._program: Program | None = None
        self._task: _Task | None = None
        self._held: CopyJob | None = None
        self._pending: Future[None] | None = None
        self._closing = threading.Event()
        self._fence = OptimizerFence(self.copied if before_step is None else before_step)
        self._pacer = Pacer(enabled=self._settings.paced)
        self._turn = 0
        self._touched = TouchedRows()
        self._starved = False
        self._pool = ThreadPoolExecutor(
            1,
            thread_name_prefix="ckpt-snapshot",
            initializer=_lower_priority,
            initargs=(self._settings.niceness,),
        )
        self.stats = SnapshotStats()
        self._discards = Discards(self.stats)
        self.meters = Meters()

    def snapshot(self, state: Mapping[str, Any], step: int, *, persist: bool = False) -> None:
        """Start the snapshot of ``step``; afterwards the caller may do anything without harm to it.

        First wait for the snapshot in progress, and raise its error. With ``persist`` the sidecar
        also writes this one to the checkpoint root once it is protected. Raises ``StateError``
        where the state cannot be captured, or has changed shape at this rank alone.
        """
        if persist and self._checkpoint is None:
            raise StoreError(f"step {step} cannot be persisted: no checkpoint root was given")
        refuse_captured(f"the snapshot of step {step} was asked for", "take it after the capture")
        self.fence()
        began_s = time.perf_counter()
        try:
            flat, program = self._programmed(state, step)
            if self._inspect is not None:
                self._inspect(flat, program.plan)
            rows = self._touched.take(flat.tensors, flat.volatile)
            wrong = program.stage(flat, step=step, turn=self._turn, touched=rows)
            self._touched.mistaken(wrong, step=step)
            look = self._sample(program)
            ready = {lane: lane.ready() for lane in {unit.lane for unit in program.carried}}
            self._task = _Task(
                step=step,
                persist=self._checkpoint if persist else None,
                flat=flat,
                program=program,
                job=CopyJob(program, ready=ready, look=look),
                began_s=time.perf_counter(),
            )
            self._pending = self._pool.submit(self._take_or_leave, self._task)
        finally:
            self._stalled(time.perf_counter() - began_s)

    def _sample(self, program: Program) -> DeviceSample | None:
        """Look at the device tensors; None where the device has no room for that."""
        try:
            return DeviceSample(program, turn=self._turn, share=self._settings.recheck)
        except torch.OutOfMemoryError:
            return None

    def touched(self, tensor: torch.Tensor, rows: Rows) -> None:
        """Name rows of a tracked tensor that have changed since the last snapshot.

        Of a tensor of which no rows are named, everything is read at the next snapshot. Raises
        ``StateError`` for rows that are not there, and at the next snapshot for another tensor.
        """
        self._touched.note(tensor, rows)

    def _programmed(self, state: Mapping[str, Any], step: int) -> tuple[FlatState, Program]:
        flat, same = self._watch.flatten(state)
        change = "" if same and self._program is not None else self._changed(flat)
        if self._together is not None and self._together(bool(change)) and not change:
            same, change = False, "the state of another rank has changed shape"
        if same and not change and self._program is not None and self._plan is not None:
            changed = self._fixed.look(self._plan, flat, same=True)
            if changed or self._program.fixed is not self._fixed.layout:
                self._program = self._programmed_anew(self._plan, flat)
            return flat, self._program
        self._program = None
        for parts in flat.optimizers.values():
            self._fence.add(parts.optimizer)
        if change:
            self._plan = self._agree(flat, step, change=change)
        assert self._plan is not None
        self._plan = self._plan.with_own(flat)
        self.stats.replica_bytes = self._plan.copied_bytes
        refuse_devices(flat.tensors)
        if self._lanes is None and torch.cuda.is_available():
            self._lanes = CudaLanes()
        self._fixed.look(self._plan, flat, same=False)
        self._program = self._programmed_anew(self._plan, flat)
        return flat, self._program

    def _changed(self, flat: FlatState) -> str:
        """Return in words why the plan does not fit, "" if it does."""
        return "nothing was planned yet" if self._plan is None else self._plan.change(flat)

    def _programmed_anew(self, plan: CapturePlan, flat: FlatState) -> Program:
        """Return the program of a plan, with the fixed pieces in their places."""
        placed = self._fixed.placed(plan)
        return Program(
            placed,
            flat,
            lanes=self._lanes,
            fixed=self._fixed.layout,
            least_bytes=self._settings.fixed_bytes,
        )

    def _agree(self, flat: FlatState, step: int, *, change: str) -> CapturePlan:
        """Plan together with all ranks."""
        anew = self._plan is not None
        if anew:
            self.stats.replans += 1
            _log.info("planning the state again: %s", change)
        try:
            return CapturePlan.build(
                flat,
                rank=self._rank,
                world_size=self._world_size,
                gather=at_step(self._gather, step),
            )
        except StateError as error:
            if not anew:
                raise
            raise StateError(
                f"the tracked state changed at this rank ({change}), and planning it failed: "
                f"{error}. It must change at all ranks before the same snapshot; where an "
                "optimizer makes state at each rank's first gradient, step it once with zero "
                "gradients everywhere before training"
            ) from error

    def fence_steps_of(self, optimizer: Optimizer) -> None:
        """Have the steps of an optimizer wait for copies, also where the state does not name it.

        Those in the state do by themselves. Ends with `close`.
        """
        self._fence.add(optimizer)

    def copied(self) -> None:
        """Wait until the copy in progress is done, and help with it; then tensors may change.

        Raises the error that ended it, if any (``FencedError``, ``PeerError``). A discarded
        snapshot raises nothing: see ``stats``.
        """
        task, self._task = self._task, None
        if task is None and self._held is not None:
            self._held.hold()  # another optimizer, perhaps in another stream
        if task is not None:
            began_s = time.perf_counter()
            try:
                task.job.help(self._poll)
            except BaseException:
                self._task = task  # interrupted: tensors may not change yet
                raise
            finally:
                waited_s = time.perf_counter() - began_s
                self._stalled(waited_s)
            self._held = task.job
            self._pacer = self._pacer.after(
                window_s=max(began_s - task.began_s, 0.0), waited_s=waited_s, rate=task.job.rate
            )
        if self._pending is not None and self._pending.done():
            self.fence()

    def fence(self) -> None:
        """Wait until no snapshot is in progress; raise its error (``FencedError``, …).

        Afterwards its slot is sealed, or it was discarded, which raises nothing: see ``stats``.
        """
        if self._task is not None:
            self.copied()
        pending = self._pending
        if pending is None:
            return
        began_s = time.perf_counter()
        try:
            while not pending.done():
                wait([pending], timeout=_POLL_S if self._poll else None)
                if self._poll:
                    self._poll()
        finally:
            self._stalled(time.perf_counter() - began_s)
        self._pending = self._held = None
        pending.result()

    def _stalled(self, seconds: float) -> None:
        self.stats.stall_s += seconds
        self.meters.add("stall", seconds)

    def close(self, *, timeout_s: float = 5.0) -> None:
        """Abandon the copy in progress and release the state; raises nothing."""
        pending = self._give_up()
        if pending is not None and not wait([pending], timeout=timeout_s).done:
            _log.warning("the snapshot thread is still busy after %g s", timeout_s)
            pending.add_done_callback(lambda _: self._let_go())
        else:
            self._let_go()
        self._forget()

    def leave(self, *, timeout_s: float = 5.0) -> None:
        """Close, but wait only until no byte is copied any more, not for the thread to end.

        On busy cores a thread of low priority takes its time to notice that it has nothing to do.
        """
        job = self._task.job if self._task is not None else None
        if job is None or job.program.carried:
            self.close(timeout_s=timeout_s)
            return
        pending = self._give_up()
        if not job.rest(timeout_s=timeout_s):
            _log.warning("the snapshot thread is still busy after %g s", timeout_s)
        elif pending is None:
            self._let_go()
        else:
            pending.add_done_callback(lambda _: self._let_go())
        self._forget()

    def _give_up(self) -> Future[None] | None:
        """End the copy in progress; return the thread's future if the thread has begun."""
        self._closing.set()
        self._fence.remove()
        if self._task is not None:
            self._task.job.end(torn=CLOSED)
        self._pool.shutdown(wait=False, cancel_futures=True)
        pending = self._pending
        return None if pending is None or pending.cancelled() else pending

    def _let_go(self) -> None:
        if self._lanes is not None:
            self._lanes.close()
        if self._owns_maps:
            self._maps.close()

    def _forget(self) -> None:
        self._pending = self._plan = self._program = self._task = self._held = None
        self._watch = ChangeWatch(rank=self._rank)
        self._fixed.let_go()

    def _take_or_leave(self, task: _Task) -> None:
        """Take the snapshot on the copying thread, or leave it out where that harms nothing."""
        fixed = task.program.fixed
        try:
            self._take(task)
        except BudgetError as error:
            task.job.end(error=error)
            raise
        except CapacityError as error:
            self.stats.left_out += 1
            self._starved = True
            if fixed is not None and not fixed.is_filled:
                self._fixed.give_up()
            self._discard(task, f"it has no room in memory: {error}")
        except torch.OutOfMemoryError as error:
            self._discard(task, f"a device has no memory left to pack a tensor in: {error}")
        except GivenUpError as error:
            self.stats.torn = "the state of another rank"
            self._discard(task, str(error))
        except BaseException as error:
            task.job.end(error=error)
            raise
        finally:
            if fixed is not None and fixed is self._fixed.layout and not fixed.is_filled:
                self._fixed.lose()

    def _take(self, task: _Task) -> None:
        """Acquire a slot, copy, checksum, seal."""
        job = task.job
        job.sample = ChecksumSample(task.program, turn=self._turn, share=self._settings.recheck)
        self._turn += 1
        grant = self._acquire(task)
        began_s = time.perf_counter()
        fixed = task.program.fixed
        if fixed is not None and fixed.is_filled and not grant.has_fixed:
            self._abandon(grant)
            self._fixed.lose()
            self._discard(task, "the fixed part of its block is gone; the next one copies it again")
            return
        slot: SlotFile | None = None
        try:
            slot = self._open(grant, fills=fixed is not None and not fixed.is_filled)
            copied = self._copy(task, slot, grant, late_s=began_s - task.began_s)
            changed: list[PieceKey] | None = []
            written = ""
            if copied is not None:
                changed = task.program.changed(task.flat, stop=self._closing.is_set)
                written = self._written(task)
        except BaseException:
            self._abandon(grant)
            raise
        if copied is None or changed is None or changed or written:
            self._abandon(grant)
            if written:
                reason = f"{written} before the snapshot was sealed; the next one has all of it"
            elif changed:
                self._fixed.found_changed(changed)
                reason = self._discards.changed(task.step, changed, task.program, task.flat)
            else:
                reason = self._discards.torn(job.torn)
            self._discard(task, reason)
            return
        copy_s = time.perf_counter() - began_s
        entry, sums = self._describe(task, slot, copied)
        try:
            self._client.seal(
                slot_id=grant.slot_id,
                entry=entry,
                sums=sums,
                since=task.program.since(task.step, nbytes=block_bytes(entry)),
                persist=task.persist,
            )
        except CorruptError as error:
            self.stats.torn = None
            self._fixed.lose()
            task.program.memory.forget()
            self._discard(task, str(error))
            return
        if fixed is not None and not fixed.is_filled:
            self._fixed.fill(
                task.program.fixed_pieces(copied),
                run_sums=sums[: fixed.part.nbytes // SUM_BYTES].copy(),
            )
        self._fixed.taken(task.program.contents(copied, job.versions))
        task.program.memory.sealed(copied)
        self._taken(task, copy_s)

    def _written(self, task: _Task) -> str:
        """Say in words which tensor that is built again has changed, nothing if none has.

        Raises ``StateError`` for one that has changed without a trace.
        """
        for holder, tensors in task.flat.rebuilt.values():
            for fqn, leaf in tensors.items():
                if self._closing.is_set():
                    return ""
                if found := holder.changed(fqn, leaf):
                    return found
        return ""

    def _open(self, grant: WritableSlot, *, fills: bool) -> SlotFile:
        """Map a slot; one whose fixed part is still to be filled is mapped for this copy alone."""
        if not fills:
            return self._maps.open(grant.path)
        slot = SlotFile.open(grant.path, fill=True)
        slot.warm()
        return slot

    def _acquire(self, task: _Task) -> WritableSlot:
        began_s = time.perf_counter()
        self._maps.prune()  # the slot may reuse one of these files
        timeout_s = STARVED_TIMEOUT_S if self._starved else ACQUIRE_TIMEOUT_S
        try:
            grant = self._client.acquire(
                generation=self._generation,
                step=task.step,
                rank=self._rank,
                size_bytes=self._block_bytes(task),
                timeout_s=timeout_s,
                patience_s=self._pacer.patience_s,
                fixed=task.program.fixed.part if task.program.fixed is not None else None,
            )
            self._starved = False
            self._maps.map_ahead(grant.ahead)
            return grant
        finally:
            wait_s = time.perf_counter() - began_s
            self.stats.wait_s += wait_s
            self.meters.add("wait", wait_s)

    def _copy(
        self, task: _Task, slot: SlotFile, grant: WritableSlot, *, late_s: float
    ) -> Sums | None:
        """Copy into ``slot``; return the sums of all parts, or None if the state changed.

        ``late_s`` is the time since the snapshot was taken.
        """
        program, job = task.program, task.job
        if program.fixed is None or program.fixed.is_filled:
            for lane in {unit.lane for unit in program.carried}:
                lane.pin(slot)
        parts = program.memory.open(
            slot,
            key=(self._generation, task.step, self._rank),
            before=grant.before,
            turn=self._turn,
        )
        job.open(PayloadBuffer.of(slot.block(program.plan.payload_bytes), parts=parts))
        # The check of fixed bytes follows the copy: both have to fit into the time until the step.
        self.stats.pace = self._pacer.speed(program.work_bytes, late_s=late_s)
        sums = job.run(speed=self.stats.pace)
        return None if job.torn else sums

    def _describe(self, task: _Task, slot: SlotFile, sums: Sums) -> tuple[BlockEntry, Sums]:
        """Write the index behind the payload; return the entry to seal and the block's sums."""
        program, fixed = task.program, task.program.fixed
        payload_bytes = program.plan.payload_bytes
        text = self._text(task, program.parts.of_ranges(sums).tolist())
        tail = bytes(index_offset(payload_bytes) - payload_bytes) + text
        block = slot.block(payload_bytes + len(tail))
        np.frombuffer(block, dtype=np.uint8)[program.zeros] = 0
        block[payload_bytes:] = tail
        entry = BlockEntry(
            generation=self._generation,
            step=task.step,
            rank=self._rank,
            payload_bytes=payload_bytes,
            index_bytes=len(text),
            index_crc32c=crc32c(text),
            fixed_bytes=fixed.part.nbytes if fixed is not None else 0,
            fixed=fixed.part.number if fixed is not None else 0,
        )
        runs = program.cover.of_runs(sums, tail=tail)
        if fixed is not None and fixed.run_sums is not None:
            runs[: len(fixed.run_sums)] = fixed.run_sums
        return entry, runs

    def _text(self, task: _Task, crcs: Sequence[int]) -> bytes:
        return task.program.plan.index_text(
            task.flat, crcs, run=self._run, step=task.step, generation=self._generation
        )

    def _block_bytes(self, task: _Task) -> int:
        """Return an upper bound of the block's length, before the checksums are known."""
        plan = task.program.plan
        widest = self._text(task, [_ANY_CRC] * len(plan.pieces))
        return index_offset(plan.payload_bytes) + len(widest)

    def _taken(self, task: _Task, copy_s: float) -> None:
        self.stats.taken += 1
        self.stats.bytes += task.program.nbytes - task.job.kept_bytes
        self.stats.fixed_bytes = task.program.kept_bytes
        self.stats.last_step = task.step
        self.stats.last_copy_s = copy_s
        self.stats.copy_s += copy_s
        self.meters.add("copy", copy_s, task.program.nbytes - task.job.kept_bytes)

    def _abandon(self, grant: WritableSlot) -> None:
        with contextlib.suppress(CkptError):
            self._client.abandon(grant.slot_id)

    def _discard(self, task: _Task, reason: str) -> None:
        """Leave a snapshot out, and say why."""
        task.job.end(torn=self.stats.torn or reason)
        if not self._closing.is_set():
            self._discards.note(task.step, reason)


def _lower_priority(niceness: int) -> None:
    """Lower the calling thread's priority; on Linux every thread has its own."""
    if niceness and sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
