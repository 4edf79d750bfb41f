"""Sidecars that represent nodes, as processes or threads, and faults for them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from doubles.blocks import make_world, write_block

from holdfast.ckpt.memory.arena import ARENA_ROOT, arena_path, hold
from holdfast.ckpt.memory.records import Inventory, RestorePoint, SnapshotWorld
from holdfast.ckpt.sidecar.client import SidecarClient
from holdfast.ckpt.sidecar.config import SidecarConfig
from holdfast.ckpt.sidecar.launch import SidecarProcess, start_sidecar
from holdfast.ckpt.sidecar.server import Sidecar
from holdfast.ckpt.transport import RunKey

DEADLINE_S = 90.0
SIZES = (70_001, 30_000, 50_003)


class SidecarGroup:
    """Sidecars of one run, by node name, with a client each.

    As ``threads`` they start in no time, and a kill is a stop that nobody is told of.
    """

    def __init__(self, directory: Path, *, threads: bool = False) -> None:
        self.directory, self.threads = directory, threads
        self.run = f"t{os.getpid()}-{time.time_ns()}"
        self.key = RunKey.new()
        self.key_file = directory / "key.json"
        self.key.save(self.key_file)
        self.processes: dict[str, SidecarProcess] = {}
        self._held: dict[str, int] = {}
        self.sidecars: dict[str, Sidecar] = {}
        self.clients: dict[str, SidecarClient] = {}

    def start(self, *nodes: str) -> None:
        for node in nodes:
            if self.threads:
                self.sidecars[node] = self._start_thread(node)
            else:
                self.processes[node] = start_sidecar(
                    run=self.run, node=node, key_file=self.key_file, run_dir=self.directory
                )
            self._let_go(node)
            self.clients[node] = SidecarClient(self.addresses()[node], self.key)

    def _start_thread(self, node: str) -> Sidecar:
        config = SidecarConfig(
            run=self.run,
            node=node,
            key_file=str(self.key_file),
            arena_dir=str(arena_path(self.run, node)),
        )
        return Sidecar(config, self.key)

    def addresses(self) -> dict[str, str]:
        both = {**self.processes, **self.sidecars}
        return {node: sidecar.address for node, sidecar in both.items()}

    def adopt(
        self,
        *,
        rank_nodes: tuple[str, ...] | None = None,
        generation: int = 1,
        parity: int = 1,
        keep: int = 2,
        columns: int = 0,
        restore: RestorePoint | None = None,
    ) -> SnapshotWorld:
        """Have every living sidecar enter a generation."""
        addresses = self.addresses()
        world = make_world(
            addresses,
            run=self.run,
            rank_nodes=rank_nodes,
            generation=generation,
            parity=min(parity, len(addresses) - 1),
            keep=keep,
            columns=columns,
        )
        for client in self.clients.values():
            client.adopt(world, restore=restore)
        return world

    def await_protected(self, world: SnapshotWorld, step: int) -> None:
        for node, client in self.clients.items():
            reached = client.protected_step(
                generation=world.generation, at_least=step, timeout_s=DEADLINE_S
            )
            assert reached >= step, (node, reached, client.status())

    def kill(self, node: str, *, wipe: bool) -> None:
        """SIGKILL a sidecar; ``wipe`` takes its shared memory too, as the loss of a node does.

        The memory that a successor is to find is held until the successor is there: any job that
        starts beside this test sweeps memory that nobody holds.
        """
        self.clients.pop(node).close()
        if not wipe:
            self._held[node] = hold(arena_path(self.run, node))
        if self.threads:
            self.sidecars.pop(node).close(remove=wipe)
            return
        process = self.processes.pop(node)
        os.kill(process.pid, signal.SIGKILL)
        process.process.wait()
        process.release()
        if wipe:
            shutil.rmtree(process.arena_dir, ignore_errors=True)

    def _let_go(self, *nodes: str) -> None:
        for node in nodes:
            if node in self._held:
                os.close(self._held.pop(node))

    def stop(self) -> None:
        for client in self.clients.values():
            client.close()
        self._let_go(*list(self._held))
        for process in self.processes.values():
            process.stop()
        for sidecar in self.sidecars.values():
            sidecar.close(remove=True)
        for left in self.leftovers():
            shutil.rmtree(left, ignore_errors=True)

    def leftovers(self) -> list[Path]:
        return list(ARENA_ROOT.glob(f"holdfast-{self.run}*"))


@contextlib.contextmanager
def sidecar_group(directory: Path, *nodes: str, threads: bool = False) -> Iterator[SidecarGroup]:
    group = SidecarGroup(directory, threads=threads)
    try:
        group.start(*nodes)
        yield group
    finally:
        group.stop()


def write_step(
    group: SidecarGroup, world: SnapshotWorld, step: int, *, sizes: Sequence[int] = SIZES
) -> dict[int, bytes]:
    """Have every rank write ``step``; return the payloads once it is protected."""
    payloads = {
        rank: write_block(group.clients[node], world, step=step, rank=rank, nbytes=sizes[rank])
        for rank, node in enumerate(world.rank_nodes)
    }
    group.await_protected(world, step)
    return payloads


def inventories(group: SidecarGroup) -> list[Inventory]:
    return [client.inventory() for client in group.clients.values()]


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"never: {what}"
        time.sleep(0.01)
