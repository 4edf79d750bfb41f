"""The bytes that slots hold already: parts that lie there are not written again.

Parts of pieces that move only in part (`holdfast.ckpt.snapshot.partial_choice`) are read for their
fingerprints. A part whose fingerprint is that of the bytes in the slot stays as it is. The memory
also knows since which step each part has been the same, so that a sidecar need not compare blocks.

Bytes that stay for long may decay. So one in `_CHECKED` of them is checked at each snapshot, and
written again if it is damaged.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np

from holdfast.ckpt.memory.arena import SlotFile
from holdfast.ckpt.native import isal
from holdfast.ckpt.native.refresh import Fingerprints, RefreshMode, refresh_runs
from holdfast.ckpt.native.streaming import Words
from holdfast.ckpt.native.sums import Flags, Lengths, Sums
from holdfast.ckpt.snapshot.partial_choice import PartialChoice

_CHECKED: Final = 64
_MOST_SLOTS: Final = 8

SlotKey: TypeAlias = tuple[int, int, int]
"""(generation, step, rank) of a block that was written to a slot."""


def check_turn(count: int, turn: int) -> Flags:
    """Return one in `_CHECKED` of ``count`` parts, other ones at each ``turn``."""
    found: Flags = np.zeros(count, dtype=np.bool_)
    found[turn % _CHECKED :: _CHECKED] = True
    return found


def _chosen(runs: tuple[Words, Words, Words], wanted: Flags) -> tuple[Words, Words, Words]:
    sources, targets, sizes = runs
    return sources[wanted], targets[wanted], sizes[wanted]


@dataclass(frozen=True, slots=True, eq=False)
class _HeldSlot:
    """The fingerprints of a slot's parts, and the block for which they were written."""

    file: weakref.ref[SlotFile]
    key: SlotKey
    prints: Fingerprints


class PartMemory:
    """Knowledge about the parts of one program: in the state, and in the slots.

    ``source`` are the fingerprints of the state as it was read last. ``unread`` are the parts of
    stages that were copied after that without a look at them. ``since`` are the steps from
    which on each part was the same in all sealed snapshots. ``settled`` are the parts whose
    ``source`` is right for the snapshot in progress, without a look at them.
    """

    def __init__(self, edges: Lengths, *, least_parts: int) -> None:
        count = int(edges[-1])
        self.count = count
        self.source = Fingerprints.unknown(count)
        self.since: Lengths = np.zeros(count, dtype=np.int64)
        self.settled: Flags = np.zeros(count, dtype=np.bool_)
        self.born: int | None = None
        self.unread: Flags = np.zeros(count, dtype=np.bool_)
        self._choice = PartialChoice(edges, least_parts=least_parts)
        self._slots: dict[str, _HeldSlot] = {}

    @property
    def partial(self) -> Flags:
        """The parts of partly moving pieces."""
        return self._choice.parts

    def stage(
        self, parts: slice, runs: tuple[Words, Words, Words], *, read: Flags, step: int
    ) -> Flags:
        """Bring a stage up to date; return which parts are known to have changed.

        ``runs`` are the sources, targets and sizes of ``parts``. Those that are not to be ``read``
        are known to be the same.
        """
        mine = self.source.take(parts)
        known = mine.known & ~self.unread[parts]
        wanted = read | ~known
        before = Fingerprints(mine.sums, mine.wide, known).take(wanted)
        modes = np.full(len(before.sums), RefreshMode.COMPARE)
        found, written = refresh_runs(_chosen(runs, wanted), before, modes)
        mine.put(wanted, found)
        self.unread[parts] = False
        fresh: Flags = np.zeros(len(wanted), dtype=np.bool_)
        fresh[wanted] = written
        self.since[parts][fresh] = step
        self.settled[parts] = mine.known
        return fresh & known

    def open(self, slot: SlotFile, *, key: SlotKey, before: SlotKey | None, turn: int) -> PartCopy:
        """Begin a copy into a slot; ``before`` is the block last written there, by anybody."""
        path, held = str(slot.path), self._slots.pop(str(slot.path), None)
        if held is None or held.file() is not slot or held.key != before:
            held = _HeldSlot(weakref.ref(slot), key, Fingerprints.unknown(self.count))
        while len(self._slots) >= _MOST_SLOTS:
            self._slots.pop(next(iter(self._slots)))
        self._slots[path] = _HeldSlot(held.file, key, held.prints)
        if self.born is None:
            self.born = key[1]
            self.since[:] = np.maximum(self.since, self.born)
        return PartCopy(
            memory=self, slot=held.prints, step=key[1], checked=check_turn(self.count, turn)
        )

    def sealed(self, sums: Sums) -> None:
        """Note the checksums of a sealed snapshot's parts."""
        self._choice.observe(sums)

    def forget(self) -> None:
        """Know nothing of the slots any more: the bytes in one of them are damaged."""
        self._slots.clear()

    def unsettle(self) -> None:
        """Look at every part again: a snapshot was discarded, or another one begins."""
        self.settled[:] = False


@dataclass(slots=True, kw_only=True, eq=False)
class PartCopy:
    """One copy into a slot; threads may copy different parts at once.

    ``kept_bytes`` lay there already.
    """

    memory: PartMemory
    slot: Fingerprints
    step: int
    checked: Flags
    kept_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def copy(self, parts: slice, sources: Words, targets: Words, sizes: Words) -> Sums:
        """Bring the slot's ``parts`` up to date; return their CRC32C as they lie there."""
        memory, there = self.memory, self.slot.take(parts)
        self._check(there, self.checked[parts], targets, sizes)
        state, settled = memory.source.take(parts), memory.settled[parts]
        wanted = ~(settled & there.same(state))
        written = wanted.copy()
        if wanted.any():
            compared = memory.partial[parts] & ~settled
            modes = np.where(compared, RefreshMode.COMPARE, RefreshMode.COPY)[wanted]
            runs = _chosen((sources, targets, sizes), wanted)
            found, written[wanted] = refresh_runs(runs, there.take(wanted), modes)
            self._note(parts, wanted, found)
        with self._lock:
            self.kept_bytes += int(sizes[~written].sum())
        return there.sums.copy()

    def rewritten(self, parts: slice) -> None:
        """Note that ``parts`` were written past this object, whatever lay there."""
        self.memory.since[parts] = self.step

    def _check(self, there: Fingerprints, checked: Flags, targets: Words, sizes: Words) -> None:
        """Forget the parts whose bytes in the slot are not what was written."""
        for i in np.flatnonzero(checked & there.known).tolist():
            if isal.crc32c_at(int(targets[i]), int(sizes[i])) != int(there.sums[i]):
                there.known[i] = False

    def _note(self, parts: slice, wanted: Flags, found: Fingerprints) -> None:
        """Note what was found in the state, and lies in the slot now."""
        memory, there = self.memory, self.slot.take(parts)
        state, settled = memory.source.take(parts), memory.settled[parts][wanted]
        before = state.take(wanted)
        # of a settled part the second checksum is known, of the copy only the first
        right = settled & before.known & (found.sums == before.sums)
        there.put(
            wanted,
            Fingerprints(found.sums, np.where(right, before.wide, found.wide), right | found.known),
        )
        memory.unread[parts][wanted] = False
        since = memory.since[parts]
        fresh = ~settled & ~found.same(before)
        since[np.flatnonzero(wanted)[fresh]] = self.step
        state.put(
            wanted,
            Fingerprints(
                np.where(settled, before.sums, found.sums),
                np.where(settled, before.wide, found.wide),
                np.where(settled, before.known, found.known),
            ),
        )
