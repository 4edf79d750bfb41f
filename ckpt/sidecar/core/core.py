"""The shared state of a sidecar: the lock, the book, the slots, waiting requests, threads.

Handlers run on the transport's I/O thread under ``lock`` and must be quick. Long work goes to
`Core.submit` and takes the lock only to record its result.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from time import monotonic
from typing import Any, Protocol, TypeAlias

from holdfast.ckpt.errors import CkptError
from holdfast.ckpt.memory.arena import Arena, SlotFile
from holdfast.ckpt.memory.block import SlotState
from holdfast.ckpt.memory.hosts import host_id
from holdfast.ckpt.memory.records import BlockEntry
from holdfast.ckpt.meters import Meters
from holdfast.ckpt.parity.budget import FULL_IN_FLIGHT
from holdfast.ckpt.sidecar.core.book import (
    Book,
    CommitSnapshot,
    Instruction,
    Protect,
    Release,
    Snapshot,
    SnapshotKey,
)
from holdfast.ckpt.sidecar.core.messages import Message
from holdfast.ckpt.sidecar.core.slots import Slot, Slots
from holdfast.ckpt.transport import Request, RunKey

_log = logging.getLogger(__name__)

Op: TypeAlias = tuple[type[Message], Callable[[Request, Any], None]]
"""The type of a request's body and its handler."""

THREADS = 2
"""The number of threads for each kind of work."""


class WaitingWork(Enum):
    """The resource that long work waits for; one kind never delays another."""

    CPU = "cpu"
    UNMAP = "unmap"
    PEERS = "peers"
    STORE = "store"
    CHECKPOINT = "checkpoint"
    DISK = "disk"


class Refusable(Protocol):
    """The origin of work: a `Request`, or a part of this sidecar."""

    def refuse(self, error: Exception) -> None:
        """Accept the error as the answer."""


@dataclass(slots=True, kw_only=True)
class Waiter:
    """A request that waits for a state: ``attempt`` returns whether it has been answered."""

    request: Request
    deadline_s: float
    attempt: Callable[[], bool]
    expire: Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listeners:
    """The calls that follow what happens to a snapshot, under the lock, in this order."""

    commit: tuple[Callable[[Snapshot], None], ...] = ()
    protect: tuple[Callable[[Snapshot], None], ...] = ()
    release: tuple[Callable[[SnapshotKey], None], ...] = ()


class Core:
    """The shared state of a sidecar and the ways to change it.

    ``host`` names the memory that it can share; bytes of other hosts are sent. "" uses this
    machine's.
    """

    def __init__(self, arena: Arena, key: RunKey, *, run: str, node: str, host: str = "") -> None:
        self.arena, self.key, self.run, self.node = arena, key, run, node
        self.host = host or host_id()
        self.lock = threading.RLock()
        self.book = Book()
        self.slots = Slots(arena, unmap=self._unmap)
        self.counters: Counter[str] = Counter()
        self.meters = Meters()
        self.spoiled: set[BlockEntry] = set()
        self.durable = -1
        self.in_flight = FULL_IN_FLIGHT
        self._listeners = Listeners()
        self._waiters: list[Waiter] = []
        self._pools = {
            kind: ThreadPoolExecutor(THREADS, thread_name_prefix=kind.value) for kind in WaitingWork
        }

    def listen(self, listeners: Listeners) -> None:
        """Have ``listeners`` called from now on; they replace those before."""
        self._listeners = listeners

    def apply(self, instructions: list[Instruction]) -> None:
        """Execute the book's instructions, then try every waiting request again."""
        for each in instructions:
            match each:
                case CommitSnapshot(snapshot=snapshot):
                    for slot in self.slots.of(snapshot.key):
                        self.slots.commit(slot)
                    for listener in self._listeners.commit:
                        listener(snapshot)
                case Protect(snapshot=snapshot):
                    for listener in self._listeners.protect:
                        listener(snapshot)
                case Release(key=key):
                    self.release(key)
                    self.spoiled = {e for e in self.spoiled if (e.generation, e.step) != key}
                    for forget in self._listeners.release:
                        forget(key)
        self.changed()

    def release(self, key: SnapshotKey) -> None:
        """Free the slots of a snapshot; remove those beyond the needs of the ranks here.

        Slots being written stay until their writer seals, abandons or is fenced: it would otherwise
        write into a slot that was given to another.
        """
        for slot in self.slots.of(key):
            if slot.state is not SlotState.WRITING:
                self.slots.release(slot, surplus=self._is_surplus())

    def count(self, name: str, by: int = 1) -> None:
        """Add to a counter; for threads that do not hold the lock."""
        with self.lock:
            self.counters[name] += by

    def unpin(self, *slots: Slot) -> None:
        """Release pinned slots; requests may wait for those that become free."""
        with self.lock:
            freed = [self.slots.unpin(slot) for slot in slots]
            if any(freed):
                self.changed()

    def _is_surplus(self) -> bool:
        world = self.book.world
        ranks = world.rank_nodes.count(self.node) if world else 0
        keep = world.keep if world else 0
        return len(self.slots.all()) > ranks * (keep + self.in_flight)

    def changed(self) -> None:
        """Answer the waiting requests that can be answered now."""
        waiting, self._waiters = self._waiters, []
        for waiter in waiting:
            if not self._try(waiter):
                self._waiters.append(waiter)

    def wait(self, waiter: Waiter) -> None:
        """Keep a request until it can be answered or its deadline passes."""
        if not self._try(waiter):
            self._waiters.append(waiter)

    def tick(self) -> None:
        """Expire the requests whose deadline has passed."""
        with self.lock:
            now_s = monotonic()
            late = [each for each in self._waiters if each.deadline_s <= now_s]
            self._waiters = [each for each in self._waiters if each.deadline_s > now_s]
            for waiter in late:
                try:
                    waiter.expire()
                except CkptError as error:
                    waiter.request.refuse(error)

    @staticmethod
    def _try(waiter: Waiter) -> bool:
        try:
            return waiter.attempt()
        except CkptError as error:
            waiter.request.refuse(error)
            return True

    def submit(
        self,
        request: Request | None,
        work: Callable[[], None],
        *,
        kind: WaitingWork = WaitingWork.CPU,
    ) -> Future[None]:
        """Run ``work`` on a thread, without the lock.

        Its errors are the answer to ``request``; without a request they are logged.
        """

        def run() -> None:
            try:
                work()
            except CkptError as error:
                if request is None:
                    _log.warning("%s: %s", self.node, error)
                else:
                    request.refuse(error)
            except Exception as error:
                _log.exception("%s: background work failed", self.node)
                if request is not None:
                    request.refuse(CkptError(f"failed inside the sidecar: {error!r}"))
                raise

        return self._pools[kind].submit(run)

    def _unmap(self, file: SlotFile) -> None:
        try:
            self.submit(None, file.close, kind=WaitingWork.UNMAP)
        except RuntimeError:  # the pool is closed
            file.close()

    def close(self) -> None:
        """Accept no more work, without waiting for running work."""
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
