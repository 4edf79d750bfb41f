"""A process that trains on one core and saves its state in one of several ways.

Its step has the parts of a real one: arithmetic in the cache, an exchange with the other ranks, and
an optimizer that passes over the whole state.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save

from holdfast.ckpt.errors import CkptError
from holdfast.ckpt.memory.target import CheckpointTarget
from holdfast.ckpt.sidecar.client import SidecarClient
from holdfast.ckpt.snapshot.settings import CopySettings
from holdfast.ckpt.snapshot.snapshotter import Snapshotter
from holdfast.ckpt.torch_private import TCPStore
from holdfast.ckpt.transport import RunKey
from holdfast.tools.bench.data_path.flash import Flash
from holdfast.tools.bench.data_path.plain_disk import PlainDisk
from holdfast.tools.bench.kinds import FULL, KINDS
from holdfast.tools.bench.state import COPY_ALL, BenchState

_SIDE = 256
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGuard:
    """The sidecar that guards a rank in one way of saving."""

    address: str
    run: str
    key: RunKey


@dataclass(frozen=True, slots=True, kw_only=True)
class TraineeSeat:
    """A trainee's rank, the ranks' meeting point, and its guards by way of saving.

    ``kind`` is that of its state (`holdfast.tools.bench.kinds`).
    """

    rank: int
    world_size: int
    meeting: str
    size_bytes: int
    directory: str
    guards: dict[str, RankGuard]
    kind: str = FULL


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingWindow:
    """An order to train at least ``steps`` steps and to save by ``way`` every ``every`` steps.

    If ``every`` is 0, one save is made after the first step, and training continues until it is
    done. ``products`` is the arithmetic of a step.
    """

    way: str
    steps: int
    every: int
    products: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowOutcome:
    """The cost of a window; ``stalls_s`` are the times that the trainee itself waited, by save.

    ``copy_s`` is the duration of the last copy in the copying thread, 0 for a way without one.
    ``cpu_s`` is the processor time of the whole process, until the save was done.
    """

    seconds: float
    cpu_s: float
    steps: int
    stalls_s: tuple[float, ...]
    copy_s: float


class Saver(Protocol):
    """A way of saving; the trainee calls ``fence`` before each optimizer step."""

    def save(self, step: int) -> None: ...
    def fence(self) -> None: ...
    def is_done(self) -> bool: ...
    def close(self) -> None: ...


class _Nothing:
    def save(self, step: int) -> None:
        pass

    def fence(self) -> None:
        pass

    def is_done(self) -> bool:
        return True

    def close(self) -> None:
        pass


class _Holdfast:
    """Snapshots; a save is done when it is protected, or durable if it is persisted."""

    def __init__(self, seat: TraineeSeat, state: BenchState, *, way: str, persist: bool) -> None:
        # the names differ by rank: a tensor that all ranks have under one name is written once
        self._tracked = {f"{name}{seat.rank}": each for name, each in state.tracked.items()}
        self._persist = persist
        guard = seat.guards[way]
        self._client = SidecarClient(guard.address, guard.key)
        target = CheckpointTarget(root=str(Path(seat.directory) / way)) if persist else None
        self.snapshots = Snapshotter(
            self._client,
            run=guard.run,
            generation=1,
            rank=seat.rank,
            world_size=seat.world_size,
            gather=_gather,
            checkpoint=target,
            copying=COPY_ALL if seat.kind == FULL or way == EVERY else CopySettings(),
        )
        self._step = 0

    def save(self, step: int) -> None:
        self._step += 1
        self.snapshots.snapshot(self._tracked, self._step, persist=self._persist)

    def fence(self) -> None:
        self.snapshots.copied()

    def is_done(self) -> bool:
        if self.snapshots.stats.discarded:
            raise CkptError(f"a snapshot was discarded: {self.snapshots.stats.torn}")
        if self._persist:
            return self._client.durable_step() >= self._step
        return self._client.protected_step(generation=1) >= self._step

    def close(self) -> None:
        self.snapshots.close()
        self._client.close()


class _Dcp:
    """torch.distributed.checkpoint's ``async_save``, written by a thread or a process."""

    def __init__(self, seat: TraineeSeat, state: BenchState, kind: AsyncCheckpointerType) -> None:
        self._state = {f"r{seat.rank}.{name}": each for name, each in state.tensors.items()}
        self._kind, self._directory = kind, Path(seat.directory) / kind.name.lower()
        self._group = dist.new_group()  # its thread communicates during training
        self._under_way: Future[object] | None = None

    def save(self, step: int) -> None:
        if self._under_way is not None:
            self._under_way.result()  # one at a time
        path = self._directory / str(step % 2)
        found = dcp_async_save(
            cast("dict[str, Any]", self._state),
            checkpoint_id=path,
            async_checkpointer_type=self._kind,
            process_group=self._group,
        )
        self._under_way = cast("Future[object]", getattr(found, "upload_completion", found))

    def fence(self) -> None:
        pass  # the call returned only after everything was copied

    def is_done(self) -> bool:
        if self._under_way is None or not self._under_way.done():
            return self._under_way is None
        self._under_way.result()
        return True

    def close(self) -> None:
        if self._under_way is not None:
            self._under_way.result()
        shutil.rmtree(self._directory, ignore_errors=True)


