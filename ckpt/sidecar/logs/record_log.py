"""A record log: segments that are appended to, dropped from the front, and recovered.

The segment files are the only copy of the records in memory; beside them there are four bytes per
record for its offset. An append is one copy and a checksum. A truncation drops whole segments and
records the index of the first kept record. A first segment that is mostly dead is written again,
which costs less than the truncated part, so the cost per record stays constant.
"""

from __future__ import annotations

import hashlib
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path

from typing_extensions import Buffer

from holdfast.ckpt.errors import CapacityError
from holdfast.ckpt.sidecar.core.wire import PART_BYTES
from holdfast.ckpt.sidecar.logs.frames import Frames, framed_bytes, pack, sound
from holdfast.ckpt.sidecar.logs.segment import (
    HEADER_BYTES,
    SEGMENT_SUFFIX,
    UNFINISHED_SUFFIX,
    Segment,
    SegmentHead,
)

SEGMENT_BYTES = 4 << 20
GRAIN_BYTES = 64 << 10
"""Size of a log's first segment; later ones are as large as the log's contents, up to a bound."""

MAX_RECORD_BYTES = PART_BYTES // 2
MAX_LOG_BYTES = 256 << 20
_HOLES_AT_ONCE = 1024


class RecordLog:
    """Records from ``base`` on of the log ``name`` that a worker on ``node`` writes.

    ``reserve`` is called before each file is made and raises ``CapacityError`` if all logs
    together would outgrow their bound.
    """

    def __init__(self, segments: list[Segment], *, reserve: Callable[[int], None]) -> None:
        head = segments[-1].head
        self.name, self.node, self.birth = head.name, head.node, head.birth
        self.base = max(each.base() for each in segments)
        self._segments, self._reserve = segments, reserve
        self._number = max(_number(each.path) for each in segments)
        self.closed = False

    @classmethod
    def create(
        cls,
        directory: Path,
        name: str,
        *,
        node: str,
        first: int = 0,
        birth: int | None = None,
        reserve: Callable[[int], None] = lambda _nbytes: None,
    ) -> RecordLog:
        """Make an empty log whose next record has index ``first``; raises ``CapacityError``."""
        reserve(GRAIN_BYTES)
        head = SegmentHead(name=name, node=node, birth=birth or time.time_ns(), first=first)
        path = directory / f"{_digest(head)}-{0:08x}{SEGMENT_SUFFIX}"
        segment = Segment.create(path, head, size_bytes=GRAIN_BYTES, base=first)
        segment.publish()
        return cls([segment], reserve=reserve)

    @property
    def end(self) -> int:
        """Index of the next record."""
        return self._segments[-1].end

    @property
    def nbytes(self) -> int:
        """Bytes of its files."""
        return sum(each.nbytes for each in self._segments)

    def bytes_from(self, index: int) -> int:
        """Return the bytes of the frames of records from ``index`` on."""
        return sum(
            each.bytes_from(max(index, each.first)) for each in self._segments if each.end > index
        )

    # -- writing ---------------------------------------------------------------------------------

    def append(self, records: Sequence[Buffer | None]) -> None:
        """Add all of ``records``, or none. Raises ``CapacityError`` when there is no room."""
        sizes = [framed_bytes(record) for record in records]
        at = 0
        for segment, count in self._places(sizes):
            segment.append(records[at : at + count])
            segment.publish()
            at += count

    def append_frames(self, frames: Frames) -> None:
        """Add frames from `frames` or `parse`, which must begin at the log's end."""
        spans = frames.spans()
        sizes = [end - start for start, end in spans]
        at = 0
        for segment, count in self._places(sizes):
            lo = frames.starts[at]
            part = memoryview(frames.data)[lo : spans[at + count - 1][1]]
            starts = [start - lo for start in frames.starts[at : at + count]]
            segment.append_frames(Frames(frames.first + at, part, starts))
            segment.publish()
            at += count

    def _places(self, sizes: Sequence[int]) -> list[tuple[Segment, int]]:
        """Return the segments for the next records, with their counts; make new ones if needed."""
        if (largest := max(sizes, default=0)) > MAX_RECORD_BYTES:
            raise CapacityError(
                f"log {self.name!r}: a record of {largest:,} bytes is larger than the "
                f"{MAX_RECORD_BYTES:,} that a record may have; cut it into several"
            )
        last = self._segments[-1]
        counts = _fitting(sizes, room=last.room, next_room=SEGMENT_BYTES - HEADER_BYTES)
        places, done = [(last, counts[0])], counts[0]
        made: list[Segment] = []
        try:
            for count in counts[1:]:
                need = sum(sizes[done : done + count])
                made.append(self._make(last.end + done, need_bytes=need, made=made))
                places.append((made[-1], count))
                done += count
        except (CapacityError, OSError):
            for each in made:
                each.remove()
            raise
        self._segments += made
        if made and last.end == last.first and counts[0] == 0:
            self._segments.remove(last)
            last.remove()
        return [(segment, count) for segment, count in places if count]

    def _make(self, first: int, *, need_bytes: int, made: Sequence[Segment] = ()) -> Segment:
        """Return a new segment, not yet published, as large as the log's contents."""
        used_bytes = self.nbytes + sum(each.nbytes for each in made)
        wanted = max(need_bytes + HEADER_BYTES, min(self.bytes_from(self.base), SEGMENT_BYTES))
        size = -(-wanted // GRAIN_BYTES) * GRAIN_BYTES
        if used_bytes + size > MAX_LOG_BYTES:
            raise CapacityError(
                f"log {self.name!r} holds {used_bytes:,} bytes and may hold {MAX_LOG_BYTES:,}: "
                "truncate what has been consumed"
            )
        self._reserve(size)
        self._number += 1
        head = SegmentHead(name=self.name, node=self.node, birth=self.birth, first=first)
        path = self._segments[-1].path.with_name(
            f"{_digest(head)}-{self._number:08x}{SEGMENT_SUFFIX}"
        )
        return Segment.create(path, head, size_bytes=size, base=self.base)

    def truncate(self, keep_from: int) -> None:
        """Drop the records before ``keep_from``; beyond the end, the log continues from there."""
        if keep_from <= self.base:
            return
        if keep_from > self.end:
            fresh = self._make(keep_from, need_bytes=0)
            fresh.keep_from(keep_from)
            fresh.publish()
            self._segments.append(fresh)
        self.base = keep_from
        self._segments[-1].keep_from(keep_from)
        while len(self._segments) > 1 and self._segments[1].first <= keep_from:
            self._segments.pop(0).remove()
        self._compact()

    def _compact(self) -> None:
        """Write the first segment again if more than half of its file is dead."""
        old = self._segments[0]
        dead = old.bytes_from(old.first) - old.bytes_from(max(self.base, old.first))
        if old.nbytes <= GRAIN_BYTES or dead * 2 <= old.nbytes:
            return
        first = max(self.base, old.first)
        try:
            fresh = self._make(first, need_bytes=old.bytes_from(first))
        except CapacityError:
            return  # keep the old segment: it is still correct
        if first < old.end:
            data, starts = old.read(first, limit_bytes=old.nbytes)
            fresh.append_frames(Frames(first, data, starts))
        fresh.publish()
        self._segments[0] = fresh
        old.remove()

    def cut(self, index: int) -> None:
        """Remove the records from ``index`` on; none may lie before the first segment."""
        while len(self._segments) > 1 and self._segments[-1].first >= index:
            self._segments.pop().remove()
        last = self._segments[-1]
        last.cut(max(index, last.first))
        last.keep_from(self.base)

    def remove(self) -> None:
        """Remove all files."""
        self.closed = True
        for each in self._segments:
            each.remove()

    def close(self) -> None:
        """Unmap the files, which stay."""
        self.closed = True
        for each in self._segments:
            each.close()

    # -- reading ---------------------------------------------------------------------------------

    def frames(self, index: int, *, limit_bytes: int = PART_BYTES) -> Frames:
        """Return frames of records from ``index`` on, every one checked, damaged ones as holes.

        Returns as many as lie in one segment and fit into ``limit_bytes``, at least one if there is
        one.
        """
        data, starts = self.raw(index, limit_bytes=limit_bytes)
        return sound(data, index, starts)

    def raw(self, index: int, *, limit_bytes: int = PART_BYTES) -> tuple[bytes, Sequence[int]]:
        """Return the same frames unchecked: quick, for use under a lock."""
        if not self.base <= index < self.end:
            return b"", ()
        firsts = [each.first for each in self._segments]
        number = bisect_right(firsts, index) - 1
        segment = self._segments[max(number, 0)]
        if segment.first <= index < segment.end:
            return segment.read(index, limit_bytes=limit_bytes)
        until = self._segments[number + 1].first  # a file between was lost
        missing = pack([None] * min(until - index, _HOLES_AT_ONCE), index)
        return bytes(missing.data), missing.starts

    def crc(self, index: int) -> int | None:
        """Return the stored checksum of a record, None if there is none."""
        for segment in self._segments:
            if max(segment.first, self.base) <= index < segment.end:
                return segment.crc(index)
        return None


def load_logs(
    directory: Path, *, reserve: Callable[[int], None] = lambda _nbytes: None
) -> list[RecordLog]:
    """Open the logs that an earlier process left; remove useless files."""
    for path in directory.glob(f"*{UNFINISHED_SUFFIX}"):
        path.unlink()
    by_log: dict[tuple[str, str, int], list[Segment]] = {}
    for path in sorted(directory.glob(f"*{SEGMENT_SUFFIX}")):
        if (segment := Segment.open(path)) is None:
            path.unlink()
            continue
        head = segment.head
        by_log.setdefault((head.node, head.name, head.birth), []).append(segment)
    newest: dict[tuple[str, str], RecordLog] = {}
    for (node, name, _), segments in sorted(by_log.items()):
        if (older := newest.get((node, name))) is not None:
            older.remove()
        newest[node, name] = RecordLog(_chain(segments), reserve=reserve)
    return list(newest.values())


def _chain(segments: list[Segment]) -> list[Segment]:
    """Return the segments in order, without those that another has replaced."""
    base = max(each.base() for each in segments)
    segments.sort(key=lambda each: (each.first, _number(each.path)))
    kept: list[Segment] = []
    for at, segment in enumerate(segments):
        after = segments[at + 1 :]
        if after and (after[0].first <= max(base, segment.first)):
            segment.remove()
        else:
            kept.append(segment)
    return kept


def _fitting(sizes: Sequence[int], *, room: int, next_room: int) -> list[int]:
    """Return the number of records for the present segment, and for each new one after it."""
    counts, left = [0], room
    for size in sizes:
        if size > left:
            counts.append(0)
            left = max(next_room, size)
        counts[-1] += 1
        left -= size
    return counts


def _digest(head: SegmentHead) -> str:
    text = f"{head.node}\0{head.name}\0{head.birth}"
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def _number(path: Path) -> int:
    return int(path.stem.rpartition("-")[2], 16)
