"""Sidecar processes on this machine that represent nodes."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from holdfast.ckpt.errors import PeerError
from holdfast.ckpt.memory.records import RestorePoint, SidecarPeer, SnapshotWorld
from holdfast.ckpt.sidecar.client import SidecarClient
from holdfast.ckpt.transport import RunKey
from holdfast.elastic.processes.node_sidecar import NodeSidecar, SidecarPlan

KEEP = 1
SLOTS = KEEP + 2
"""Most slots that a node makes: the kept ones, one being protected, one being written."""

_TIMEOUT_S = 300.0


class Nodes:
    """Sidecars by node name; leaving the ``with`` block ends them.

    With ``apart`` they send each other bytes that they would otherwise map, as between machines.
    """

    def __init__(self, directory: Path, names: Sequence[str], *, apart: bool = False) -> None:
        self._apart = apart
        self.run = f"bench-{os.getpid()}-{time.time_ns()}"
        self.key = RunKey.new()
        self._key_file = directory / f"{self.run}.key"
        self.key.save(self._key_file)
        self._sidecars: dict[str, NodeSidecar] = {}
        with ExitStack() as on_failure:
            on_failure.callback(self._stop_all)
            for name in names:
                self.start(name)
            self._stack = on_failure.pop_all()

    def start(self, name: str) -> None:
        """Start a node that does not run."""
        plan = SidecarPlan(
            run=self.run,
            node=name,
            key=self.key,
            key_file=self._key_file,
            memory_of=name if self._apart else "",
        )
        self._sidecars[name] = NodeSidecar(plan)

    def _stop_all(self) -> None:
        while self._sidecars:
            self._sidecars.popitem()[1].stop()

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def clients(self) -> dict[str, SidecarClient]:
        """A client of each living node's sidecar."""
        return {name: sidecar.client for name, sidecar in self._sidecars.items()}

    @property
    def addresses(self) -> dict[str, str]:
        """Address of each living node's sidecar."""
        return {name: sidecar.address for name, sidecar in self._sidecars.items()}

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the living nodes' sidecars."""
        return tuple(sidecar.pid for sidecar in self._sidecars.values())

    def adopt(
        self,
        *,
        generation: int = 1,
        parity: int = 0,
        columns: int = 0,
        rank_nodes: Sequence[str] | None = None,
        restore: RestorePoint | None = None,
    ) -> SnapshotWorld:
        """Move all living nodes to a generation; one rank each unless ``rank_nodes`` is given."""
        world = SnapshotWorld(
            run=self.run,
            generation=generation,
            peers=tuple(SidecarPeer(node=n, address=at) for n, at in self.addresses.items()),
            rank_nodes=tuple(self.addresses if rank_nodes is None else rank_nodes),
            parity=parity,
            columns=columns,
            keep=KEEP,
        )
        for client in self.clients.values():
            client.adopt(world, restore=restore)
        return world

    def await_protected(self, world: SnapshotWorld, step: int) -> None:
        """Wait until every node reports ``step`` as protected; ``PeerError`` at a timeout."""
        for name, client in self.clients.items():
            reached = client.protected_step(
                generation=world.generation, at_least=step, timeout_s=_TIMEOUT_S
            )
            if reached < step:
                raise PeerError(f"node {name}: step {step} is not protected after {_TIMEOUT_S:g} s")

    def lose(self, name: str) -> None:
        """End one node; its memory is lost."""
        self._sidecars.pop(name).stop()
