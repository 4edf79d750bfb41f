"""Copying of log records to their holders: batched, each holder separately, at a bounded delay.

Each holder has a thread and a connection of its own, so a slow or dead one delays neither appends
nor other holders. The state of a holder is requested once per generation. From then on only new
records are sent, `CopyTiming.delay_s` after the append at the latest or as soon as
`CopyTiming.delay_bytes` are waiting. Logs that do not change cost nothing.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

import msgspec

from holdfast.ckpt.errors import CkptError, FencedError, NotFoundError
from holdfast.ckpt.memory.records import SidecarPeer, SnapshotWorld
from holdfast.ckpt.sidecar.core.core import Core
from holdfast.ckpt.sidecar.core.messages import LogCopy, LogState, unparse
from holdfast.ckpt.sidecar.logs.frames import sound
from holdfast.ckpt.sidecar.logs.places import holders_of
from holdfast.ckpt.sidecar.logs.record_log import MAX_RECORD_BYTES, RecordLog
from holdfast.ckpt.transport import Client
from holdfast.ckpt.types import Json

_log = logging.getLogger(__name__)

SEND_BYTES = 1 << 20
MAX_COPY_BYTES = SEND_BYTES + MAX_RECORD_BYTES + 4096
CALL_TIMEOUT_S = 5.0
_PAUSE_S = (0.01, 0.5)
_MARKS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyTiming:
    """The delays of sending; ``late_s`` after the append, records count as late."""

    delay_s: float = 0.05
    delay_bytes: int = 1 << 20
    late_s: float = 1.0


class Transfer:
    """Brings one log to one other sidecar; ``at`` is the index it has reached, None if unknown."""

    def __init__(self, core: Core, log: RecordLog, *, generation: int, owner: bool) -> None:
        self._core, self._log, self._generation, self._owner = core, log, generation, owner
        self.at: int | None = None
        self._base = -1

    def is_pending(self) -> bool:
        """Return whether anything is left to send; call it under the lock."""
        return self.at is None or self.at < self._log.end or self._base < self._log.base

    def step(self, client: Client) -> LogState:
        """Send one message and return the answer.

        Raises ``FencedError`` when the generation is over, ``NotFoundError`` when the log was
        dropped here, ``PeerError`` when the other sidecar cannot take it now.
        """
        core, log = self._core, self._log
        with core.lock:
            if core.book.generation != self._generation:
                raise FencedError(f"generation {self._generation} is over")
            if log.closed:
                raise NotFoundError(f"log {log.name!r} of node {log.node} was dropped here")
            base = log.base
            at = log.end if self.at is None else max(self.at, base)
            met = self.at is not None
            data, starts = log.raw(at if met else log.end, limit_bytes=SEND_BYTES)
        frames = sound(data, at, starts)
        body = LogCopy(
            node=log.node,
            name=log.name,
            birth=log.birth,
            base=base,
            at=at,
            count=len(frames.starts),
            generation=self._generation,
            owner=self._owner,
        )
        answer, _ = client.call("log_copy", unparse(body), [frames.data] if starts else [])
        state = msgspec.convert(answer, LogState)
        with core.lock:
            core.counters["log_bytes_sent"] += len(data)
            self._note(state, base=base, sent=frames.end, met=met)
        return state

    def _note(self, state: LogState, *, base: int, sent: int, met: bool) -> None:
        if self._log.closed:
            return
        self._base = base
        if state.birth != self._log.birth:
            self.at = base  # nothing of this log yet
        elif met:
            self.at = min(state.end, sent)
        elif state.end <= state.base:
            self.at = state.end
        else:
            same = state.last_crc == self._log.crc(state.end - 1)
            self.at = state.end if same else base


@dataclass(slots=True, kw_only=True, eq=False)
class Owned:
    """A log written on this node, and the times of its unprotected records: (end, time) marks."""

    log: RecordLog
    marks: deque[tuple[int, float]] = field(default_factory=deque)
    late: bool = False
    settled: bool = False

    def mark(self, now_s: float, *, grain_s: float) -> None:
        """Record an append; marks closer than ``grain_s`` are joined, and their number bounded."""
        if self.marks and now_s - self.marks[-1][1] < grain_s:
            self.marks[-1] = (self.log.end, self.marks[-1][1])
            return
        self.marks.append((self.log.end, now_s))
        if len(self.marks) > _MARKS:
            pairs = list(self.marks)
            joined = [(b[0], a[1]) for a, b in zip(pairs[::2], pairs[1::2], strict=False)]
            self.marks = deque(joined + pairs[len(joined) * 2 :])

    def since_s(self, index: int) -> float | None:
        """Return when the oldest of the records from ``index`` on was appended."""
        return next((at_s for end, at_s in self.marks if end > index), None)


@dataclass(slots=True, kw_only=True, eq=False)
class _Way:
    transfer: Transfer
    owned: Owned
    changed_s: float | None = None
    retry_s: float = 0.0
    pause_s: float = _PAUSE_S[0]


class Copier:
    """Sends this node's logs to one holder, in a separate thread."""

    def __init__(
        self,
        core: Core,
        peer: SidecarPeer,
        *,
        generation: int,
        timing: CopyTiming,
        moved: Callable[[Owned], None],
    ) -> None:
        self._core, self._peer, self._generation = core, peer, generation
        self._timing, self._moved = timing, moved
        self.error = ""
        self._ways: dict[str, _Way] = {}
        self._bell = threading.Event()
        self._idle = True
        self._closed = False
        threading.Thread(target=self._work, name=f"logs-{peer.node}", daemon=True).start()

    def add(self, owned: Owned) -> None:
        """Send a log from now on. This method and those below are called under the lock."""
        transfer = Transfer(self._core, owned.log, generation=self._generation, owner=True)
        self._ways[owned.log.name] = _Way(transfer=transfer, owned=owned)
        self._bell.set()

    def remove(self, name: str) -> None:
        """Stop sending a log."""
        self._ways.pop(name, None)

    def has(self, name: str) -> int | None:
        """Return the index up to which the holder has a log; None if it is unknown."""
        way = self._ways.get(name)
        return way.transfer.at if way else None

    def appended(self, name: str) -> None:
        """Record that a log changed; wakes the thread only where that changes its work."""
        way = self._ways[name]
        if self._idle or self._waiting_bytes(way) >= self._timing.delay_bytes:
            self._bell.set()

    def close(self) -> None:
        """End the thread; a call in progress ends by its own deadline."""
        self._closed = True
        self._bell.set()

    def _waiting_bytes(self, way: _Way) -> int:
        return way.owned.log.bytes_from(way.transfer.at or 0)

    def _due_s(self, way: _Way, now_s: float) -> float | None:
        """Return when a log is due to be sent, None where nothing is to send."""
        transfer = way.transfer
        if not transfer.is_pending():
            way.changed_s = None
            return None
        if way.changed_s is None:
            appended_s = way.owned.since_s(transfer.at or 0)
            way.changed_s = now_s if appended_s is None else appended_s
        at_once = transfer.at is None or self._waiting_bytes(way) >= self._timing.delay_bytes
        due_s = 0.0 if at_once else way.changed_s + self._timing.delay_s
        return max(due_s, way.retry_s)

    def _next(self) -> tuple[_Way | None, float | None]:
        """Return the log to send now, or how long to wait for one (None: until woken)."""
        now_s = monotonic()
        ways = [(self._due_s(way, now_s), way) for way in self._ways.values()]
        due = [(at_s, way) for at_s, way in ways if at_s is not None]
        self._idle = not due
        if not due:
            return None, None
        at_s, way = min(due, key=lambda each: each[0])
        return (way, 0.0) if at_s <= now_s else (None, at_s - now_s)

    def _work(self) -> None:
        client = Client(self._peer.address, self._core.key, timeout_s=CALL_TIMEOUT_S, watch=True)
        try:
            while not self._closed:
                with self._core.lock:
                    way, wait_s = self._next()
                if way is None:
                    self._bell.wait(wait_s)
                    self._bell.clear()
                    continue
                self._send(client, way)
        finally:
            client.close()

    def _send(self, client: Client, way: _Way) -> None:
        before = way.transfer.at
        try:
            way.transfer.step(client)
        except FencedError as error:
            with self._core.lock:
                if self._core.book.generation != self._generation:
                    self._closed = True
            self._failed(way, str(error))
        except (CkptError, msgspec.ValidationError) as error:
            self._failed(way, str(error))
        else:
            if before is not None and (way.transfer.at or 0) <= before and self._is_stuck(way):
                self._failed(way, "the holder does not accept the next records")
                return
            self.error = ""
            with self._core.lock:
                way.retry_s, way.pause_s, way.changed_s = 0.0, _PAUSE_S[0], None
                self._moved(way.owned)

    def _is_stuck(self, way: _Way) -> bool:
        with self._core.lock:
            return not way.owned.log.closed and way.transfer.is_pending()

    def _failed(self, way: _Way, reason: str) -> None:
        self.error = reason
        with self._core.lock:
            way.retry_s = monotonic() + way.pause_s
            way.pause_s = min(way.pause_s * 2, _PAUSE_S[1])
            self._core.counters["log_copies_failed"] += 1
            self._moved(way.owned)


