"""Keeps the tracked state of a generation: restores it, snapshots it, makes it durable."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any

from ckpt import catalog
from ckpt.errors import CorruptError, NotFoundError, StoreError
from ckpt.maps import SlotMaps
from ckpt.memory import MemorySource
from ckpt.restore import restore
from ckpt.sidecar.client import SidecarClient
from ckpt.snapshot import Snapshotter
from ckpt.source import StoreSource
from ckpt.store.places import open_store
from elastic.channel import Channel, Phase
from elastic.config import Settings
from elastic.cursor import KEY, Cursor
from elastic.errors import ConfigError, ElasticError, JobFailed
from elastic.pulse import Pulse
from elastic.reform import World

_log = logging.getLogger(__name__)

_PROBE = ".writable"
_DURABLE_POLL_S = 0.25
_DURABLE_LIMIT_S = 600.0
_CLOSE_TIMEOUT_S = 1.0


class Keeper:
    """One generation's hold on the state; ``cursor`` says where the run stands."""

    def __init__(
        self,
        channel: Channel,
        settings: Settings,
        world: World,
        *,
        pulse: Pulse,
        maps: SlotMaps,
    ) -> None:
        self._channel, self._settings, self._world = channel, settings, world
        self._pulse, self._maps = pulse, maps
        self.client = SidecarClient(channel.sidecar, channel.key)
        self.cursor = Cursor(settings)
        self._state: dict[str, Any] = {}
        self._snapshots: Snapshotter | None = None
        self._stall_before_s = 0.0
        self._stored = self._asked = 0  # steps in the store before, and asked to be written

    def track(self, state: Mapping[str, Any]) -> None:
        """Take charge of ``state`` and restore it where there is something to restore."""
        if KEY in state:
            raise ConfigError(f"run.track: the name {KEY!r} is taken by the run's own cursor")
        self._state = {**state, KEY: self.cursor}
        start = time.perf_counter()
        tier, how, step = self._restore()
        self._channel.emit(
            "restored",
            generation=self._world.generation,
            rank=self._world.rank,
            step=self.cursor.step,
            tier=tier,
            how=how,
            seconds=time.perf_counter() - start,
        )
        if step != self.cursor.step:
            raise ElasticError(
                f"the snapshot labelled step {step} holds the state after {self.cursor.step} steps"
            )
        self._snapshots = Snapshotter(
            self.client,
            run=self._channel.run,
            generation=self._world.generation,
            rank=self._world.rank,
            world_size=self._world.size,
            gather=self._world.gather,
            checkpoint=self._settings.target(),
            maps=self._maps,
            poll=self._world.guard.check,
        )

    def _restore(self) -> tuple[str, str, int]:
        """Restore; return the tier, how it was done, and the step found there."""
        record = self._world.record
        if record.restore is not None:
            with MemorySource(
                record.restore,
                local=self.client,
                local_node=self._channel.node,
                addresses={peer.node: peer.address for peer in record.snapshots.peers},
                key=self._channel.key,
                maps=self._maps,
            ) as memory:
                report = restore(self._state, memory, rank=self._world.rank)
                return "memory", memory.how, report.step
        root = self._settings.checkpoint
        step = self._restore_checkpoint(root) if root else None
        if step is None:
            return "none", "nothing to restore", 0
        self._stored = step
        return "checkpoint", f"{root}, step {step}", step

    def _restore_checkpoint(self, root: str) -> int | None:
        """Restore the newest checkpoint that all ranks can read; None where there is none."""
        candidates: Iterator[int] = iter(())
        if self._world.rank == 0:
            _probe(root)
            candidates = catalog.verified(root)
        failed = ""
        while True:
            step = self._agree_on(candidates, root)
            if step is None:
                if failed:
                    raise JobFailed(
                        f"{root}: no checkpoint can be read in full: {failed}; bring back a good "
                        "one, or choose another directory"
                    )
                return None
            error = ""
            try:
                with StoreSource(root, step) as store:
                    restore(self._state, store, rank=self._world.rank)
            except CorruptError as corrupt:
                error = str(corrupt)
            errors = [found for found in self._world.gather(error) if found]
            if not errors:
                return step
            failed = errors[0]
            _log.warning("step %d is damaged, trying an older one: %s", step, failed)

    def _agree_on(self, candidates: Iterator[int], root: str) -> int | None:
        """Return rank 0's next candidate, at all ranks."""
        step, damage = None, ""
        if self._world.rank == 0:
            try:
                step = self._world.guard.call(
                    lambda: next(candidates, None), name="find-checkpoint"
                )
            except CorruptError as error:
                damage = f"{root}: no checkpoint can be trusted: {error}"
        chosen: tuple[int | None, str] = self._world.gather((step, damage))[0]
        if chosen[1]:
            raise JobFailed(chosen[1])
        return chosen[0]

    def begin(self, count: int) -> None:
        """Snapshot where the generation starts from, so that it can be returned to."""
        snapshots = self._tracked()
        step = self.cursor.step
        due = step >= count or step % self._settings.checkpoint_every == 0
        persist = self._settings.checkpoint is not None and due and step > self._stored
        self._snapshot(snapshots, persist=persist)

    def _tracked(self) -> Snapshotter:
        if self._snapshots is None:
            raise ConfigError("call run.track(model=..., optimizer=...) before the first step")
        return self._snapshots

    def keep(self, *, last: bool) -> None:
        """Snapshot the step just completed where it is due."""
        settings, step = self._settings, self.cursor.step
        persist = settings.checkpoint is not None and (
            last or step % settings.checkpoint_every == 0
        )
        if persist or last or step % settings.snapshot_every == 0:
            self._snapshot(self._tracked(), persist=persist)

    def _snapshot(self, snapshots: Snapshotter, *, persist: bool) -> None:
        with self._pulse.phase(Phase.WAIT):
            snapshots.snapshot(self._state, self.cursor.step, persist=persist)
        if persist:
            self._asked = self.cursor.step

    def fence(self) -> None:
        """Wait until the copy under way is done: the tensors are about to change."""
        if self._snapshots is not None:
            with self._pulse.phase(Phase.WAIT):
                self._snapshots.fence()

    def stall_s(self) -> float:
        """Return the seconds training stood still for snapshots since the last call."""
        if self._snapshots is None:
            return 0.0
        total = float(self._snapshots.stats.stall_s)
        stall, self._stall_before_s = total - self._stall_before_s, total
        return stall

    def finish(self) -> None:
        """Wait until the last snapshot is taken, and durable where checkpoints are asked for."""
        self.fence()
        root, step = self._settings.checkpoint, self._asked
        if not step or self._snapshots is None:
            return
        if self._snapshots.stats.last_step < step:
            raise StoreError(
                f"{root}: the snapshot of step {step} was given up, because "
                f"{self._snapshots.stats.torn} was changed while it was copied: change tracked "
                "state only inside the loop"
            )
        if self._world.rank != 0:
            return
        deadline = time.monotonic() + _DURABLE_LIMIT_S
        while self.client.durable_step(at_least=step, timeout_s=_DURABLE_POLL_S) < step:
            self._world.guard.check()
            if time.monotonic() > deadline:
                raise JobFailed(f"{root}: step {step} is not durable after {_DURABLE_LIMIT_S:g} s")

    def close(self) -> None:
        """Let go of the state and the sidecar."""
        snapshots, self._snapshots = self._snapshots, None
        self._state = {}
        try:
            if snapshots is not None:
                snapshots.close(timeout_s=_CLOSE_TIMEOUT_S)
        finally:
            self.client.close()


def _probe(root: str) -> None:
    """Write to the checkpoint root and clean up: better refused now than at the first checkpoint.

    Raises ``StoreError``, whatever it is that no retry could help.
    """
    try:
        store = open_store(root)
        store.write(_PROBE, [b"writable\n"])
        store.delete([_PROBE])
    except NotFoundError as error:
        raise StoreError(f"checkpoints cannot be written: {error}") from error
