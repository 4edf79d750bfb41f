"""Prefetcher: fetches the state that a rank will need while other ranks train, step after step.

A thread of low priority asks for the newest protected step, asks the holders of its blocks for the
changes since the step before, and fetches them. It rests between requests, so that the holders have
time for others. Its memory is bounded by the rank's share: as much again as the rank's state takes,
until the state is restored.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from holdfast.ckpt.errors import CkptError
from holdfast.ckpt.geometry.reshard import Wanted, plan
from holdfast.ckpt.memory.maps import SlotMaps
from holdfast.ckpt.memory.records import RestorePoint, SnapshotWorld
from holdfast.ckpt.native.priority import yield_to_others
from holdfast.ckpt.recovery.memory_source import MemorySource
from holdfast.ckpt.recovery.prefetched import Ahead, fetch, wanted_of
from holdfast.ckpt.sidecar.client import SidecarClient
from holdfast.elastic.channel.base import Channel
from holdfast.elastic.planning.foresight import others_train

_log = logging.getLogger(__name__)

_STEP_WAIT_S: Final = 0.5
_RETRY_S: Final = 0.2
_POLL_S: Final = 0.02
_STALLED_S: Final = 30.0
_REST: Final = 1.0
"""Rest after a request, as a multiple of its duration: holders serve one half of the time."""

_SPARE_REST: Final = 9.0
_SPARE_AFTER_S: Final = 30.0
"""The same for a worker that has been ready this long without being needed, possibly for days."""

_PASSES: Final = 3
"""Limit of fetched bytes, as a multiple of the wanted bytes; beyond it, the trainers are faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetched:
    """Progress: ``held_bytes`` of the ``wanted_bytes`` belong to ``step`` of ``generation``.

    ``fetched_bytes`` counts all bytes that were transferred.
    """

    generation: int
    step: int
    wanted_bytes: int
    held_bytes: int
    fetched_bytes: int


class Donors:
    """Clients of the sidecars of a generation, made on first use."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._clients: dict[str, SidecarClient] = {}
        self.addresses: Mapping[str, str] = {}

    def of(self, node: str) -> SidecarClient:
        """Return the client of a node's sidecar at its present address."""
        address = self.addresses[node]
        if address not in self._clients:
            self._clients[address] = SidecarClient(address, self._channel.key)
        return self._clients[address]

    def newest(self, world: SnapshotWorld, *, beyond: int = -1, wait_s: float = 0.0) -> int:
        """Return the newest protected step, or -1; wait up to ``wait_s`` for one after ``beyond``.

        Raises the errors of the sidecar's client.
        """
        self.addresses = {peer.node: peer.address for peer in world.peers}
        guide = self.of(self._guide(world))
        return guide.protected_step(
            generation=world.generation, at_least=beyond + 1, timeout_s=wait_s
        )

    def locate(self, world: SnapshotWorld, step: int) -> RestorePoint:
        """Return where the blocks of a protected step are. Raises ``NotFoundError``."""
        guide = self.of(self._guide(world))
        return guide.locate(generation=world.generation, step=step)

    def _guide(self, world: SnapshotWorld) -> str:
        """Return the node to ask: this node if its sidecar takes part, else that of rank 0."""
        return self._channel.node if self._channel.node in self.addresses else world.rank_nodes[0]

    def source(
        self, point: RestorePoint, *, maps: SlotMaps, ahead: Ahead | None = None
    ) -> MemorySource:
        """Return the blocks of ``point`` as a source for a restore."""
        channel = self._channel
        self.addresses = {**self.addresses, channel.node: channel.sidecar}
        return MemorySource(
            point,
            local=self.of(channel.node),
            local_node=channel.node,
            addresses=self.addresses,
            key=channel.key,
            maps=maps,
            ahead=ahead,
        )

    def close(self) -> None:
        """Close the connections."""
        for client in self._clients.values():
            client.close()


