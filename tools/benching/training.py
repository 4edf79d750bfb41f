"""Section lost: the training time that saving costs, with every core busy.

What a save blocks is the smaller part of what it costs: its threads, its copies and its writes slow
down the steps beside them. So processes train here, and the time lost is what a stretch of
training took, less what as many steps take when nothing is saved, just before and just after it.
Where others use the machine as well that is mostly theirs; the processor time is not.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from torch._C._distributed_c10d import TCPStore

from ckpt.errors import PeerError
from tools.benching import trainee
from tools.benching.nodes import SLOTS, Nodes
from tools.benching.samples import Row, Samples, Setup, stopwatch
from tools.benching.state import MANY_LAYERS, Mirror, State
from tools.benching.trainee import Guard, Outcome, Seat, Window

MEMCPY: Final = "memcpy of all ranks' state"
WAYS: Final = (
    trainee.HOLDFAST,
    trainee.PARITY,
    trainee.PERSIST,
    trainee.DCP_THREAD,
    trainee.DCP_PROCESS,
)
PEERS: Final = (trainee.DCP_THREAD, trainee.DCP_PROCESS)
RATIOS: Final = (2.0, 4.0, 8.0, 16.0)
_STEP_COPIES: Final = 4.0
_WINDOW_S: Final = 3.0
_QUICK_WINDOW_S: Final = 0.3
_PROBE_PRODUCTS: Final = 200
_ANSWER_S: Final = 300.0


def lost(setup: Setup) -> list[Row]:
    """Time training of as many processes as there are cores to fill, with and without saving."""
    rows: list[Row] = []
    for workers in (2,) if setup.quick else (1, 2, 4):
        with _Crew.start(setup, workers) as crew:
            rows += _lost(setup, crew)
            rows += _inflation(setup, crew)
    return rows


def _lost(setup: Setup, crew: _Crew) -> list[Row]:
    """One save in each window; what follows it is waited for by training on."""
    products = crew.products(_STEP_COPIES)
    window_s = _QUICK_WINDOW_S if setup.quick else _WINDOW_S
    steps = max(round(window_s / crew.step_s(products)), 4)
    samples, stalls, cpu = Samples(), Samples(), Samples()
    for _ in range(setup.repeat):
        samples.add({MEMCPY: crew.memcpy_s()})
        free = crew.train(trainee.NOTHING, steps=steps, products=products)
        for way in WAYS:
            found = crew.train(way, steps=steps, products=products)
            before, free = free, crew.train(trainee.NOTHING, steps=steps, products=products)
            step_s = (before.step_s + free.step_s) / 2
            step_cpu_s = (before.cpu_s + free.cpu_s) / (before.steps + free.steps)
            samples.add({_name(way, crew): found.seconds - found.steps * step_s})
            stalls.add({_name(way, crew): found.stall_s})
            cpu.add({_name(way, crew): found.cpu_s - found.steps * step_cpu_s})
        setup.lap()
    peers = [_name(way, crew) for way in PEERS]
    return [
        samples.row(
            "lost",
            name,
            0,
            MEMCPY,
            *(peer for peer in peers if way not in PEERS),
            extra=[
                ("of it the training threads waited", stalls.yardstick(name).seconds, "s"),
                ("processor time beside the training's", cpu.yardstick(name).seconds, "s"),
            ],
        )
        for way in WAYS
        for name in [_name(way, crew)]
    ]


def _name(way: str, crew: _Crew) -> str:
    return f"{way}, {crew.size} worker{'s' if crew.size > 1 else ''}"


def _inflation(setup: Setup, crew: _Crew) -> list[Row]:
    """A snapshot after every step: what a step takes longer, for steps of several lengths."""
    rows = []
    for ratio in (_STEP_COPIES,) if setup.quick else RATIOS:
        products, samples = crew.products(ratio), Samples()
        name = f"a step with a snapshot after every step, {crew.size} workers"
        for _ in range(setup.repeat):
            free = crew.train(trainee.NOTHING, steps=6, products=products)
            found = crew.train(trainee.HOLDFAST, steps=8, products=products, every=1)
            samples.add({name: found.step_s, trainee.NOTHING: free.step_s})
        free_s = samples.yardstick(trainee.NOTHING).seconds
        extra = [
            ("a step takes so many copies of the state", free_s / crew.copy_s, ""),
            ("longer by", (samples.yardstick(name).seconds / free_s - 1) * 100, "%"),
        ]
        rows.append(samples.row("lost", name, 0, trainee.NOTHING, extra=extra))
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class _Together:
    """A window of all ranks: its slowest, and the longest wait for a save of any.

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


