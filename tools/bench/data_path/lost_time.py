"""Section lost: the training time that saving costs, with every core busy.

The time that a save blocks training is the smaller part of its cost: its threads, copies and writes
also slow down the steps beside it. Therefore real training processes run here. The lost time is the
duration of a window of training, minus that of as many steps without saving, measured just before
and just after it. If other programs use the machine, most of the lost time may be theirs; the
processor time is not.
"""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from holdfast.ckpt.errors import PeerError
from holdfast.ckpt.torch_private import TCPStore
from holdfast.tools.bench.data_path import flash, trainee
from holdfast.tools.bench.data_path.trainee import (
    RankGuard,
    TraineeSeat,
    TrainingWindow,
    WindowOutcome,
)
from holdfast.tools.bench.kinds import FULL
from holdfast.tools.bench.nodes import SLOTS, Nodes
from holdfast.tools.bench.samples import BenchRow, BenchSetup, Timings, stopwatch
from holdfast.tools.bench.state import MANY_LAYERS, BenchState, MirrorMemory
from holdfast.tools.environment import cpu_s

MEMCPY: Final = "memcpy of all ranks' state"
OURS: Final = (trainee.HOLDFAST, trainee.PARITY, trainee.PERSIST)
PEERS: Final = (
    trainee.PLAIN_DISK,
    trainee.DCP_THREAD,
    trainee.DCP_PROCESS,
    *((trainee.FLASH_MEMORY, trainee.FLASH_DISK) if flash.is_installed() else ()),
)
WAYS: Final = (*OURS, *PEERS)
RATIOS: Final = (2.0, 4.0, 8.0, 16.0)
_TOGETHER: Final = 20
"""Memory, in states, that the processes of all ways take; a single way takes half."""

_STEP_COPIES: Final = 4.0
_WINDOW_S: Final = 3.0
_QUICK_WINDOW_S: Final = 0.3
_PROBE_PRODUCTS: Final = 200
_ANSWER_S: Final = 300.0


def lost(setup: BenchSetup) -> list[BenchRow]:
    """Time training with and without saving, on 1, 2 and 4 processes (``quick``: 2)."""
    rows: list[BenchRow] = []
    for workers in (2,) if setup.quick else (1, 2, 4):
        found = _Found()
        for ways in _crews(setup):
            with TraineeCrew.start(setup, workers, ways, pace=found.pace) as crew:
                found.pace = crew.pace
                _lost(setup, crew, ways, found)
                if trainee.HOLDFAST in ways:
                    curve = _inflation(setup, crew)
        rows += [*_rows(found, workers), *curve]
    return rows


def _crews(setup: BenchSetup) -> list[tuple[str, ...]]:
    """Return the groups of ways that share processes: all ways, if memory holds them all."""
    if setup.free_bytes >= _TOGETHER * setup.size_bytes:
        return [WAYS]
    return [(way,) for way in WAYS]


@dataclass(slots=True)
class _Found:
    """The measurements so far, by way of saving."""

    seconds: Timings = field(default_factory=Timings)
    stalls: Timings = field(default_factory=Timings)
    cpu: Timings = field(default_factory=Timings)
    pace: TraineePace | None = None


def _lost(setup: BenchSetup, crew: TraineeCrew, ways: Sequence[str], into: _Found) -> None:
    """Save once in each window, and train on until the save is done."""
    products = crew.pace.products(_STEP_COPIES)
    window_s = _QUICK_WINDOW_S if setup.quick else _WINDOW_S
    steps = max(round(window_s / crew.pace.step_s(products)), 4)
    for _ in range(setup.repeat):
        into.seconds.add({MEMCPY: crew.memcpy_s()})
        free = crew.train(trainee.NOTHING, steps=steps, products=products)
        for way in ways:
            found = crew.train(way, steps=steps, products=products)
            before, free = free, crew.train(trainee.NOTHING, steps=steps, products=products)
            step_s = (before.step_s + free.step_s) / 2
            step_cpu_s = (before.cpu_s + free.cpu_s) / (before.steps + free.steps)
            into.seconds.add({way: found.seconds - found.steps * step_s})
            into.stalls.add({way: found.stall_s})
            into.cpu.add({way: found.cpu_s - found.steps * step_cpu_s})
        setup.lap()


