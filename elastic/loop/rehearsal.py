"""Rehearsal: run the training function up to its first step before the worker joins a generation.

A worker that joins late does everything for the first time: imports inside the function, lazy
initialization, memory from the kernel, the mappings of snapshots. During the re-form all other
ranks would wait for it. So it *rehearses* while they train: it calls the function in a world of
this process alone, with the size and rank that it expects to get, and leaves the function where the
first step would begin. The model is dropped, because the mesh of the real generation is another
object. The warm state of the process stays, and so do the bytes fetched meanwhile
(`holdfast.elastic.tracked.prefetch`).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, Final

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from holdfast.ckpt import torch_private
from holdfast.ckpt.errors import CkptError, InternalError
from holdfast.ckpt.memory.maps import SlotMaps
from holdfast.ckpt.recovery.prefetched import Ahead
from holdfast.ckpt.snapshot.store_gather import StoreGather
from holdfast.ckpt.state.flatten import flatten
from holdfast.ckpt.state.kinds import rebuilt
from holdfast.ckpt.state.restore import restore, wanted
from holdfast.ckpt.types import Json
from holdfast.elastic import randomness
from holdfast.elastic.channel.base import AgentChannel, Channel
from holdfast.elastic.channel.pulse import Pulse
from holdfast.elastic.config import Settings
from holdfast.elastic.events import StatePrefetched, WorkerRehearsed
from holdfast.elastic.groups import reform
from holdfast.elastic.groups.reform import AXES, GenerationWorld
from holdfast.elastic.groups.waits import WaitGuard
from holdfast.elastic.loop.run import Run
from holdfast.elastic.membership.records import GenerationRecord, Roster
from holdfast.elastic.planning.foresight import foresee, knows, others_train
from holdfast.elastic.seeding import kept, seed_all
from holdfast.elastic.tracked.handover import Wish
from holdfast.elastic.tracked.keeper import NOTHING, StateKeeper, with_own
from holdfast.elastic.tracked.prefetch import Donors, Prefetcher

LIMIT_S: Final = 600.0
"""Time limit of a rehearsal: after it, the function is left before its first step."""

SIGNAL: Final = signal.SIGRTMIN + 12
"""Signal that ends a rehearsal that takes too long, inside the function; scripts do not use it."""

_ROSTER_WAIT_S: Final = 5.0
_ROSTER_POLL_S: Final = 0.1
_PROTECTED_WAIT_S: Final = 10.0
_AGAIN_S: Final = 5.0


class _FirstStepError(InternalError):
    """The rehearsal is complete: the function has come to its first step."""


class _TooLongError(InternalError):
    """The rehearsal took too long."""


class StageWorld(GenerationWorld):
    """A world of this process alone with the size of a real one; its collectives do nothing."""

    def max_(self, tensor: torch.Tensor) -> None:
        """Leave the tensor as it is."""

    def sum_(self, tensor: torch.Tensor) -> None:
        """Leave the tensor as it is."""

    def gather(self, value: Json) -> list[Json]:
        """Return the same value for every rank."""
        return [value] * self.size

    def gather_plans(self, value: Json) -> list[Json]:
        """Same as `gather`."""
        return self.gather(value)

    def barrier(self) -> None:
        """Return at once: there is no other rank to wait for."""


@contextmanager
def stage(
    record: GenerationRecord, *, rank: int, guard: WaitGuard, axes: tuple[str, ...] = AXES
) -> Iterator[StageWorld]:
    """Make this process ``rank`` of ``record`` inside the context; collectives do nothing there.

    ``axes`` is as for `reform.form`.
    """
    store = torch_private.fake_store()
    reform.init_group(
        dist.Backend.FAKE,
        store=store,
        rank=rank,
        size=len(record.members),
        timeout_s=LIMIT_S,
    )
    try:
        mesh, data_mesh = reform.meshes_of(record.mesh, axes)
        groups = reform.groups_of(mesh, record.mesh, data_mesh=data_mesh)
        plans = StoreGather(store, rank=rank, size=len(record.members), poll=guard.check)
        yield StageWorld(
            record,
            rank=rank,
            guard=guard,
            mesh=mesh,
            data_mesh=data_mesh,
            groups=groups,
            plans=plans,
        )
    finally:
        reform.leave()


class StageKeeper(StateKeeper):
    """Passes the state to ``tracked`` instead of restoring it; ends before the first step."""

    tracked: Callable[[Mapping[str, Any]], None]

    def track(self, state: Mapping[str, Any], *, own: Mapping[str, Any] = NOTHING) -> None:
        """See `StateKeeper.track`."""
        whole = with_own(state, own, cursor=self.cursor)
        rebuilt.trust(flatten(whole, rank=self._world.rank).rebuilt.values())
        self.tracked(whole)

    def begin(self, count: int, *, prepare: Callable[[], Wish] | None = None) -> Wish:
        """End the rehearsal."""
        raise _FirstStepError(f"the first of {count} steps would begin now")


class WarmJoin:
    """Work of a worker that starts while others train, from its start to its first generation."""

    def __init__(
        self, channel: Channel, settings: Settings, *, pulse: Pulse, maps: SlotMaps
    ) -> None:
        self._channel, self._settings, self._pulse = channel, settings, pulse
        self._maps = maps
        self._prefetcher: Prefetcher | None = None
        self._generation = 0

    def prepare(self, body: Callable[[Run], Any]) -> None:
        """Rehearse ``body`` and prefetch its state while others train; otherwise do nothing.

        An error in the rehearsal is recorded in an event and does not end the worker. If it is
        permanent, it occurs again in the real call.
        """
        channel = self._channel
        if not self._settings.rehearse or not isinstance(channel, AgentChannel):
            return
        if not channel.rehearses:
            return
        channel.await_roster(after=0, timeout_s=_ROSTER_WAIT_S)
        if not others_train(roster := channel.roster()) or roster.generation is None:
            return
        self._generation = roster.generation.number
        began_s = time.perf_counter()
        event = WorkerRehearsed(rank=-1, world=0, error="", over=False, seconds=0.0)
        try:
            with kept(), closing(Donors(channel)) as donors:
                found = self._foresee(donors)
                if found is None:
                    return
                record, rank = found
                event = msgspec.structs.replace(event, rank=rank, world=len(record.members))
                self._rehearse(body, record, rank=rank, donors=donors)
        except (_FirstStepError, _TooLongError) as error:
            said = "" if isinstance(error, _FirstStepError) else str(error)
            event = msgspec.structs.replace(event, error=said)
        except Exception as error:  # noqa: BLE001 - recorded; in the real call it ends the worker
            said = f"{type(error).__name__}: {error}"
            event = msgspec.structs.replace(event, error=said, over=not self._goes_on())
        reform.leave()
        gc.collect()
        seconds = time.perf_counter() - began_s
        channel.emit(msgspec.structs.replace(event, seconds=seconds))

    def finish(self) -> Ahead | None:
        """Stop prefetching, now that the generation has begun; return the prefetched chunks."""
        prefetcher, self._prefetcher = self._prefetcher, None
        return None if prefetcher is None else prefetcher.stop()

    def _goes_on(self) -> bool:
        """Return whether the others still train; otherwise they may be waiting for this worker."""
        roster = self._channel.roster()
        generation = roster.generation
        same = generation is not None and generation.number == self._generation
        return same and others_train(roster) and not self._channel.stopped()

    def _own_roster(self) -> Roster:
        """Return the roster once this worker is in it: a forked one may begin before that."""
        channel, until_s = self._channel, time.monotonic() + _ROSTER_WAIT_S
        while True:
            version, roster = channel.roster_version(), channel.roster()
            known = knows(roster, incarnation=channel.incarnation)
            if known or not self._goes_on() or time.monotonic() > until_s:
                return roster
            channel.await_roster(after=version, timeout_s=_ROSTER_POLL_S)

    def _foresee(self, donors: Donors) -> tuple[GenerationRecord, int] | None:
        roster = self._own_roster()
        if roster.generation is None:
            return None
        world = roster.generation.snapshots
        step, until_s = -1, time.monotonic() + _PROTECTED_WAIT_S
        while step < 0 and self._goes_on() and time.monotonic() < until_s:
            step = donors.newest(world, wait_s=0.1)
        if step < 0:
            return None
        point = donors.locate(world, step)
        with donors.source(point, maps=self._maps) as source:
            sizes = {index.writer: index.payload_bytes for index in source.indexes()}
        return foresee(
            roster,
            incarnation=self._channel.incarnation,
            spec=self._settings.job(),
            point=point,
            sizes=sizes,
        )

    def _rehearse(
        self,
        body: Callable[[Run], Any],
        record: GenerationRecord,
        *,
        rank: int,
        donors: Donors,
    ) -> None:
        guard = WaitGuard(record.number, lambda: not self._goes_on())
        with stage(record, rank=rank, guard=guard, axes=self._settings.mesh.axes) as world:
            keeper = StageKeeper(
                self._channel, self._settings, world, pulse=self._pulse, maps=self._maps
            )
            size = len(record.members)
            keeper.tracked = lambda state: self._tracked(state, rank=rank, size=size, donors=donors)
            run = Run(self._channel, self._settings, world, pulse=self._pulse, keeper=keeper)
            try:
                with _limited(LIMIT_S):
                    _train_once(world)
                    seed_all(randomness.build_seed(self._settings.seed))
                    body(run)
            finally:
                run._close()

    def _tracked(self, state: Mapping[str, Any], *, rank: int, size: int, donors: Donors) -> None:
        """Prefetch the chunks for ``state``, then restore into it to warm the real restore."""
        generation = self._channel.roster().generation
        if generation is None:
            return
        point = donors.locate(generation.snapshots, donors.newest(generation.snapshots))
        with donors.source(point, maps=self._maps) as source:
            needed = wanted(state, source, rank=rank, world_size=size)
        self._prefetcher = prefetcher = Prefetcher(self._channel, maps=self._maps, wanted=needed)
        self._await(prefetcher)
        ahead = prefetcher.complete()
        if ahead is None or not self._goes_on():
            return  # do not request everything from others twice
        with contextlib.suppress(CkptError):  # training continues: the step may be released by now
            point = donors.locate(generation.snapshots, donors.newest(generation.snapshots))
            with donors.source(point, maps=self._maps, ahead=ahead) as source:
                restore(state, source, rank=rank, world_size=size)

    def _await(self, prefetcher: Prefetcher) -> None:
        began_s = time.perf_counter()
        found = prefetcher.await_current(goes_on=self._goes_on)
        if found is not None:
            self._channel.emit(
                StatePrefetched(
                    generation=found.generation,
                    step=found.step,
                    wanted_bytes=found.wanted_bytes,
                    held_bytes=found.held_bytes,
                    fetched_bytes=found.fetched_bytes,
                    seconds=time.perf_counter() - began_s,
                )
            )


def _train_once(world: GenerationWorld) -> None:
    """Train a tiny model for one step, so that torch has initialized what a step needs."""
    model = nn.Linear(2, 2)
    if world.mesh.ndim == 1:
        fully_shard(model, mesh=world.mesh)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.zeros(1, 2)).sum().backward()
    optimizer.step()


@contextmanager
def _limited(limit_s: float) -> Iterator[None]:
    """Raise `_TooLongError` in the body when the time is up; on the main thread only."""
    main = threading.main_thread()
    if threading.current_thread() is not main or main.ident is None:
        yield
        return

    def over(*_: object) -> None:
        raise _TooLongError(f"the first step was not reached within {limit_s:g} s")

    signal.signal(SIGNAL, over)
    left = threading.Event()
    interrupt = functools.partial(signal.pthread_kill, main.ident, SIGNAL)
    args = (left, interrupt, limit_s)
    threading.Thread(target=_interrupt_late, args=args, name="rehearsal-limit", daemon=True).start()
    try:
        yield
    finally:
        signal.signal(SIGNAL, signal.SIG_IGN)
        left.set()


def _interrupt_late(left: threading.Event, interrupt: Callable[[], None], limit_s: float) -> None:
    """Interrupt until the body is left: an error raised in a callback or a destructor is lost."""
    while not left.wait(limit_s):
        interrupt()
        limit_s = _AGAIN_S
