"""Section protect: time from seal to protected on three nodes.

Three sidecar processes on this machine represent three nodes, so they share its cores. They map
each other's memory; for the rows over loopback they are told not to, as between machines.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np

from holdfast.ckpt.errors import CorruptError, PeerError
from holdfast.ckpt.memory.arena import SlotFile
from holdfast.ckpt.memory.block import block_bytes
from holdfast.ckpt.memory.records import BlockEntry, RestorePoint
from holdfast.ckpt.native.sums import Sums, sums_of
from holdfast.ckpt.parity.stripes import restore_points
from holdfast.ckpt.sidecar.client import SidecarClient
from holdfast.ckpt.testing.shards import INDEX_ROOM_BYTES, make_index
from holdfast.tools.bench.nodes import Nodes
from holdfast.tools.bench.samples import BenchRow, BenchSetup, Case, in_turn, stopwatch, timed

NAMES = ("a", "b", "c")
PROTECT, LITTLE = "3 nodes: seal to protected", "3 nodes: the same, a tenth has changed"
SEALED, SEALED_LITTLE = (
    "3 nodes: seal to protected over loopback, sealed",
    "3 nodes: the same over loopback, a tenth has changed",
)
MEMCPY, LOOPBACK = "memcpy", "plain TCP on loopback"
_LITTLE = 10
_TIMEOUT_S = 60.0
_PART_BYTES = 1 << 20
_GRAIN_BYTES = 1 << 20


def protect(setup: BenchSetup) -> list[BenchRow]:
    """Protect the state on three nodes with one parity: all bytes new, and few bytes changed."""
    return [
        *_protect(setup, PROTECT, LITTLE, apart=False),
        *_protect(setup, SEALED, SEALED_LITTLE, apart=True),
    ]


def _protect(setup: BenchSetup, anew: str, little: str, *, apart: bool) -> list[BenchRow]:
    with (
        Nodes(setup.directory, NAMES, apart=apart) as nodes,
        closing(SealingRanks(nodes, setup.size_bytes)) as ranks,
    ):
        mirrors = [np.ones_like(payload) for payload in ranks.payloads]

        def copy() -> None:
            for mirror, payload in zip(mirrors, ranks.payloads, strict=True):
                np.copyto(mirror, payload)

        cases: list[Case] = [
            timed(MEMCPY, copy),
            timed(LOOPBACK, lambda: _send_through([each.data for each in ranks.payloads])),
            lambda: {anew: ranks.take()},
            lambda: {little: ranks.take(one_in=_LITTLE)},
        ]
        samples = in_turn(cases, setup)
    whole = sum(payload.nbytes for payload in ranks.payloads)
    return [samples.row("protect", name, whole, MEMCPY, LOOPBACK) for name in (anew, little)]


class SealingRanks:
    """One rank on each of the nodes `NAMES`; all seal at once, as after a training step."""

    def __init__(self, nodes: Nodes, size_bytes: int) -> None:
        self._nodes, self._pool = nodes, ThreadPoolExecutor(len(NAMES))
        draw = np.random.default_rng(0)
        share = max(size_bytes // len(NAMES), 8)
        self.payloads = [draw.integers(0, 256, share, dtype=np.uint8) for _ in NAMES]
        self._generation = 1
        self._world = nodes.adopt(parity=1)
        self._step = 0

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def take(self, *, one_in: int = 1) -> float:
        """Change every byte, or one MiB in ``one_in``; write and seal all blocks.

        Returns the seconds from the first seal until every node reports the step as protected.
        """
        self._step += 1
        for payload in self.payloads:
            for at in range(0, payload.nbytes, _GRAIN_BYTES * one_in):
                payload[at : at + _GRAIN_BYTES] += 1
        written = [
            (client, *self._write(client, rank))
            for rank, client in enumerate(self._nodes.clients.values())
        ]
        with stopwatch() as seconds:
            sealing = [
                self._pool.submit(client.seal, slot_id=slot_id, entry=entry, sums=sums)
                for client, slot_id, entry, sums in written
            ]
            for each in sealing:
                each.result()
            self._nodes.await_protected(self._world, self._step)
        return seconds[0]

    def _write(self, client: SidecarClient, rank: int) -> tuple[int, BlockEntry, Sums]:
        world, payload = self._world, self.payloads[rank]
        index = make_index(
            payload.tobytes(),
            run=world.run,
            generation=world.generation,
            step=self._step,
            rank=rank,
            world_size=len(world.rank_nodes),
        )
        grant = client.acquire(
            generation=world.generation,
            step=self._step,
            rank=rank,
            size_bytes=payload.nbytes + INDEX_ROOM_BYTES,
            timeout_s=_TIMEOUT_S,
        )
        with closing(SlotFile.open(grant.path)) as slot:
            slot.block(payload.nbytes)[:] = payload.data
            entry = slot.finish(index)
            return grant.slot_id, entry, sums_of(slot.block(block_bytes(entry)))

    def lose_the_last(self) -> float:
        """Lose the last node; return the seconds until its block is rebuilt.

        Afterwards the node is back, empty, and all nodes are in a new generation.
        """
        rank, saved = len(NAMES) - 1, self._world
        self._nodes.lose(NAMES[rank])
        point = self._point()
        self._adopt(point)
        source = point.sources[rank]
        client = self._nodes.clients[source.node]
        with stopwatch() as seconds:
            handle = client.open_block(saved, point.step, source)
        parts = client.read(saved, point.step, rank, [(0, handle.payload_bytes)])
        if not source.rebuilt or parts[0] != self.payloads[rank].data:
            raise CorruptError(f"node {NAMES[rank]}: the rebuilt block differs from the original")
        self._nodes.start(NAMES[rank])
        self._adopt(None)
        return seconds[0]

    def _adopt(self, restore: RestorePoint | None) -> None:
        self._generation += 1
        self._world = self._nodes.adopt(generation=self._generation, parity=1, restore=restore)

    def _point(self) -> RestorePoint:
        inventories = [client.inventory() for client in self._nodes.clients.values()]
        points, reason = restore_points(inventories)
        if not points:
            raise PeerError(f"nothing can be restored: {reason}")
        return points[0]


def _send_through(payloads: Sequence[memoryview]) -> None:
    """Send the bytes from one thread to another over TCP, neither coded nor verified.

    With one parity every byte crosses once: as many bytes as the sidecars exchange.
    """
    wanted = sum(payload.nbytes for payload in payloads)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(_TIMEOUT_S)
        sender = threading.Thread(target=_send, args=(server.getsockname(), payloads), daemon=True)
        sender.start()
        connection, _ = server.accept()
        with connection:
            connection.settimeout(_TIMEOUT_S)
            room, got = bytearray(_PART_BYTES), 0
            while got < wanted:
                if not (count := connection.recv_into(room)):
                    raise PeerError(f"{LOOPBACK}: the connection ended early")
                got += count
        sender.join()


def _send(address: tuple[str, int], payloads: Sequence[memoryview]) -> None:
    with socket.create_connection(address, _TIMEOUT_S) as connection:
        for payload in payloads:
            connection.sendall(payload)