class LogProtection:
    """The copies of the logs written on this node. Called under the core's lock."""

    def __init__(self, core: Core, timing: CopyTiming) -> None:
        self._core, self._timing = core, timing
        self._owned: dict[str, Owned] = {}
        self._copiers: dict[str, Copier] = {}
        self._awaited = 0

    def adopt(self, world: SnapshotWorld) -> None:
        """Bring every log to the holders of a new group; those of the old one keep theirs."""
        self.close()
        now_s = monotonic()
        for peer in holders_of(world, self._core.node):
            self._copiers[peer.node] = Copier(
                self._core,
                peer,
                generation=world.generation,
                timing=self._timing,
                moved=self._moved,
            )
        for owned in self._owned.values():
            owned.settled, owned.late = False, False
            owned.marks.clear()
            if owned.log.end > owned.log.base:
                owned.mark(now_s, grain_s=0.0)
            for copier in self._copiers.values():
                copier.add(owned)
            self._moved(owned)

    def add(self, log: RecordLog) -> None:
        """Register a log."""
        owned = self._owned[log.name] = Owned(log=log)
        for copier in self._copiers.values():
            copier.add(owned)

    def remove(self, name: str) -> None:
        """Forget a log that is dropped."""
        self._owned.pop(name, None)
        for copier in self._copiers.values():
            copier.remove(name)

    def changed(self, log: RecordLog) -> None:
        """Record that a log was appended to or truncated."""
        owned = self._owned[log.name]
        if owned.marks or log.end > self.protected(log):
            owned.mark(monotonic(), grain_s=self._timing.delay_s / 2)
        for copier in self._copiers.values():
            copier.appended(log.name)
        self._note_late(owned)

    def protected(self, log: RecordLog) -> int:
        """Return the index up to which the records of a log are on every copy."""
        world = self._core.book.world
        if world is None:
            return log.base
        reached = [copier.has(log.name) for copier in self._copiers.values()]
        if not reached:
            return log.end if world.parity == 0 else log.base
        return max(min(at or 0 for at in reached), log.base)

    def is_settled(self, name: str) -> bool:
        """Return whether all of a log was on every copy at some time of this generation."""
        owned = self._owned.get(name)
        return owned is not None and owned.settled

    def waiting(self, count: int) -> None:
        """Count requests that wait (or, with a negative count, stopped waiting) for protection."""
        self._awaited += count

    def close(self) -> None:
        """Stop all sending."""
        for copier in self._copiers.values():
            copier.close()
        self._copiers.clear()

    def status(self) -> dict[str, Json]:
        """Return the lag of each log's copies, and the holders with errors."""
        return {
            "log_lag": {name: self._lag(owned) for name, owned in sorted(self._owned.items())},
            "log_errors": {node: c.error for node, c in self._copiers.items() if c.error},
        }

    def _lag(self, owned: Owned) -> dict[str, Json]:
        log = owned.log
        at = min(self.protected(log), log.end)
        since_s = owned.since_s(at) if at < log.end else None
        return {
            "records": log.end - at,
            "bytes": log.bytes_from(at),
            "oldest_s": round(monotonic() - since_s, 3) if since_s is not None else 0.0,
        }

    def _moved(self, owned: Owned) -> None:
        """Record that a copy has grown, or that sending failed."""
        if owned.log.closed:
            return
        at = self.protected(owned.log)
        self._note_late(owned)
        while owned.marks and owned.marks[0][0] <= at:
            owned.marks.popleft()
        if at >= owned.log.end:
            owned.settled, owned.late = True, False
        if self._awaited:
            self._core.changed()

    def _note_late(self, owned: Owned) -> None:
        """Count, once until it has caught up, that a log's records are not copied in time."""
        late = owned.marks and monotonic() - owned.marks[0][1] > self._timing.late_s
        if late and not owned.late and self._copiers:
            owned.late = True
            self._core.counters["log_late"] += 1
            _log.warning("log %r has records that not every copy has in time", owned.log.name)