HOLDFAST, PARITY, PERSIST = "holdfast", "holdfast + parity", "holdfast + persistence"
EVERY = "holdfast + parity, all copied"
DCP_THREAD, DCP_PROCESS = "DCP async_save, thread", "DCP async_save, process"
FLASH_MEMORY, FLASH_DISK = "DLRover, memory", "DLRover, memory and disk"
PLAIN_DISK = "only a plain file"
NOTHING = "no saving"


def _saver(seat: TraineeSeat, state: BenchState, way: str) -> Saver:
    makers: dict[str, Callable[[], Saver]] = {
        NOTHING: _Nothing,
        HOLDFAST: lambda: _Holdfast(seat, state, way=way, persist=False),
        PARITY: lambda: _Holdfast(seat, state, way=way, persist=False),
        EVERY: lambda: _Holdfast(seat, state, way=way, persist=False),
        PERSIST: lambda: _Holdfast(seat, state, way=way, persist=True),
        DCP_THREAD: lambda: _Dcp(seat, state, AsyncCheckpointerType.THREAD),
        DCP_PROCESS: lambda: _Dcp(seat, state, AsyncCheckpointerType.PROCESS),
        PLAIN_DISK: lambda: PlainDisk(
            Path(seat.directory) / "plain" / str(seat.rank), state.size_bytes
        ),
        FLASH_MEMORY: lambda: _flash(seat, state, persist=False),
        FLASH_DISK: lambda: _flash(seat, state, persist=True),
    }
    return makers[way]()


def _flash(seat: TraineeSeat, state: BenchState, *, persist: bool) -> Flash:
    place = Path(seat.directory) / "flash"
    return Flash(state.tensors, place, seat=(seat.rank, seat.world_size), persist=persist)


def _gather(value: Any) -> list[Any]:
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return list(found)


class Trainee:
    """The state, the step, and the ways of saving used so far."""

    def __init__(self, seat: TraineeSeat) -> None:
        torch.set_num_threads(1)
        self._seat = seat
        self._state = KINDS[seat.kind](seat.size_bytes, seed=seat.rank)
        self._state.train()
        self._left, self._right = torch.rand(_SIDE, _SIDE), torch.rand(_SIDE, _SIDE)
        self._out = torch.empty(_SIDE, _SIDE)
        self._savers: dict[str, Saver] = {}

    def train(self, window: TrainingWindow) -> WindowOutcome:
        """Train a window and return its costs."""
        if window.way not in self._savers:
            self._savers[window.way] = _saver(self._seat, self._state, window.way)
        saver = self._savers[window.way]
        stalls: list[float] = []
        dist.barrier()
        began_cpu_s = time.process_time()
        began_s, steps, is_done = time.perf_counter(), 0, False
        while steps < window.steps or not is_done:
            self._compute(window.products)
            is_done = self._meet(saver.is_done()) and steps > 0
            waited_s = _timed(saver.fence)
            if stalls:
                stalls[-1] += waited_s
            self._state.train()
            steps += 1
            wanted = steps == 1 if window.every == 0 else steps % window.every == 0
            if wanted and steps < max(window.steps, 2):
                stalls.append(_timed(partial(saver.save, steps)))
        seconds = time.perf_counter() - began_s
        while not self._meet(saver.is_done()):
            time.sleep(0.01)
        copy_s = saver.snapshots.stats.last_copy_s if isinstance(saver, _Holdfast) else 0.0
        return WindowOutcome(
            seconds=seconds,
            cpu_s=time.process_time() - began_cpu_s,
            steps=steps,
            stalls_s=tuple(stalls),
            copy_s=copy_s,
        )

    def _compute(self, products: int) -> None:
        for _ in range(products):
            torch.mm(self._left, self._right, out=self._out)

    @staticmethod
    def _meet(ready: bool) -> bool:
        """Return whether ``ready`` is true on every rank; a real step waits for the ranks too."""
        count = torch.tensor([int(ready)])
        dist.all_reduce(count)
        return int(count) == dist.get_world_size()

    def close(self) -> None:
        """Close every way of saving."""
        for saver in self._savers.values():
            saver.close()


def _timed(work: Callable[[], None]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def serve(seat: TraineeSeat, pipe: Connection) -> None:
    """Run as a process: train each window that arrives, until None arrives."""
    host, _, port = seat.meeting.rpartition(":")
    _be_quiet(Path(seat.directory))
    os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": "0"}  # DCP's process needs both
    with ExitStack() as stack:
        dist.init_process_group(
            "gloo",
            store=TCPStore(
                host,
                int(port),
                world_size=seat.world_size,
                is_master=False,
                timeout=timedelta(seconds=_TIMEOUT_S),
            ),
            rank=seat.rank,
            world_size=seat.world_size,
        )
        stack.callback(dist.destroy_process_group)
        trainee = Trainee(seat)
        stack.callback(trainee.close)
        while (window := pipe.recv()) is not None:
            pipe.send(trainee.train(window))


def _be_quiet(directory: Path) -> None:
    """Redirect the progress output of other tools to a file; a traceback still shows."""
    directory.mkdir(parents=True, exist_ok=True)
    output = os.open(directory / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    for fd in (1, 2):
        os.dup2(output, fd)
    os.close(output)