def _rows(found: _Found, workers: int) -> list[BenchRow]:
    rows = []
    for way in WAYS:
        row = found.seconds.row(
            "lost",
            way,
            0,
            MEMCPY,
            *(PEERS if way in OURS else ()),
            extra=[
                ("of it the training threads waited", found.stalls.yardstick(way).seconds, "s"),
                ("processor time beside the training's", found.cpu.yardstick(way).seconds, "s"),
            ],
        )
        rows.append(replace(row, name=f"{way}, {workers} worker{'s' if workers > 1 else ''}"))
    return rows


def _inflation(setup: BenchSetup, crew: TraineeCrew) -> list[BenchRow]:
    """Measure how much longer steps of several lengths take with a snapshot after every step."""
    rows = []
    for ratio in (_STEP_COPIES,) if setup.quick else RATIOS:
        products, samples = crew.pace.products(ratio), Timings()
        name = f"a step with a snapshot after every step, {crew.size} workers"
        for _ in range(setup.repeat):
            free = crew.train(trainee.NOTHING, steps=6, products=products)
            found = crew.train(trainee.HOLDFAST, steps=8, products=products, every=1)
            samples.add({name: found.step_s, trainee.NOTHING: free.step_s})
        free_s = samples.yardstick(trainee.NOTHING).seconds
        extra = [
            ("a step takes so many copies of the state", free_s / crew.pace.copy_s, ""),
            ("longer by", (samples.yardstick(name).seconds / free_s - 1) * 100, "%"),
        ]
        rows.append(samples.row("lost", name, 0, trainee.NOTHING, extra=extra))
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class TraineePace:
    """The parts of a step's time: its fixed part, each product, and one copy as the unit."""

    free_s: float
    product_s: float
    copy_s: float

    def products(self, copies: float) -> int:
        """Return the products that make a step as long as ``copies`` copies of the state."""
        return max(round((copies * self.copy_s - self.free_s) / self.product_s), 0)

    def step_s(self, products: int) -> float:
        """Return the expected duration of a step."""
        return self.free_s + products * self.product_s


@dataclass(frozen=True, slots=True, kw_only=True)
class TogetherWindow:
    """A window of all ranks: the slowest rank's time, and the longest wait of any rank for saves.

    ``cpu_s`` is the processor time of all ranks and all sidecars.
    """

    seconds: float
    cpu_s: float
    steps: int
    stall_s: float
    copy_s: float

    @property
    def step_s(self) -> float:
        return self.seconds / self.steps


