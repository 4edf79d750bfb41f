"""The job around a `Run`, for libraries that build on the training loop."""

from __future__ import annotations

from typing import Any

from holdfast.ckpt.sidecar.client import SidecarClient
from holdfast.ckpt.state.trees.packing import pack, unpack
from holdfast.ckpt.transport import RunKey
from holdfast.elastic.channel.base import Channel
from holdfast.elastic.data.loaders import Loader
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.events import Event
from holdfast.elastic.groups.reform import GenerationWorld
from holdfast.elastic.membership.records import Member, Roster
from holdfast.elastic.tracked.keeper import StateKeeper


class Session:
    """One generation's access to the job; `session_of` returns that of a `Run`.

    ``seed`` is the run's.
    """

    def __init__(
        self, channel: Channel, world: GenerationWorld, keeper: StateKeeper, *, seed: int
    ) -> None:
        self._channel, self._world, self._keeper = channel, world, keeper
        self.seed = seed

    @property
    def members(self) -> tuple[Member, ...]:
        """The workers of this generation, by rank: their seats, nodes and incarnations."""
        return self._world.record.members

    @property
    def stage(self) -> int:
        """The number of the decorated functions that the script finished before this one."""
        return self._world.record.snapshots.stage

    @property
    def sidecar(self) -> SidecarClient:
        """The client of this node's sidecar."""
        return self._keeper.client

    @property
    def key(self) -> RunKey:
        """The key of the job's connections."""
        return self._channel.key

    def count_on_leader(self, *entries: str) -> None:
        """Say that of these entries of `Run.track` rank 0's plain values count.

        They need not be equal on all ranks; a restore gives all ranks those of rank 0. Call it
        before the first step.
        """
        self._keeper.of_leader.update(entries)

    def begin_at(self, step: int, *loaders: Loader) -> None:
        """Let the run begin at this step: the steps before it were made elsewhere.

        ``loaders`` go on with the samples after so many steps. Call it on all ranks after
        `Run.track`, before the first step. Raises ``ConfigError`` if steps are complete, as after a
        restore.
        """
        cursor = self._keeper.cursor
        if cursor.step:
            raise ConfigError(
                f"begin_at({step}): the run has {cursor.step} complete steps already: call it only "
                "if run.completed is 0"
            )
        for loader in loaders:
            loader.begin_at(step)
        cursor.step = step

    def exchange(self, value: Any, name: str) -> list[Any]:
        """Return every rank's value, in rank order; collective, between passes and steps.

        Values are plain ones, tensors, arrays, and tuples, lists and dicts of these; they come back
        with the same types and bits, tensors on the CPU. Raises ``StateError`` for any other, with
        its path, which begins with ``name``; the other ranks then wait until this one fails.
        """
        packed = self._world.gather_bytes(pack(value, name))
        return [
            value if rank == self._world.rank else unpack(data) for rank, data in enumerate(packed)
        ]

    def roster(self) -> Roster:
        """Return the whole job as last received."""
        return self._channel.roster()

    def emit(self, event: Event) -> None:
        """Record an event in the event file of this node."""
        self._channel.emit(event)