class Prefetcher:
    """Holds the wanted chunks of the newest protected step, as far as it keeps up with trainers."""

    def __init__(self, channel: Channel, *, maps: SlotMaps, wanted: Wanted) -> None:
        self._channel, self._maps, self._wanted = channel, maps, wanted
        self._donors = Donors(channel)
        self._ahead: Ahead | None = None
        self._world: SnapshotWorld | None = None
        self._step = -1
        self._fetched = 0
        self._ready_s = math.inf
        self._over, self._current = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._follow, name="prefetch", daemon=True)
        self._thread.start()

    def await_current(self, *, goes_on: Callable[[], bool]) -> Prefetched | None:
        """Wait until all chunks are of one protected step, trainers are faster, or nothing comes.

        ``goes_on`` says whether there is still time. Returns None if nothing has to be fetched.
        """
        fetched, since_s = 0, time.monotonic()
        while not self._current.wait(_POLL_S) and goes_on():
            ahead, now_s = self._ahead, time.monotonic()
            if ahead is not None and self._fetched > _PASSES * ahead.nbytes:
                break
            if self._fetched != fetched:
                fetched, since_s = self._fetched, now_s
            elif now_s - since_s > _STALLED_S:
                break
        self._ready_s = time.monotonic()
        return self.progress()

    def progress(self) -> Prefetched | None:
        """Return the progress, None if nothing has to be fetched."""
        ahead, world, step = self._ahead, self._world, self._step
        if ahead is None or world is None or not ahead.nbytes:
            return None
        return Prefetched(
            generation=world.generation,
            step=step,
            wanted_bytes=ahead.nbytes,
            held_bytes=ahead.held_bytes((world.generation, step)),
            fetched_bytes=self._fetched,
        )

    def complete(self) -> Ahead | None:
        """Return the chunks if they are complete, else None; they may move to a newer step soon."""
        return self._ahead if self._current.is_set() else None

    def stop(self) -> Ahead | None:
        """Stop fetching; return the chunks held so far. Does not wait for a running request."""
        self._over.set()
        ahead = self._ahead
        if ahead is not None:
            ahead.freeze()
        return ahead

    # -- the thread ------------------------------------------------------------------------------

    def _follow(self) -> None:
        yield_to_others()
        try:
            while not self._over.is_set():
                try:
                    self._catch_up()
                except CkptError as error:  # released, or a holder is gone: try again
                    _log.info("prefetching: %s", error)
                    self._over.wait(_RETRY_S)
        finally:
            self._donors.close()

    def _catch_up(self) -> None:
        """Bring all wanted chunks to the newest protected step, as far as there is time for it."""
        generation = self._channel.roster().generation
        if generation is None:
            self._over.wait(_RETRY_S)
            return
        world = generation.snapshots
        beyond = self._step if world == self._world else -1
        step = self._donors.newest(world, beyond=beyond, wait_s=_STEP_WAIT_S)
        if step < beyond or (step == beyond and self._current.is_set()):
            return
        point = self._donors.locate(world, step)
        ahead = self._ahead if world == self._world else None
        if ahead is None:
            ahead = self._room(point)
        self._ahead, self._world, self._step = ahead, world, step
        self._current.clear()
        began_s = time.monotonic()
        for nbytes in fetch(ahead, point, self._donors.of):
            self._fetched += nbytes
            took_s = time.monotonic() - began_s
            if self._over.wait(took_s * self._rest()) or self._overtaken(world, step):
                return
            began_s = time.monotonic()
        self._current.set()
        if not ahead.nbytes:
            self._over.set()  # all chunks are on this host: there is nothing to fetch

    def _rest(self) -> float:
        """Return the rest after a request, as a multiple of its duration."""
        if not others_train(self._channel.roster()):
            return 0.0  # the generation is over: no trainer is slowed down, and it is urgent
        spare = time.monotonic() - self._ready_s > _SPARE_AFTER_S
        return _SPARE_REST if spare else _REST

    def _overtaken(self, world: SnapshotWorld, step: int) -> bool:
        """Return whether there is a newer step; if so, this fetch stops.

        The next fetch first compares the held chunks with the newer step. The holders can do that
        only while both steps are in memory, as a rule until one more step is complete.
        """
        return self._donors.newest(world) > step

    def _room(self, point: RestorePoint) -> Ahead:
        """Allocate memory for the wanted chunks of blocks on other hosts."""
        self._maps.prune()
        with self._donors.source(point, maps=self._maps) as source:
            refs = plan(source.indexes(), self._wanted, strict=False).refs()
            return Ahead(wanted_of(refs, source.elsewhere))