class TraineeCrew:
    """Processes that train together, and the sidecars that guard them."""

    pace: TraineePace

    def __init__(
        self, pipes: Sequence[Connection], mirror: MirrorMemory, *, nodes: Mapping[str, Nodes]
    ) -> None:
        self._pipes, self._mirror, self.size = pipes, mirror, len(pipes)
        self._nodes = nodes
        self._sidecars = [pid for each in nodes.values() for pid in each.pids]

    @classmethod
    @contextmanager
    def start(
        cls,
        setup: BenchSetup,
        workers: int,
        ways: Sequence[str],
        *,
        pace: TraineePace | None = None,
        kind: str = FULL,
    ) -> Iterator[TraineeCrew]:
        """Start the processes, warm up their ways of saving, and time the parts of a step.

        If ``pace`` is given, it is used instead of a new measurement. ``kind`` is that of the
        state.
        """
        state = BenchState(setup.size_bytes, seed=0, layers=MANY_LAYERS)
        with ExitStack() as stack:
            nodes = _nodes(stack, setup, workers, ways)
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            context = multiprocessing.get_context("spawn")
            pipes = []
            for rank in range(workers):
                pipe, theirs = context.Pipe()
                seat = TraineeSeat(
                    rank=rank,
                    world_size=workers,
                    meeting=f"127.0.0.1:{store.port}",
                    size_bytes=setup.size_bytes // workers,
                    directory=str(setup.directory / f"lost-{workers}"),
                    guards={way: _guard(each, rank) for way, each in nodes.items()},
                    kind=kind,
                )
                process = context.Process(target=trainee.serve, args=(seat, theirs))
                process.start()
                theirs.close()
                stack.callback(end, process, pipe)
                pipes.append(pipe)
            crew = cls(pipes, MirrorMemory(state), nodes=nodes)
            for way in (trainee.NOTHING, *ways):
                for _ in range(1 if way in PEERS else SLOTS + 1):
                    crew.train(way, steps=2, products=0)
            copied = next((way for way in (trainee.HOLDFAST, trainee.EVERY) if way in ways), "")
            crew.pace = pace or crew._timed_pace(copied)
            yield crew

    def _timed_pace(self, way: str) -> TraineePace:
        free_s = self.train(trainee.NOTHING, steps=5, products=0).step_s
        longer_s = self.train(trainee.NOTHING, steps=5, products=_PROBE_PRODUCTS).step_s
        copies = [self.train(way, steps=3, products=0).copy_s for _ in range(3)]
        return TraineePace(
            free_s=free_s,
            product_s=max(longer_s - free_s, 1e-6) / _PROBE_PRODUCTS,
            copy_s=statistics.median(copies),
        )

    def shared_bytes(self, way: str) -> int:
        """Return the shared memory of slots and parity that a way of saving holds on all nodes."""
        found: list[Any] = [each.status()["bytes"] for each in self._nodes[way].clients.values()]
        return sum(int(each["slots"]) + int(each["parity"]) for each in found)

    def memcpy_s(self) -> float:
        """Time one copy of as many bytes as all ranks have, while the ranks are idle."""
        with stopwatch() as seconds:
            self._mirror.copy()
        return seconds[0]

    def train(self, way: str, *, steps: int, products: int, every: int = 0) -> TogetherWindow:
        """Train one window on all ranks."""
        window = TrainingWindow(way=way, steps=steps, every=every, products=products)
        before_s = sum(map(cpu_s, self._sidecars))
        for pipe in self._pipes:
            pipe.send(window)
        found = [answer(pipe) for pipe in self._pipes]
        sidecars_s = sum(map(cpu_s, self._sidecars)) - before_s
        return TogetherWindow(
            seconds=max(each.seconds for each in found),
            cpu_s=sum(each.cpu_s for each in found) + sidecars_s,
            steps=found[0].steps,
            stall_s=max(sum(each.stalls_s) for each in found),
            copy_s=max(each.copy_s for each in found),
        )


def answer(pipe: Connection) -> WindowOutcome:
    """Return a trainee's report on its window. Raises ``PeerError`` if there is none."""
    if not pipe.poll(_ANSWER_S):
        raise PeerError(f"a training process did not answer within {_ANSWER_S:g} s")
    try:
        found: WindowOutcome = pipe.recv()
    except EOFError as error:
        raise PeerError("a training process ended early; run with a smaller --megabytes") from error
    return found


def end(process: multiprocessing.process.BaseProcess, pipe: Connection) -> None:
    """End a trainee: ask it to end, or kill it if its pipe is closed."""
    try:
        pipe.send(None)
    except OSError:
        process.kill()
    process.join(_ANSWER_S)
    pipe.close()


def _nodes(
    stack: ExitStack, setup: BenchSetup, workers: int, ways: Sequence[str]
) -> dict[str, Nodes]:
    """Start the sidecars of every way: one for all ranks; for parity, at least two."""
    found: dict[str, Nodes] = {}
    for way in [way for way in (*OURS, trainee.EVERY) if way in ways]:
        parity = int(way in (trainee.PARITY, trainee.EVERY))
        names = [f"n{number}" for number in range(max(workers, 2) if parity else 1)]
        nodes = stack.enter_context(Nodes(_made(setup.directory), names))
        nodes.adopt(parity=parity, rank_nodes=names[:workers] if parity else names * workers)
        found[way] = nodes
    return found


def _guard(nodes: Nodes, rank: int) -> RankGuard:
    """Return the sidecar of a rank: that of its node, or the only one."""
    addresses = list(nodes.addresses.values())
    address = addresses[rank % len(addresses)]
    return RankGuard(address=address, run=nodes.run, key=nodes.key)


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return directory
