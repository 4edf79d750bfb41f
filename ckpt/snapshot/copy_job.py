"""One running copy, shared by the thread that makes it and the thread that waits for it.

Units are handed out one at a time to the thread that asks. The background thread asks at its given
pace. A training thread at the fence does not sleep: it copies units too, until none is left.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from holdfast.ckpt.native.sums import Sums
from holdfast.ckpt.snapshot.copy_program import PayloadBuffer, Program
from holdfast.ckpt.snapshot.lanes import Lane, Mark, host_room
from holdfast.ckpt.snapshot.pacing import pause_s
from holdfast.ckpt.snapshot.tearing import ChecksumSample, DeviceSample

_POLL_S = 0.005
_GROUP_BYTES = 64 << 20
_RATED_BYTES = 1 << 20
"""The least bytes of which the time says how fast the thread copies."""

CLOSED = "(closed)"


class CopyJob:
    """Copies a program's units into a slot; safe to share between two threads.

    ``torn`` is, once ``finished``, the name of a tensor that was written to during the copy, or "".
    ``rate`` is the speed of the background thread so far, without its rests, in bytes per second of
    a processor; 0: it copied too little to tell.
    ``versions`` are the counts of in-place writes when it was made.
    ``ready`` marks per lane the position of the training stream at the time of the snapshot, and
    ``look`` is a sample of the device tensors at that time.
    """

    def __init__(
        self,
        program: Program,
        *,
        ready: Mapping[Lane, Mark],
        look: DeviceSample | None = None,
    ) -> None:
        self.program, self._ready, self._look = program, ready, look
        self.torn = ""
        self.copied_bytes = 0
        self.rate = 0.0
        self.sample: ChecksumSample | None = None
        self.versions = program.versions()
        self._room: PayloadBuffer | None = None
        self._sums = program.first_sums()
        self._next = self._busy = 0
        self._left = len(program.units)
        self._moved = threading.Condition()
        self._finished = self._enqueued = self._released = False
        self._error: BaseException | None = None
        self._ends: dict[Lane, Mark] = {}
        self._hurried = threading.Event()

    def open(self, room: PayloadBuffer) -> None:
        """Begin to copy, into ``room``."""
        with self._moved:
            self._room = room
            self._enqueued = self._enqueued or not self.program.carried
            self._moved.notify_all()
        if not self.program.units:
            self._conclude()

    @property
    def kept_bytes(self) -> int:
        """The bytes that were not written, because they lay in the slot already."""
        parts = self._room.parts if self._room is not None else None
        return parts.kept_bytes if parts is not None else 0

    def end(self, *, torn: str = "", error: BaseException | None = None) -> None:
        """Stop the copy; units that are not copied yet stay uncopied.

        The first reason given counts.
        """
        with self._moved:
            if not (self._finished and self._released):
                self.torn = self.torn or torn
                self._error = self._error or error
            self._next = len(self.program.units)
            self._finished = self._enqueued = self._released = True
            self._moved.notify_all()
        self._hurried.set()

    def rest(self, *, timeout_s: float) -> bool:
        """Wait until no copy from host memory is in progress; return False after ``timeout_s``."""
        with self._moved:
            return self._moved.wait_for(lambda: not self._busy, timeout_s)

    def run(self, *, speed: float) -> Sums:
        """Copy everything; return the CRC32C of each part. ``speed`` is in bytes per second.

        The result has no meaning where the job ends ``torn``. Raises the error of a copy, whichever
        thread met it. After the call returns or raises, no thread writes into the room any more.
        """
        try:
            groups = self._enqueue()
            self._copy_paced(speed)
            for mark, members in groups:
                self._collect(mark, members)
            self._look_back()
        except BaseException as error:
            self.end(error=error)
            raise
        finally:
            self._await(lambda: self._finished and not self._busy)
            for mark in [lane.mark() for lane in self._ready]:
                mark.synchronize()  # also for copies enqueued before an error
        self._release()
        if self._error is not None:
            raise self._error
        return self._sums

    def _copy_paced(self, speed: float) -> None:
        began_s, before_s, own_bytes = time.perf_counter(), time.thread_time(), 0
        while nbytes := self._copy_next():
            own_bytes, own_s = own_bytes + nbytes, time.thread_time() - before_s
            if own_bytes >= _RATED_BYTES and own_s > 0:
                self.rate = own_bytes / own_s
            elapsed_s = time.perf_counter() - began_s
            rest_s = pause_s(speed=speed, copied_bytes=self.copied_bytes, elapsed_s=elapsed_s)
            if rest_s and not self._hurried.is_set():
                self._hurried.wait(rest_s)

    def help(self, poll: Callable[[], None] | None) -> None:
        """Copy the remaining units on the training thread; return once the tensors may change.

        ``poll`` is called now and then and may raise to break off. Errors of the copy are not
        raised here.
        """
        self._hurried.set()
        while not self._finished or not self._enqueued:
            if poll is not None:
                poll()
            if self._room is None or not self._copy_next():
                with self._moved:
                    if not (self._finished and self._enqueued) and not self._can_copy():
                        self._moved.wait(_POLL_S if poll else None)
        self._release()
        self.hold()

    def hold(self) -> None:
        """Let the current stream of each device go on only behind the copies from there."""
        for lane, mark in self._ends.items():
            lane.hold(mark)

    def _can_copy(self) -> bool:
        return self._room is not None and self._next < len(self.program.units)

    def _copy_next(self) -> int:
        """Copy one unit; return its bytes, or 0 when no unit is left to begin."""
        with self._moved:
            number = self._next
            if number >= len(self.program.units):
                return 0
            self._next += 1
            self._busy += 1
            assert self._room is not None
            room = self._room
        unit = self.program.units[number]
        try:
            self._sums[unit.parts] = unit.copy(room)
        except Exception as error:  # noqa: BLE001 - `run` raises it, from any thread
            self.end(error=error)
            return 0
        finally:
            with self._moved:
                self._busy -= 1
                self._moved.notify_all()
        written = self.program.written(unit.pieces, self.versions)
        with self._moved:
            self.copied_bytes += unit.nbytes
            self._left -= 1
            last = self._left == 0
        if written:
            self.end(torn=written)
        elif last:
            self._conclude()
        return max(unit.nbytes, 1)

    def _conclude(self) -> None:
        """Check the sample again, after every unit in host memory is copied."""
        torn = self.sample.torn(self._room) if self.sample and self._room else ""
        with self._moved:
            if not self._finished:
                self.torn = self.torn or torn
            self._finished = True
            self._released = self._released or not self.program.carried
            self._moved.notify_all()

    def _await(self, done: Callable[[], bool]) -> None:
        with self._moved:
            self._moved.wait_for(done)

    def _enqueue(self) -> list[tuple[Mark, list[int]]]:
        """Enqueue copies of the device tensors on the lanes; return each mark with its units."""
        groups: list[tuple[Mark, list[int]]] = []
        room, members, nbytes = self._room, list[int](), 0
        lane: Lane | None = None
        for lane, ready in self._ready.items():
            lane.begin(ready)
        for i, unit in enumerate(self.program.carried):
            if members and (unit.lane is not lane or nbytes >= _GROUP_BYTES):
                assert lane is not None
                groups.append((lane.mark(), members))
                members, nbytes = [], 0
            assert room is not None
            lane = unit.lane
            lane.copy(unit.source, host_room(unit.source, room.view, unit.at))
            members.append(i)
            nbytes += unit.nbytes
        if members and lane is not None:
            groups.append((lane.mark(), members))
        with self._moved:
            self._ends = {lane: lane.mark() for lane in self._ready}
            self._enqueued = True
            self._moved.notify_all()
        return groups

    def _collect(self, mark: Mark, members: list[int]) -> None:
        """Wait until a group of copies has arrived, and checksum it."""
        mark.synchronize()
        assert self._room is not None
        for i in members:
            unit = self.program.carried[i]
            self._sums[unit.parts] = unit.arrived(self._room)
            self.copied_bytes += unit.nbytes

    def _look_back(self) -> None:
        """Compare the sample of the device tensors with the copy."""
        if self._look is None or self._room is None or self.torn:
            return
        torn = self._look.torn(self._room)
        with self._moved:
            self.torn = self.torn or torn

    def _release(self) -> None:
        """Check, once, that no device tensor was written to; after that, tensors may change.

        A write that the training stream had been given before it was held back may have run before
        the copy. A write given afterwards cannot.
        """
        with self._moved:
            if self._released:
                return
            self._released = True
            for unit in self.program.carried:
                if name := self.program.written(unit.pieces, self.versions):
                    self.torn = self.torn or name
                    return
