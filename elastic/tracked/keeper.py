"""The keeper of a generation's tracked state: restores it, snapshots it, makes it durable."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
from torch.optim import Optimizer

from holdfast.ckpt.checkpoints import fence
from holdfast.ckpt.errors import CkptError, HoldfastError, StoreError
from holdfast.ckpt.memory.maps import SlotMaps
from holdfast.ckpt.recovery.memory_source import TIERS
from holdfast.ckpt.recovery.prefetched import Ahead
from holdfast.ckpt.sidecar.client import SidecarClient
from holdfast.ckpt.snapshot.snapshotter import Snapshotter
from holdfast.ckpt.snapshot.touched import Rows
from holdfast.ckpt.state.capture import CapturePlan, FlatState, flatten
from holdfast.ckpt.state.kinds import rebuilt
from holdfast.ckpt.state.kinds.rebuilt import Rebuilt
from holdfast.ckpt.state.trees.per_rank import CarriedRanks, Inheritance
from holdfast.ckpt.store.places import open_store
from holdfast.ckpt.types import Json
from holdfast.elastic.channel.base import Channel, WorkerPhase
from holdfast.elastic.channel.pulse import Pulse
from holdfast.elastic.config import Settings
from holdfast.elastic.errors import ConfigError, JobFailedError
from holdfast.elastic.events import (
    CheckpointUnsaved,
    SnapshotsLeftOut,
    StateApproximate,
    StateRestored,
    StepProtected,
    StepUnprotected,
)
from holdfast.elastic.groups.reform import GenerationWorld
from holdfast.elastic.planning.neighbors import announced
from holdfast.elastic.tracked.accepted import check_tracked
from holdfast.elastic.tracked.alike import ReplicaCheck
from holdfast.elastic.tracked.cursor import KEY, Cursor
from holdfast.elastic.tracked.entries import leaves_of
from holdfast.elastic.tracked.grown import BuiltTensors
from holdfast.elastic.tracked.handover import Wish, hand_over
from holdfast.elastic.tracked.protection import Protection, ProtectionWatch
from holdfast.elastic.tracked.restoring import Restorer
from holdfast.elastic.tracked.saving import CheckpointWatch, LastSave
from holdfast.elastic.tracked.sources.replacing import agree
from holdfast.elastic.tracked.sources.restored import Restored

_log = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 1.0
_PROTECTED_POLL_S = 0.25

CARRIED = "holdfast-ranks"
"""The name under which the per-rank values of ranks that are gone are tracked."""

NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})
"""No state beside the user's."""


def with_own(state: Mapping[str, Any], own: Mapping[str, Any], *, cursor: Cursor) -> dict[str, Any]:
    """Return the user's ``state`` with the run's ``own``.

    Raises ``ConfigError`` for a state that a restore could not bring back, and for a name that the
    run itself has.
    """
    check_tracked(state)
    added = {**own, KEY: cursor, CARRIED: CarriedRanks()}
    for name in added:
        if name in state:
            raise ConfigError(f"run.track: the name {name!r} is taken by the run itself")
    return {**state, **added}


