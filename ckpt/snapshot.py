"""Snapshots that hide under compute: a thread copies the state into a slot of the sidecar.

Parameters and optimizer state do not change between two optimizer steps, so they are copied in
the background during the next forward and backward; what may change there (buffers, loose
tensors, plain values) is copied before `Snapshotter.snapshot` returns. A pre-hook of every
optimizer waits for the copy. A tensor written to in spite of that is noticed by its version
counter, and the snapshot is given up, never torn. (Writes that bypass the counter, through
``.data`` or a fused optimizer that was captured without its hook, cannot be noticed.)
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ckpt.arena import SlotFile
from ckpt.block import index_offset
from ckpt.capture import CapturePlan, FlatState, Gather, flatten
from ckpt.copying import copy_out, version_of
from ckpt.errors import CkptError, GivenUpError, StoreError
from ckpt.index import ShardIndex, encode_index
from ckpt.maps import SlotMaps
from ckpt.target import CheckpointTarget
from ckpt.world import BlockEntry

_log = logging.getLogger(__name__)

ACQUIRE_TIMEOUT_S = 30.0
_POLL_S = 0.005
_ANY_CRC = 0xFFFFFFFF


class Grant(Protocol):
    """A slot to write: what ``SidecarClient.acquire`` returns."""

    @property
    def slot_id(self) -> int: ...
    @property
    def path(self) -> str: ...
    @property
    def capacity(self) -> int: ...


class SlotOwner(Protocol):
    """What a Snapshotter needs of a ``SidecarClient``."""

    def acquire(
        self, *, generation: int, step: int, rank: int, size_bytes: int, timeout_s: float
    ) -> Grant: ...

    def seal(
        self, *, slot_id: int, entry: BlockEntry, persist: CheckpointTarget | None = None
    ) -> None: ...

    def abandon(self, slot_id: int) -> None: ...


@dataclass(slots=True, kw_only=True)
class SnapshotStats:
    """Running totals. ``stall_s`` is what the training thread waited, ``copy_s`` the thread's work.

    ``torn`` names the tensor that was written to under the copy of the last discarded snapshot.
    """

    taken: int = 0
    discarded: int = 0
    torn: str | None = None
    stall_s: float = 0.0
    copy_s: float = 0.0
    wait_s: float = 0.0
    bytes: int = 0
    last_step: int = -1
    last_copy_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    step: int
    persist: CheckpointTarget | None
    flat: FlatState
    plan: CapturePlan
    sources: Sequence[torch.Tensor]
    versions: Sequence[int | None]
    ready: torch.cuda.Event | None = None


class _Torn(Exception):
    """A tensor changed while it was copied."""


@dataclass(slots=True)
class _Hooks:
    handles: dict[int, RemovableHandle] = field(default_factory=dict)

    def watch(self, optimizer: Optimizer, before_step: Callable[[], None]) -> None:
        if id(optimizer) not in self.handles:
            self.handles[id(optimizer)] = optimizer.register_step_pre_hook(lambda *_: before_step())

    def remove(self) -> None:
        for handle in self.handles.values():
            handle.remove()
        self.handles.clear()


class Snapshotter:
    """Takes the snapshots of one rank in one generation; not safe to share between threads.

    ``gather`` is collective over the ranks (it is called when the state's shape is new).
    ``poll`` is called while the training thread waits for a copy and may raise to stop waiting.
    ``checkpoint`` is where snapshots with ``persist`` are written to.
    """

    def __init__(  # noqa: PLR0913 - where a rank stands takes four
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
    ) -> None:
        self._client, self._gather, self._checkpoint, self._poll = client, gather, checkpoint, poll
        self._run, self._generation = run, generation
        self._rank, self._world_size = rank, world_size
        self._maps = SlotMaps() if maps is None else maps
        self._owns_maps = maps is None
        self._plan: CapturePlan | None = None
        self._pending: Future[None] | None = None
        self._closing = threading.Event()
        self._hooks = _Hooks()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="ckpt-snapshot")
        self._stream: torch.cuda.Stream | None = None
        self.stats = SnapshotStats()

    def snapshot(self, state: Mapping[str, Any], step: int, *, persist: bool = False) -> None:
        """Start the snapshot of ``step``; returns as soon as nothing the caller may do harms it.

        Waits first for the copy under way, and raises what it raised. With ``persist`` the
        sidecar also writes it to the checkpoint root once it is protected.
        """
        if persist and self._checkpoint is None:
            raise StoreError(f"step {step} is to be persisted, but no checkpoint root was given")
        self.fence()
        started = time.perf_counter()
        flat = flatten(state)
        for parts in flat.optimizers.values():
            self._hooks.watch(parts.optimizer, self.fence)
        if self._plan is None or not self._plan.still_valid(flat):
            self._plan = CapturePlan.build(
                flat, rank=self._rank, world_size=self._world_size, gather=self._gather
            )
        job = self._prepare(flat, step=step, persist=self._checkpoint if persist else None)
        self._pending = self._pool.submit(self._copy, job)
        self.stats.stall_s += time.perf_counter() - started

    def fence(self) -> None:
        """Wait until no copy is under way; raise what it raised (``FencedError``, ``PeerError``).

        A snapshot that was discarded because the state changed raises nothing: see ``stats``.
        """
        pending = self._pending
        if pending is None:
            return
        started = time.perf_counter()
        try:
            while not pending.done():
                wait([pending], timeout=_POLL_S if self._poll else None)
                if self._poll:
                    self._poll()
        finally:
            self.stats.stall_s += time.perf_counter() - started
        self._pending = None
        pending.result()

    def close(self, *, timeout_s: float = 5.0) -> None:
        """Give up the copy under way and let go of the state; raises nothing."""
        self._closing.set()
        self._hooks.remove()
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._pending is not None and not wait([self._pending], timeout=timeout_s).done:
            _log.warning("the snapshot thread is still busy after %g s", timeout_s)
        elif self._owns_maps:
            self._maps.close()
        self._pending = self._plan = None

    def _prepare(self, flat: FlatState, *, step: int, persist: CheckpointTarget | None) -> _Job:
        assert self._plan is not None
        sources: list[torch.Tensor] = []
        versions: list[int | None] = []
        on_cuda = False
        for piece, source in zip(self._plan.pieces, self._plan.sources(flat), strict=True):
            on_cuda |= source.is_cuda
            loose = piece.fqn in flat.volatile
            sources.append(source.detach().clone() if loose else source)
            versions.append(None if loose else version_of(source))
        ready = None
        if on_cuda:
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record()
        return _Job(
            step=step,
            persist=persist,
            flat=flat,
            plan=self._plan,
            sources=sources,
            versions=versions,
            ready=ready,
        )

    def _copy(self, job: _Job) -> None:
        """Run on the thread: take the snapshot, unless another rank gave its step up."""
        try:
            self._take(job)
        except GivenUpError as error:
            self.stats.discarded += 1
            self.stats.torn = "the state of another rank"
            _log.warning("snapshot of step %d discarded: %s", job.step, error)

    def _take(self, job: _Job) -> None:
        """Acquire a slot, copy, checksum, seal."""
        started = time.perf_counter()
        grant = self._client.acquire(
            generation=self._generation,
            step=job.step,
            rank=self._rank,
            size_bytes=self._block_bytes(job),
            timeout_s=ACQUIRE_TIMEOUT_S,
        )
        acquired = time.perf_counter()
        self.stats.wait_s += acquired - started
        try:
            with self._after(job.ready):
                entry = self._fill(job, self._maps.open(grant.path))
        except BaseException as error:
            with contextlib.suppress(CkptError):
                self._client.abandon(grant.slot_id)
            if not isinstance(error, _Torn):
                raise
            self._discard(job, str(error))
            return
        self._client.seal(slot_id=grant.slot_id, entry=entry, persist=job.persist)
        self.stats.taken += 1
        self.stats.bytes += entry.payload_bytes
        self.stats.last_step = job.step
        self.stats.last_copy_s = time.perf_counter() - acquired
        self.stats.copy_s += self.stats.last_copy_s

    def _discard(self, job: _Job, fqn: str) -> None:
        if self._closing.is_set():
            return
        self.stats.discarded += 1
        self.stats.torn = fqn
        _log.warning(
            "snapshot of step %d discarded: %s was written to while it was copied; change the "
            "state only through the tracked optimizers, or call fence() before",
            job.step,
            fqn,
        )

    def _fill(self, job: _Job, slot: SlotFile) -> BlockEntry:
        payload = slot.block(job.plan.payload_bytes)
        crcs: list[int] = []
        work = zip(job.plan.pieces, job.sources, job.versions, strict=True)
        for piece, source, before in work:
            if self._closing.is_set():
                raise _Torn("(closed)")
            crcs.append(copy_out(source, payload[piece.at : piece.at + piece.nbytes]))
            if before is not None and version_of(source) != before:
                raise _Torn(piece.fqn)
        return slot.finish(self._index(job, crcs))

    def _index(self, job: _Job, crcs: Sequence[int]) -> ShardIndex:
        return job.plan.index(
            job.flat, crcs, run=self._run, step=job.step, generation=self._generation
        )

    def _block_bytes(self, job: _Job) -> int:
        """Return an upper bound of the block, before the checksums are known."""
        widest = [_ANY_CRC] * len(job.plan.pieces)
        index = encode_index(self._index(job, widest))
        return index_offset(job.plan.payload_bytes) + len(index)

    @contextlib.contextmanager
    def _after(self, ready: torch.cuda.Event | None) -> Iterator[None]:
        """Copy from the device on a stream of our own, once the tensors are complete."""
        if ready is None:
            yield
            return
        self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._stream.wait_event(ready)
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()