class _Crew:
    """Processes that train together, and the sidecars that guard them."""

    def __init__(
        self, pipes: Sequence[Connection], mirror: Mirror, *, sidecars: Sequence[int]
    ) -> None:
        self._pipes, self._mirror, self.size = pipes, mirror, len(pipes)
        self._sidecars = sidecars
        self.copy_s = 0.0
        self._free_s = self._product_s = 0.0

    @classmethod
    @contextmanager
    def start(cls, setup: Setup, workers: int) -> Iterator[_Crew]:
        """Start them, warm up every way of saving, and time what a step is made of."""
        state = State(setup.size_bytes, seed=0, layers=MANY_LAYERS)
        with ExitStack() as stack:
            guards, sidecars = _guards(stack, setup, workers)
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            context = multiprocessing.get_context("spawn")
            pipes = []
            for rank in range(workers):
                pipe, theirs = context.Pipe()
                seat = Seat(
                    rank=rank,
                    world_size=workers,
                    meeting=f"127.0.0.1:{store.port}",
                    size_bytes=setup.size_bytes // workers,
                    directory=str(setup.directory / f"lost-{workers}"),
                    guards={way: found[rank] for way, found in guards.items()},
                )
                process = context.Process(target=trainee.serve, args=(seat, theirs))
                process.start()
                theirs.close()
                stack.callback(_end, process, pipe)
                pipes.append(pipe)
            crew = cls(pipes, Mirror(state), sidecars=sidecars)
            crew._warm_up()
            yield crew

    def _warm_up(self) -> None:
        for way in (trainee.NOTHING, *WAYS):
            for _ in range(1 if way in PEERS else SLOTS + 1):
                self.train(way, steps=2, products=0)
        self._free_s = self.train(trainee.NOTHING, steps=5, products=0).step_s
        longer_s = self.train(trainee.NOTHING, steps=5, products=_PROBE_PRODUCTS).step_s
        self._product_s = max(longer_s - self._free_s, 1e-6) / _PROBE_PRODUCTS
        copies = [self.train(trainee.HOLDFAST, steps=3, products=0).copy_s for _ in range(3)]
        self.copy_s = statistics.median(copies)

    def products(self, copies: float) -> int:
        """Return how much arithmetic makes a step as long as ``copies`` copies of the state."""
        return max(round((copies * self.copy_s - self._free_s) / self._product_s), 0)

    def step_s(self, products: int) -> float:
        """Return about how long such a step is."""
        return self._free_s + products * self._product_s

    def memcpy_s(self) -> float:
        """Time one copy of as many bytes as all ranks have, while they rest."""
        with stopwatch() as seconds:
            self._mirror.copy()
        return seconds[0]

    def train(self, way: str, *, steps: int, products: int, every: int = 0) -> _Together:
        """Have all ranks train a window."""
        window = Window(way=way, steps=steps, every=every, products=products)
        before_s = sum(map(_cpu_s, self._sidecars))
        for pipe in self._pipes:
            pipe.send(window)
        found = [_answer(pipe) for pipe in self._pipes]
        sidecars_s = sum(map(_cpu_s, self._sidecars)) - before_s
        return _Together(
            seconds=max(each.seconds for each in found),
            cpu_s=sum(each.cpu_s for each in found) + sidecars_s,
            steps=found[0].steps,
            stall_s=max(sum(each.stalls_s) for each in found),
            copy_s=max(each.copy_s for each in found),
        )


def _answer(pipe: Connection) -> Outcome:
    if not pipe.poll(_ANSWER_S):
        raise PeerError(f"a training process gave no answer within {_ANSWER_S:g} s")
    try:
        found: Outcome = pipe.recv()
    except EOFError as error:
        raise PeerError("a training process ended early; run with fewer --megabytes") from error
    return found


def _cpu_s(pid: int) -> float:
    """Return the processor time a process has used so far (``proc(5)``)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _end(process: multiprocessing.process.BaseProcess, pipe: Connection) -> None:
    try:
        pipe.send(None)
    except OSError:
        process.kill()
    process.join(_ANSWER_S)
    pipe.close()


def _guards(
    stack: ExitStack, setup: Setup, workers: int
) -> tuple[dict[str, list[Guard]], list[int]]:
    """Start the sidecars of every way: one for all ranks, or, for parity, at least two.

    Return what each rank needs of them, and their processes.
    """
    found: dict[str, list[Guard]] = {}
    pids: list[int] = []
    for way in (trainee.HOLDFAST, trainee.PARITY, trainee.PERSIST):
        parity = int(way == trainee.PARITY)
        names = [f"n{number}" for number in range(max(workers, 2) if parity else 1)]
        nodes = stack.enter_context(Nodes(_made(setup.directory), names))
        seats = names[:workers] if parity else names * workers
        pids += nodes.pids
        nodes.adopt(parity=parity, rank_nodes=seats)
        found[way] = [
            Guard(address=nodes.addresses[name], run=nodes.run, key=nodes.key) for name in seats
        ]
    return found, pids


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return directory