class StateKeeper:
    """One generation's keeper of the state; ``cursor`` holds the run's progress.

    ``of_leader`` are tracked entries of which rank 0's plain values count. ``stages`` are this
    rank's stages of a pipeline, by number; ``replaceable`` says of which a rank can do without.

    A nonempty ``anew`` is the reason why nothing is restored; ``ahead`` holds the prefetched
    chunks.
    """

    def __init__(
        self,
        channel: Channel,
        settings: Settings,
        world: GenerationWorld,
        *,
        pulse: Pulse,
        maps: SlotMaps,
        anew: str = "",
        ahead: Ahead | None = None,
    ) -> None:
        self._channel, self._settings, self._world = channel, settings, world
        self._pulse, self._maps, self._anew = pulse, maps, anew
        self.client = SidecarClient(channel.sidecar, channel.key)
        self._restorer = Restorer(
            channel,
            world,
            client=self.client,
            maps=maps,
            ahead=ahead,
            disk=settings.disk_target(),
        )
        self.cursor = Cursor(settings, tp=world.record.mesh.tp, ep=world.record.mesh.ep)
        self.of_leader = set[str]()
        self._state: dict[str, Any] = {}
        self._snapshots: Snapshotter | None = None
        self._watch: CheckpointWatch | None = None
        self._protection: ProtectionWatch | None = None
        self._stall_before_s = self._last_stall_s = 0.0
        self._left_out = 0
        self._stored = self._requested = 0  # newest step in the store before; newest requested
        self._taken = -1  # newest step with a snapshot in this generation
        self.stages: dict[int, torch.nn.Module] = {}
        self.replaceable: dict[str, Json] = {}

    def open_ahead(self) -> None:
        """Begin to open the restore point while the state is being built."""
        if not self._anew:
            self._restorer.open_ahead()

    def track(self, state: Mapping[str, Any], *, own: Mapping[str, Any] = NOTHING) -> None:
        """Take charge of ``state`` and restore it if there is a restore point.

        ``own`` is the state of other parts of the run, beside the user's.
        """
        self._state = with_own(state, own, cursor=self.cursor)
        if any(isinstance(each, Rebuilt) for _, each in leaves_of(state)):
            flat = flatten(self._state, rank=self._world.rank)
            rebuilt.inspect(flat.rebuilt, gather=self._world.gather)
        if (rule := self._settings.neighbors) is not None:
            replacing = agree(self._world, self._state, stages=self.stages, beyond=rule.beyond)
            self._restorer.replacing = replacing
            self.replaceable = announced(replacing.needs)
        restored = self._restore()
        if restored.step != self.cursor.step:
            raise HoldfastError(
                f"the snapshot labelled step {restored.step} holds the state after "
                f"{self.cursor.step} steps"
            )
        mesh = self._world.record.mesh
        replicas = ReplicaCheck(
            self._world,
            cell=mesh.cell,
            exact=bool(self._settings.exact),
            restored=restored.tier != "none",
            of_leader=self.of_leader,
        )
        built = BuiltTensors()

        def inspect(flat: FlatState, plan: CapturePlan) -> None:
            built.look(flat, plan, step=self.cursor.step)
            replicas.look(flat, plan, step=self.cursor.step)

        self._snapshots = Snapshotter(
            self.client,
            run=self._channel.run,
            generation=self._world.generation,
            rank=self._world.rank,
            world_size=self._world.size,
            gather=self._world.gather_plans,
            checkpoint=self._settings.target(),
            maps=self._maps,
            poll=self._world.guard.check,
            before_step=self._before_step,
            inspect=inspect,
            together=self._world.any_of if self.cursor.approximate else None,
        )
        self._protection = ProtectionWatch(
            self.client,
            generation=self._world.generation,
            restored=restored.step if restored.tier in TIERS else -1,
            tell=self._tell_protected,
            tell_why=self._tell_unprotected,
        )

    def _tell_protected(self, step: int, seconds: float) -> None:
        """Record the time until a step was protected; runs on the watch's thread."""
        if self._world.rank == 0:
            generation = self._world.generation
            self._channel.emit(StepProtected(generation=generation, step=step, seconds=seconds))

    def _tell_unprotected(self, step: int, reason: str) -> None:
        """Record why a step is not protected, once for each node; runs on the watch's thread."""
        homes, rank = self._world.record.snapshots.rank_nodes, self._world.rank
        if homes.index(homes[rank]) == rank:
            self._channel.emit(
                StepUnprotected(generation=self._world.generation, step=step, reason=reason)
            )

    def _take_fence(self) -> None:
        """Let nothing of an older generation or run be published from now on.

        That needs the store, so the training does not wait for it: the commit does it again.
        """
        checkpoint = self._settings.checkpoint
        if checkpoint is None or self._world.rank:
            return
        root, run, generation = checkpoint.root, self._channel.run, self._world.generation

        def take() -> None:
            try:
                fence.take(open_store(root), run=run, generation=generation)
            except (CkptError, OSError) as error:
                _log.warning("checkpoints to %s: %s", root, error)

        threading.Thread(target=take, name="take-fence", daemon=True).start()

    def _restore(self) -> Restored:
        """Restore the state, or leave it as it was built if ``anew`` says so."""
        start = time.perf_counter()
        if self._anew:
            restored = Restored(tier="none", how=self._anew, step=0)
        else:
            checkpoint = self._settings.checkpoint
            root = None if checkpoint is None else checkpoint.root
            restored = self._restorer.restore(self._state, root=root)
        self._restorer.close()  # prefetched chunks take as much memory as the state
        self._take_fence()
        self._mark(restored)
        if restored.tier == "checkpoint":
            self._stored = restored.step
        self._channel.emit(
            StateRestored(
                generation=self._world.generation,
                rank=self._world.rank,
                step=self.cursor.step,
                tier=restored.tier,
                how=restored.how,
                bytes=restored.bytes,
                tiers=restored.tiers,
                sent_bytes=restored.sent_bytes,
                seconds=time.perf_counter() - start,
                per_rank=self._told_ranks(restored.ranks),
            )
        )
        return restored

    def _mark(self, restored: Restored) -> None:
        """Add the mark of stages that were set from others; tell of all marks of the state."""
        if restored.mark is not None:
            self.cursor.approximate = (*self.cursor.approximate, restored.mark)
        if self._world.rank == 0:
            for mark in self.cursor.approximate:
                event = StateApproximate(
                    generation=self._world.generation,
                    step=mark.step,
                    stages=mark.stages,
                    fresh=mark is restored.mark,
                    text=mark.text,
                )
                self._channel.emit(event)

    def _told_ranks(self, ranks: Inheritance) -> dict[str, tuple[str, ...]]:
        """Return what became of per-rank values, for the event; warn of what is dropped."""
        leader = self._world.rank == 0
        if ranks.dropped and leader:
            _log.warning("dropped, as PerRank(on_resize='drop') asks: %s", ", ".join(ranks.dropped))
        notes = {
            "built": ranks.built,
            "merged": ranks.merged,
            "carried": ranks.carried,
            "dropped": ranks.dropped if leader else (),
        }
        return {what: names for what, names in notes.items() if names}

    def begin(self, count: int, *, prepare: Callable[[], Wish] | None = None) -> Wish:
        """Snapshot the state from which the generation starts, so that it can be restored.

        ``prepare`` may change the state before that, and returns a wish that a rank had meanwhile;
        it is not called in a rehearsal. Returns the wish.
        """
        snapshots, wished = self._tracked(), Wish.NONE
        if prepare is not None:
            wished = prepare()
        if (disk := self._settings.disk_target()) is not None:
            self.client.spill(disk)
        if (target := self._settings.target()) is not None and target.grace_s:
            self.client.persist_to(target)
        checkpoint = self._settings.checkpoint
        if checkpoint is not None and self._world.rank == 0:
            channel = self._channel
            self._watch = CheckpointWatch(channel.sidecar, channel.key, channel.emit)
        step = self.cursor.step
        if step == self._taken:
            return wished  # a second loop follows
        due = checkpoint is not None and (
            step >= count or step % checkpoint.every == 0 or self._needs_store(wished)
        )
        self._snapshot(snapshots, persist=due and step > self._stored)
        return wished

    def _needs_store(self, wished: Wish) -> bool:
        """Return whether only the store keeps what a node that is about to leave has."""
        return wished is Wish.LEAVE and not self._world.record.snapshots.parity

    def _tracked(self) -> Snapshotter:
        if self._snapshots is None:
            raise ConfigError("call run.track(model=..., optimizer=...) before the first step")
        return self._snapshots

    def keep(self, *, last: bool, wished: Wish = Wish.NONE, due: bool = False) -> None:
        """Snapshot the step just completed if it is ``due`` or a rank ``wished`` for it.

        If a node is about to leave and there is no parity, the step is also written to the store.
        """
        settings, step = self._settings, self.cursor.step
        if self._watch is not None:
            self._watch.check()
        checkpoint = settings.checkpoint
        persist = checkpoint is not None and (
            last or step % checkpoint.every == 0 or self._needs_store(wished)
        )
        if persist or last or wished or due or step % settings.snapshots.every == 0:
            self._snapshot(self._tracked(), persist=persist)

    def keep_unfinished(self) -> None:
        """Save the last complete step of a loop that was left inside the next one."""
        checkpoint, step = self._settings.checkpoint, self.cursor.step
        saves = checkpoint is not None and step > max(self._stored, self._requested)
        if self._taken != step:
            self._snapshot(self._tracked(), persist=saves)
        elif checkpoint is not None and saves:
            self._save_taken(limit_s=checkpoint.wait_s)

    def _save_taken(self, *, limit_s: float) -> None:
        """Write the last snapshot to the store, as soon as it is protected."""
        target, step = self._settings.target(), self.cursor.step
        assert target is not None
        until_s = time.monotonic() + limit_s
        with self._pulse.phase(WorkerPhase.WAIT):
            self._tracked().fence()
            while time.monotonic() < until_s:
                self._world.guard.check()
                reached = self.client.protected_step(
                    generation=self._world.generation, at_least=step, timeout_s=_PROTECTED_POLL_S
                )
                if reached >= step:
                    break
            self._world.barrier()
            self.client.persist_to(target, now=True)
        self._requested = step

    def _tell_left_out(self, snapshots: Snapshotter) -> None:
        """Report that there was no room for snapshots: the first time, then ever more rarely."""
        count, before = snapshots.stats.left_out, self._left_out
        if count.bit_length() > before.bit_length():
            self._left_out = count
            self._channel.emit(
                SnapshotsLeftOut(
                    generation=self._world.generation,
                    step=self.cursor.step,
                    count=count,
                    newest=snapshots.stats.last_step,
                    reason=snapshots.stats.reason,
                )
            )

    def _snapshot(self, snapshots: Snapshotter, *, persist: bool) -> None:
        if self._protection is not None:
            self._protection.taken(self.cursor.step)
        with self._pulse.phase(WorkerPhase.WAIT):
            snapshots.snapshot(self._state, self.cursor.step, persist=persist)
        self._taken = self.cursor.step
        self._tell_left_out(snapshots)
        if persist:
            self._requested = self.cursor.step

    def hand_over(self) -> None:
        """Wait at the end of the step, which has a snapshot, until the world changes."""
        with self._pulse.phase(WorkerPhase.WAIT):
            self._tracked().fence()
            self._world.barrier()  # then every rank has its snapshot
            hand_over(
                self._channel,
                self._world,
                self.client,
                step=self.cursor.step,
                stored=self._requested == self.cursor.step,
            )

    def fence(self) -> None:
        """Wait until the snapshot in progress is sealed: any tensor is about to change."""
        if self._snapshots is not None:
            with self._pulse.phase(WorkerPhase.WAIT):
                self._snapshots.fence()

    def _before_step(self) -> None:
        self._world.stepping()
        self.fence()

    def touched(self, tensor: torch.Tensor, rows: Rows) -> None:
        """Name rows that have changed since the last snapshot (`Snapshotter.touched`)."""
        if self._snapshots is None:
            raise ConfigError("call run.track(...) before run.touched(...)")
        self._snapshots.touched(tensor, rows)

    def fence_steps_of(self, optimizer: Optimizer) -> None:
        """Make every step of ``optimizer`` wait as `fence` does, until `close`.

        An object that is not a torch optimizer but steps some cannot be hooked: wait now.
        """
        if self._snapshots is None:
            return
        if isinstance(optimizer, Optimizer):
            self._snapshots.fence_steps_of(optimizer)
        else:
            with self._pulse.phase(WorkerPhase.WAIT):
                self._snapshots.copied()

    def stall_s(self) -> float:
        """Return the seconds for which training waited for snapshots since the last call."""
        if self._snapshots is None:
            return 0.0
        total = float(self._snapshots.stats.stall_s)
        stall, self._stall_before_s = total - self._stall_before_s, total
        self._last_stall_s = stall
        return stall

    def protection(self) -> Protection:
        """Return the present restore point and the cost of the last snapshot."""
        if self._snapshots is None or self._protection is None:
            raise ConfigError("call run.track(model=..., optimizer=...) first")
        stats = self._snapshots.stats
        return dataclasses.replace(
            self._protection.now(),
            copy_s=stats.last_copy_s,
            stall_s=self._last_stall_s,
            copied_bytes=stats.bytes,
            discarded=stats.discarded,
            torn=stats.torn,
        )

    def finish(self) -> None:
        """Wait until the last snapshot is taken and, with checkpoints, durable."""
        checkpoint, step = self._settings.checkpoint, self._requested
        if self._snapshots is None:
            return
        with self._pulse.phase(WorkerPhase.WAIT):
            self._snapshots.fence()
        if checkpoint is None or not step:
            return
        stats = self._snapshots.stats
        if stats.last_step < step:
            raise StoreError(
                f"{checkpoint.root}: the snapshot of step {step} was given up: {stats.reason}"
            )
        if self._world.rank != 0:
            return
        try:
            LastSave(self._channel, self.client, root=checkpoint.root).wait(
                step, limit_s=checkpoint.wait_s, check=self._world.guard.check
            )
        except JobFailedError as failed:
            if checkpoint.on_error != "skip":
                raise
            _log.warning("%s", failed)
            self._channel.emit(CheckpointUnsaved(step=step, error=str(failed)))
        finally:
            if self._watch is not None:
                self._watch.settle()

    @property
    def replicated_bytes(self) -> int:
        """Bytes of the state that this rank shares with its replicas; 0: none, or not known.

        Each replica writes an equal part of them.
        """
        mesh = self._world.record.mesh
        replicas = mesh.dp // mesh.shard
        if self._snapshots is None or replicas == 1:
            return 0
        return self._snapshots.stats.replica_bytes * replicas // (replicas - 1)

    def close(self) -> None:
        """Release the state and the sidecar's client."""
        snapshots, self._snapshots = self._snapshots, None
        if self._watch is not None:
            self._watch.close()
        if self._protection is not None:
            self._protection.close()
        self._state = {}
        try:
            self._restorer.close()
            if snapshots is not None:
                snapshots.leave(timeout_s=_CLOSE_TIMEOUT_S)
        finally:
            self.client.close()
