"""Section snapshot: the state of one rank, copied into the memory of a real sidecar."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any, cast

from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save

from holdfast.ckpt.errors import CkptError
from holdfast.ckpt.memory.maps import SlotMaps
from holdfast.ckpt.snapshot.settings import CopySettings
from holdfast.ckpt.snapshot.snapshotter import Snapshotter
from holdfast.ckpt.state.capture import gather_alone
from holdfast.tools.bench.nodes import SLOTS, Nodes
from holdfast.tools.bench.samples import BenchRow, BenchSetup, Case, in_turn, stopwatch, timed
from holdfast.tools.bench.state import COPY_ALL, MANY_LAYERS, BenchState, MirrorMemory

MEMCPY = "memcpy"
CALL, FENCED, COPY = "snapshot() returns", "snapshot() + fence()", "copy, checksum"
FIRST = "first copy, new memory"
ASYNC_SAVE = "DCP async_save returns"


class SnapshotTrainer:
    """One rank, its sidecar, and its step counter."""

    def __init__(
        self, nodes: Nodes, state: BenchState, *, copying: CopySettings = COPY_ALL
    ) -> None:
        self._nodes, self._state, self.maps = nodes, state, SlotMaps()
        self.world = nodes.adopt()
        (self.client,) = nodes.clients.values()
        self.snapshots = Snapshotter(
            self.client,
            run=nodes.run,
            generation=self.world.generation,
            rank=0,
            world_size=1,
            gather=gather_alone,
            maps=self.maps,
            copying=copying,
        )
        self.step = 0

    def take(self) -> Mapping[str, float]:
        """Take one snapshot and wait for it at once; the trainer does nothing else meanwhile."""
        self.step += 1
        with stopwatch() as fenced:
            with stopwatch() as called:
                self.snapshots.snapshot(self._state.tracked, self.step)
            self.snapshots.fence()
        if self.snapshots.stats.last_step != self.step:
            raise CkptError(f"the snapshot of step {self.step} was not taken; report this")
        self._nodes.await_protected(self.world, self.step)
        return {CALL: called[0], FENCED: fenced[0], COPY: self.snapshots.stats.last_copy_s}

    def warm_up(self) -> float:
        """Take snapshots until every slot is in use; return the seconds of the first copy."""
        first_s = self.take()[COPY]
        for _ in range(SLOTS):
            self.take()
        return first_s

    def close(self) -> None:
        self.snapshots.close()
        self.maps.close()


def snapshot(setup: BenchSetup) -> list[BenchRow]:
    """Time the stall of the trainer by a snapshot, and the snapshot's copy."""
    state = BenchState(setup.size_bytes, seed=0, layers=MANY_LAYERS)
    mirror = MirrorMemory(state)
    with Nodes(setup.directory, ["a"]) as nodes, closing(SnapshotTrainer(nodes, state)) as trainer:
        first_s = trainer.warm_up()
        cases = [timed(MEMCPY, mirror.copy), trainer.take, _async_save(state, setup.directory)]
        samples = in_turn(cases, setup)
    size = state.size_bytes
    first = BenchRow(
        section="snapshot",
        name=FIRST,
        size_bytes=size,
        samples_s=(first_s,),
        beside=(samples.yardstick(MEMCPY),),
    )
    return [
        samples.row("snapshot", CALL, size, MEMCPY, ASYNC_SAVE),
        samples.row("snapshot", FENCED, size, MEMCPY, ASYNC_SAVE),
        samples.row("snapshot", COPY, size, MEMCPY),
        first,
    ]


def _async_save(state: BenchState, directory: Path) -> Case:
    """Time how long the call blocks; the write behind it is awaited but not timed."""

    def case() -> Mapping[str, float]:
        path = directory / "async"
        with stopwatch() as blocked:
            under_way = dcp_async_save(cast("dict[str, Any]", state.tensors), checkpoint_id=path)
        cast("Future[object]", under_way).result()
        shutil.rmtree(path)
        return {ASYNC_SAVE: blocked[0]}

    return case
