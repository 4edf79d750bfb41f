"""Section recover: verified restores from own memory, in a fresh process, and from parity."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from holdfast.ckpt.errors import PeerError
from holdfast.ckpt.memory.arena import arena_path, hold, sweep
from holdfast.ckpt.memory.maps import SlotMaps
from holdfast.ckpt.memory.records import RestorePoint
from holdfast.ckpt.native.isal import address_of
from holdfast.ckpt.recovery.memory_source import MemorySource
from holdfast.ckpt.sidecar.client import SidecarClient
from holdfast.ckpt.state.restore import restore
from holdfast.ckpt.transport import RunKey
from holdfast.tools.bench.data_path.protect import NAMES, SealingRanks
from holdfast.tools.bench.data_path.snapshot import MEMCPY, SnapshotTrainer
from holdfast.tools.bench.nodes import Nodes
from holdfast.tools.bench.samples import BenchRow, BenchSetup, Case, in_turn, stopwatch, timed
from holdfast.tools.bench.state import MANY_LAYERS, BenchState, MirrorMemory

LIVING, FRESH = "own arena, living process", "own arena, fresh process"
REBUILT = "one node of three gone: its block from parity"
ITS_MEMCPY = "memcpy of that block"
TMPFS_LOAD: Final = "DCP load from tmpfs"
_ANSWER_S: Final = 120.0


def recover(setup: BenchSetup) -> list[BenchRow]:
    """Time restores from memory into live tensors, and the rebuilding of a lost node's block."""
    return [*_from_own_arena(setup), _from_parity(setup)]


def _from_own_arena(setup: BenchSetup) -> list[BenchRow]:
    state = BenchState(setup.size_bytes, seed=0, layers=MANY_LAYERS)
    target = BenchState(setup.size_bytes, seed=1, layers=MANY_LAYERS)
    mirror = MirrorMemory(state)
    with (
        Nodes(setup.directory, ["a"]) as nodes,
        closing(SnapshotTrainer(nodes, state)) as trainer,
        _shared_directory(nodes.run) as files,
    ):
        trainer.take()
        point = trainer.client.locate(generation=trainer.world.generation, step=trainer.step)

        def living() -> Mapping[str, float]:
            target.wipe()
            address = nodes.addresses["a"]
            seconds = _restore(target, point, address, nodes.key, maps=trainer.maps)
            state.require_equal(target, what=LIVING)
            return {LIVING: seconds}

        dcp_save(cast("dict[str, Any]", state.tensors), checkpoint_id=files, no_dist=True)
        wanted = cast("dict[str, Any]", target.tensors)
        cases: list[Case] = [
            timed(MEMCPY, mirror.copy),
            living,
            lambda: {FRESH: _in_a_fresh_process(setup, point, nodes)},
            timed(TMPFS_LOAD, lambda: dcp_load(wanted, checkpoint_id=files, no_dist=True)),
        ]
        samples = in_turn(cases, setup)
    size = state.size_bytes
    return [samples.row("recover", name, size, MEMCPY, TMPFS_LOAD) for name in (LIVING, FRESH)]


def _restore(
    target: BenchState,
    point: RestorePoint,
    address: str,
    key: RunKey,
    *,
    maps: SlotMaps | None = None,
) -> float:
    """Restore from the node's sidecar; return the seconds. A writer's ``maps`` are already warm."""
    with stopwatch() as seconds, closing(SidecarClient(address, key)) as client:
        source = MemorySource(
            point, local=client, local_node="a", addresses={"a": address}, key=key, maps=maps
        )
        with source:
            restore(target.tracked, source, rank=0)
    return seconds[0]


def _in_a_fresh_process(setup: BenchSetup, point: RestorePoint, nodes: Nodes) -> float:
    """Return how long a process that has just built its model waits for its state."""
    ours, theirs = multiprocessing.Pipe()
    words = (theirs, setup.size_bytes, point, nodes.addresses["a"], nodes.key)
    process = multiprocessing.get_context("spawn").Process(target=_restored, args=words)
    process.start()
    theirs.close()
    try:
        if not ours.poll(_ANSWER_S):
            raise PeerError(f"the fresh process did not answer within {_ANSWER_S:g} s")
        return float(ours.recv())
    except EOFError as error:
        raise PeerError("the fresh process ended early; run with a smaller --megabytes") from error
    finally:
        process.join(_ANSWER_S)
        ours.close()


def _restored(
    pipe: Connection, size_bytes: int, point: RestorePoint, address: str, key: RunKey
) -> None:
    target = BenchState(size_bytes, seed=1, layers=MANY_LAYERS)
    pipe.send(_restore(target, point, address, key))


def _from_parity(setup: BenchSetup) -> BenchRow:
    """In each round, lose a node, rebuild and verify its block, and bring the node back."""
    with (
        Nodes(setup.directory, NAMES) as nodes,
        closing(SealingRanks(nodes, setup.size_bytes)) as ranks,
    ):
        block = np.frombuffer(ranks.payloads[-1], dtype=np.uint8)
        room = np.ones_like(block)

        def copy() -> None:
            ctypes.memmove(address_of(room.data), block.ctypes.data, block.nbytes)

        def rebuild() -> Mapping[str, float]:
            ranks.take()
            return {REBUILT: ranks.lose_the_last()}

        samples = in_turn([timed(ITS_MEMCPY, copy), rebuild], setup)
    return samples.row("recover", REBUILT, block.nbytes, ITS_MEMCPY)


@contextmanager
def _shared_directory(run: str) -> Iterator[Path]:
    """Yield a directory in shared memory that, like an arena, does not survive a crash."""
    directory = arena_path(run, "files")
    lock_fd = hold(directory)
    try:
        yield directory
    finally:
        os.close(lock_fd)
        sweep(exactly=directory.name)
