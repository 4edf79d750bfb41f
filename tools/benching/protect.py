"""Section protect: from sealed to protected on three nodes, and a lost block rebuilt.

Three sidecar processes on this machine stand for three nodes. Every byte between them goes
encrypted through the loopback, so on few cores this measures the cipher more than the codec.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from ckpt.arena import SlotFile
from ckpt.errors import CorruptError, PeerError
from ckpt.sidecar.client import SidecarClient
from ckpt.stripes import restore_points
from ckpt.testing.blocks import INDEX_ROOM_BYTES, make_index, random_payload
from ckpt.world import BlockEntry, RestorePoint
from tools.benching.nodes import Nodes
from tools.benching.samples import Row, Setup, Yardstick, in_turn, stopwatch, timed

NAMES = ("a", "b", "c")
PROTECT, REBUILD = "3 nodes: seal to protected", "rebuild of a lost block"
LOOPBACK = "plain TCP on loopback"
_TIMEOUT_S = 60.0
_PART_BYTES = 1 << 20


def protect(setup: Setup) -> list[Row]:
    """Spread the state over three nodes with one parity, then lose one of them."""
    share = max(setup.size_bytes // len(NAMES), 8)
    payloads = [random_payload(share, seed=(rank,)) for rank in range(len(NAMES))]
    with Nodes(setup.directory, NAMES) as nodes, ThreadPoolExecutor(len(NAMES)) as pool:
        trainers = _Trainers(nodes, payloads, pool)
        samples = in_turn([timed(LOOPBACK, lambda: _send_through(payloads)), trainers.take], setup)
        rebuild_s = trainers.lose_the_last()
    whole = share * len(NAMES)
    loopback = samples.yardstick(LOOPBACK)
    return [
        samples.row("protect", PROTECT, whole, LOOPBACK),
        Row(
            section="protect",
            name=REBUILD,
            size_bytes=share,
            samples_s=(rebuild_s,),
            beside=(Yardstick(name=LOOPBACK, seconds=loopback.seconds / len(NAMES)),),
        ),
    ]


class _Trainers:
    """A rank on each node; all seal at once, as after a step of data-parallel training."""

    def __init__(self, nodes: Nodes, payloads: list[bytes], pool: ThreadPoolExecutor) -> None:
        self._nodes, self._payloads, self._pool = nodes, payloads, pool
        self._world = nodes.adopt(parity=1)
        self._step = 0

    def take(self) -> Mapping[str, float]:
        """Write all blocks, then time their seals and what follows until all is protected."""
        self._step += 1
        written = [
            (client, *self._write(client, rank))
            for rank, client in enumerate(self._nodes.clients.values())
        ]
        with stopwatch() as seconds:
            sealing = [
                self._pool.submit(client.seal, slot_id=slot_id, entry=entry)
                for client, slot_id, entry in written
            ]
            for each in sealing:
                each.result()
            self._nodes.await_protected(self._world, self._step)
        return {PROTECT: seconds[0]}

    def _write(self, client: SidecarClient, rank: int) -> tuple[int, BlockEntry]:
        world, payload = self._world, self._payloads[rank]
        index = make_index(
            payload,
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
            size_bytes=len(payload) + INDEX_ROOM_BYTES,
            timeout_s=_TIMEOUT_S,
        )
        with closing(SlotFile.open(grant.path)) as slot:
            slot.block(len(payload))[:] = payload
            return grant.slot_id, slot.finish(index)

    def lose_the_last(self) -> float:
        """Lose the last node; return the seconds until its block is there again."""
        rank = len(NAMES) - 1
        self._nodes.lose(NAMES[rank])
        point = self._point()
        self._nodes.adopt(generation=self._world.generation + 1, restore=point)
        source = point.sources[rank]
        client = self._nodes.clients[source.node]
        with stopwatch() as seconds:
            handle = client.open_block(self._world, point.step, source)
        parts = client.read(self._world, point.step, rank, [(0, handle.payload_bytes)])
        if (
            not source.rebuilt
            or bytes(parts[0][: len(self._payloads[rank])]) != self._payloads[rank]
        ):
            raise CorruptError(f"{REBUILD}: it came back other than it was")
        return seconds[0]

    def _point(self) -> RestorePoint:
        inventories = [client.inventory() for client in self._nodes.clients.values()]
        points, reason = restore_points(inventories)
        if not points:
            raise PeerError(f"{REBUILD}: nothing can be restored: {reason}")
        return points[0]


def _send_through(payloads: list[bytes]) -> None:
    """Send the bytes from one thread to another over a TCP connection, neither coded nor checked.

    With one parity every byte crosses once: as much as the sidecars exchange.
    """
    wanted = sum(map(len, payloads))
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


def _send(address: tuple[str, int], payloads: list[bytes]) -> None:
    with socket.create_connection(address, _TIMEOUT_S) as connection:
        for payload in payloads:
            connection.sendall(payload)
