"""The tier between parity and the store: protected snapshots, spilled to the node's own disk.

It serves when memory is gone on too many nodes at once: machines that rebooted, a job that was
stopped and is started again. Every node spills the blocks of its own ranks; parity is not
spilled, so that all of a snapshot's nodes are needed to restore it from there.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from time import monotonic

from ckpt.arena import SlotFile
from ckpt.block import SlotState
from ckpt.errors import CkptError, CorruptError
from ckpt.sidecar.core import Core, Op, Work
from ckpt.sidecar.messages import Spill, Spilled, unparse
from ckpt.sidecar.pen import Pen
from ckpt.sidecar.slots import Slot
from ckpt.sidecar.state import Phase, Snapshot
from ckpt.spill import SpillDirectory, SpilledSnapshot
from ckpt.target import DiskTarget
from ckpt.transport import Request
from ckpt.types import Json
from ckpt.world import BlockEntry

_log = logging.getLogger(__name__)


class Disk:
    """Spills what is protected, one snapshot at a time, the newest next; offers what is there."""

    def __init__(self, core: Core) -> None:
        self._core, self._pen = core, Pen()
        self._target: DiskTarget | None = None
        self._busy = self._urgent = False
        self._next: Snapshot | None = None
        self._steps: list[int] = []
        self._nbytes = 0
        self._error: str | None = None
        core.on.protect.append(self._protected)

    def ops(self) -> dict[str, Op]:
        """Return what this part answers."""
        return {"spill": (Spill, self._spill), "spilled": (Spill, self._spilled)}

    def close(self) -> None:
        """Spill no more; what is being spilled ends at its next piece."""
        self._pen.close()

    def nbytes(self) -> int:
        """Return what this process has on the disk."""
        return self._nbytes

    def status(self) -> dict[str, Json]:
        """Return the steps spilled last, and the last error."""
        return {"spilled": list(self._steps), "spill_error": self._error}

    # -- spilling --------------------------------------------------------------------------------

    def _spill(self, request: Request, body: Spill) -> None:
        self._target = body.target
        request.reply()

    def _directory(self, target: DiskTarget) -> SpillDirectory:
        return SpillDirectory(Path(target.directory, self._core.node))

    def _protected(self, snapshot: Snapshot) -> None:
        if self._target is None or snapshot.step % self._target.every:
            return
        self._next = snapshot
        if not self._busy:
            self._start()

    def _start(self) -> None:
        """Begin with the newest that is due, if it is still there."""
        snapshot, self._next = self._next, None
        if snapshot is None or self._target is None:
            return
        core = self._core
        slots = [
            slot
            for slot in core.slots.of(snapshot.key)
            if slot.entry and not slot.leaving and not slot.borrowed
        ]
        if not slots:
            return
        for slot in slots:
            core.slots.pin(slot)
            slot.persisting += 1
        self._busy = True
        work = functools.partial(self._write, snapshot, slots, self._directory(self._target))
        core.submit(None, work, kind=Work.STORE if self._urgent else Work.DISK)

    def _write(self, snapshot: Snapshot, slots: list[Slot], directory: SpillDirectory) -> None:
        if not self._urgent:
            self._pen.yield_to_others()
        began_s = monotonic()
        blocks = {slot.entry.rank: (slot.file, slot.entry) for slot in slots if slot.entry}
        failed: str | None = f"step {snapshot.step} was not spilled; see the sidecar's log"
        try:
            written = directory.write(snapshot.world, snapshot.step, blocks, pace=self._pace)
            self._nbytes = sum(entry.payload_bytes for entry in written.blocks)
            self._core.meters.add("spill", monotonic() - began_s, self._nbytes)
            failed = None
        except CkptError as error:
            failed = str(error)
            _log.warning("%s", failed)
        finally:
            with self._core.lock:
                self._busy, self._error = False, failed
                for slot in slots:
                    slot.persisting -= 1
                if failed is None:
                    self._steps = [*self._steps, snapshot.step][-2:]
                self._core.unpin(*slots)
                if not self._pen.closed:
                    self._start()

    def _pace(self, nbytes: int) -> None:
        self._pen.pace(nbytes, bytes_per_s=0)

    def save_newest(self) -> float:
        """Begin to spill the newest protected step; return for how many seconds to wait for it."""
        book, target = self._core.book, self._target
        if target is None or not target.grace_s:
            return 0.0
        step = book.newest(Phase.PROTECTED, generation=book.generation)
        snapshot = book.snapshots.get((book.generation, step))
        if snapshot is not None and step not in self._steps:
            self._next, self._urgent = snapshot, True
            if not self._busy:
                self._start()
        return target.grace_s

    def has_saved(self) -> bool:
        """Return whether there is nothing to wait for any more."""
        return not self._busy and self._next is None

    # -- offering --------------------------------------------------------------------------------

    def _spilled(self, request: Request, body: Spill) -> None:
        directory = self._directory(body.target)
        self._core.submit(request, lambda: self._offer(request, directory), kind=Work.STORE)

    def _offer(self, request: Request, directory: SpillDirectory) -> None:
        """Verify what is there and take it in, as blocks that can be opened like any other."""
        offers = []
        for snapshot in directory.snapshots():
            opened: list[tuple[SlotFile, BlockEntry]] = []
            for entry in snapshot.blocks:
                try:
                    opened.append((directory.open(snapshot, entry), entry))
                except CorruptError as error:
                    self._core.counters["corrupt_spills"] += 1
                    _log.warning("%s", error)
            if opened:
                with self._core.lock:
                    offers.append(self._take_in(snapshot, opened))
        request.reply([unparse(offer) for offer in offers])

    def _take_in(
        self, snapshot: SpilledSnapshot, opened: list[tuple[SlotFile, BlockEntry]]
    ) -> Spilled:
        core = self._core
        for file, entry in opened:
            if core.slots.holding((entry.generation, entry.step, entry.rank)) is not None:
                file.close()
                continue
            slot = core.slots.readopt(file, entry, SlotState.COMMITTED)
            slot.borrowed = True
        entries = {entry.rank: entry for _, entry in opened}
        core.book.learn(snapshot.world, snapshot.step, entries)
        return Spilled(
            run=snapshot.run,
            generation=snapshot.generation,
            world=snapshot.world,
            step=snapshot.step,
            blocks=tuple(entries.values()),
        )
