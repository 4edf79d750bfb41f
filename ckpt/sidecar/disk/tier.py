"""The tier between parity and the store: protected snapshots, spilled to the node's own disk.

It serves when memory is lost on too many nodes at once: machines that rebooted, or a job that was
stopped and is started again. Every node spills the blocks of its own ranks and the parity rows that
it holds, so that each group may lose as many disks as the parity allows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TypeVar

from holdfast.ckpt.errors import CkptError, CorruptError
from holdfast.ckpt.memory.arena import SlotFile
from holdfast.ckpt.memory.block import SlotState
from holdfast.ckpt.memory.records import BlockEntry, ParityEntry
from holdfast.ckpt.memory.target import DiskTarget
from holdfast.ckpt.parity.row_file import RowFile
from holdfast.ckpt.sidecar.core.book import Snapshot, SnapshotPhase
from holdfast.ckpt.sidecar.core.core import Core, Op, WaitingWork
from holdfast.ckpt.sidecar.core.messages import Spill, Spilled, unparse
from holdfast.ckpt.sidecar.core.slots import Slot
from holdfast.ckpt.sidecar.disk.directory import SpillDirectory, SpilledHoldings, SpilledSnapshot
from holdfast.ckpt.sidecar.parity.rows import Parities, ParityRow
from holdfast.ckpt.sidecar.persist.paced_writer import PacedWriter
from holdfast.ckpt.transport import Request
from holdfast.ckpt.types import Json

_log = logging.getLogger(__name__)
_Entry = TypeVar("_Entry", BlockEntry, ParityEntry)
_File = TypeVar("_File", SlotFile, RowFile)


class Disk:
    """Spills protected snapshots, one at a time, the newest next; offers the spilled ones."""

    def __init__(self, core: Core, parities: Parities) -> None:
        self._core, self._parities, self._writer = core, parities, PacedWriter()
        self._target: DiskTarget | None = None
        self._busy = self._urgent = False
        self._next: Snapshot | None = None
        self._steps: list[int] = []
        self._nbytes = 0
        self._error: str | None = None

    def ops(self) -> dict[str, Op]:
        """Return the operations of this part."""
        return {"spill": (Spill, self._spill), "spilled": (Spill, self._spilled)}

    def close(self) -> None:
        """Spill no more; a spill in progress ends at its next piece."""
        self._writer.close()

    def nbytes(self) -> int:
        """Return the bytes of this process's last spill."""
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

    def protected(self, snapshot: Snapshot) -> None:
        """Spill a snapshot, where it is due."""
        if self._target is None or snapshot.step % self._target.every:
            return
        self._next = snapshot
        if not self._busy:
            self._start()

    def _start(self) -> None:
        """Begin with the newest snapshot that is due, if it still exists."""
        snapshot, self._next = self._next, None
        if snapshot is None or self._target is None:
            return
        core = self._core
        slots = [
            slot
            for slot in core.slots.of(snapshot.key)
            if slot.entry and not slot.leaving and not slot.borrowed
        ]
        rows = self._parities.pin(snapshot.key)
        if not slots and not rows:
            return
        for slot in slots:
            core.slots.pin(slot)
            slot.persisting += 1
        self._busy = True
        work = partial(self._write, snapshot, slots, rows)
        core.submit(None, work, kind=WaitingWork.STORE if self._urgent else WaitingWork.DISK)

    def _write(self, snapshot: Snapshot, slots: list[Slot], rows: list[ParityRow]) -> None:
        if not self._urgent:
            self._writer.yield_to_others()
        began_s, target = monotonic(), self._target
        assert target is not None
        failed: str | None = f"step {snapshot.step} was not spilled; see the sidecar's log"
        try:
            holdings = _holdings_of(snapshot, slots, rows)
            written = self._directory(target).write(holdings, pace=self._pace)
            self._nbytes = sum(entry.payload_bytes for entry in written.blocks)
            self._nbytes += sum(entry.nbytes for entry in written.parities)
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
                self._parities.unpin(rows)
                if not self._writer.closed:
                    self._start()

    def _pace(self, nbytes: int) -> None:
        self._writer.pace(nbytes, bytes_per_s=0)

    def save_newest(self) -> float:
        """Begin to spill the newest protected step; return how many seconds to wait for it."""
        book, target = self._core.book, self._target
        if target is None or not target.grace_s:
            return 0.0
        step = book.newest(SnapshotPhase.PROTECTED, generation=book.generation)
        snapshot = book.snapshots.get((book.generation, step))
        if snapshot is not None and step not in self._steps:
            self._next, self._urgent = snapshot, True
            if not self._busy:
                self._start()
        return target.grace_s

    def has_saved(self) -> bool:
        """Return whether nothing is left to wait for."""
        return not self._busy and self._next is None

    # -- offering --------------------------------------------------------------------------------

    def _spilled(self, request: Request, body: Spill) -> None:
        directory = self._directory(body.target)
        self._core.submit(request, lambda: self._offer(request, directory), kind=WaitingWork.STORE)

    def _offer(self, request: Request, directory: SpillDirectory) -> None:
        """Verify the spilled snapshots and register them, so that their blocks can be opened."""
        offers = []
        for snapshot in directory.snapshots():
            blocks = list(self._opened(snapshot.blocks, partial(directory.open, snapshot)))
            filled = [entry for entry in snapshot.parities if entry.nbytes]
            rows = list(self._opened(filled, partial(directory.open_row, snapshot)))
            if blocks or rows:
                with self._core.lock:
                    offers.append(self._take_in(snapshot, blocks, rows))
        request.reply([unparse(offer) for offer in offers])

    def _opened(
        self, entries: Iterable[_Entry], verify: Callable[[_Entry], _File]
    ) -> Iterator[tuple[_Entry, _File]]:
        """Yield the intact entries; count and skip the damaged ones."""
        for entry in entries:
            try:
                yield entry, verify(entry)
            except CorruptError as error:
                with self._core.lock:
                    self._core.counters["corrupt_spills"] += 1
                _log.warning("%s", error)

    def _take_in(
        self,
        snapshot: SpilledSnapshot,
        blocks: Sequence[tuple[BlockEntry, SlotFile]],
        rows: Sequence[tuple[ParityEntry, RowFile]],
    ) -> Spilled:
        core = self._core
        for entry, file in blocks:
            if core.slots.holding((entry.generation, entry.step, entry.rank)) is not None:
                file.close()
                continue
            slot = core.slots.readopt(file, entry, SlotState.COMMITTED)
            slot.borrowed = True
        key = (snapshot.world.generation, snapshot.step)
        for parity, row in rows:
            if self._parities.get(key, (parity.stripe, parity.row)) is not None:
                row.close()
            else:
                self._parities.seal_again(row, parity)
        core.book.learn(snapshot.world, snapshot.step, {e.rank: e for e in snapshot.sealed})
        empty = [entry for entry in snapshot.parities if not entry.nbytes]
        return Spilled(
            run=snapshot.run,
            generation=snapshot.generation,
            world=snapshot.world,
            step=snapshot.step,
            blocks=tuple(entry for entry, _ in blocks),
            parities=(*(entry for entry, _ in rows), *empty),
            sealed=snapshot.sealed,
        )


def _holdings_of(
    snapshot: Snapshot, slots: Iterable[Slot], rows: Iterable[ParityRow]
) -> SpilledHoldings:
    """Return the contents to spill; of rows only those that are still whole."""
    there = [(row.entry, row.buffer or memoryview(b"")) for row in rows]
    return SpilledHoldings(
        world=snapshot.world,
        step=snapshot.step,
        blocks={slot.entry.rank: (slot.file, slot.entry) for slot in slots if slot.entry},
        rows=[(entry, data) for entry, data in there if len(data) == entry.nbytes],
        sealed=tuple(entry for _, entry in sorted(snapshot.entries.items())),
    )
