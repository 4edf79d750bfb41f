"""Section environments: training beside a thousand environment processes, and what each takes.

As many training loops as there are processors run alone, then beside environments that are called
again as soon as they reply. Their replies together ask for all processors: who is served first is
what is measured.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from holdfast.adapters.rl.environments.base import Action
from holdfast.adapters.rl.environments.process_settings import ProcessConfig
from holdfast.adapters.rl.environments.processes.calls import ProcessCalls
from holdfast.adapters.rl.environments.processes.pool import ProcessPool
from holdfast.adapters.rl.environments.registry import EnvironmentConfig
from holdfast.elastic.processes.children import Child
from holdfast.tools.bench.environments.learner import COUNT
from holdfast.tools.bench.faults.pauses import sampled as median_of
from holdfast.tools.bench.samples import BenchSetup, Figure, Tempo
from holdfast.tools.chaos.faults.environments import of_workers
from holdfast.tools.environment import cores

ALONE: Final = "training alone"
YIELDING: Final = "beside environments"
EQUAL: Final = "beside environments that do not yield"
STEPS: Final = "steps/s"
REPLIES: Final = "replies/s"
PRIVATE: Final = "memory of an environment process"
SERVER: Final = "memory of their server"
START: Final = "start of all of them"

_COUNT, _QUICK_COUNT = 1000, 16
_WINDOW_S, _QUICK_WINDOW_S = 10.0, 0.5
_WAIT_S: Final = 1.0
_BUSY: Final = 1.0
"""The processors' whole time is what all environments together would compute in a second."""

_LEARNER: Final = "holdfast.tools.bench.environments.learner"
_LOOK_S: Final = 0.02
_PATIENT_S: Final = 600.0


def environments(setup: BenchSetup) -> list[Figure]:
    """Measure the rates of both sides, and the environments' memory."""
    count = _QUICK_COUNT if setup.quick else _COUNT
    rates: dict[str, list[float]] = {ALONE: [], YIELDING: [], EQUAL: []}
    replies: dict[str, list[float]] = {YIELDING: [], EQUAL: []}
    memory: dict[str, list[float]] = {PRIVATE: [], SERVER: [], START: []}
    window_s = _QUICK_WINDOW_S if setup.quick else _WINDOW_S
    with Tempo(setup, total=3 * setup.repeat) as tempo:
        for number in range(setup.repeat):
            tempo.say(f"{ALONE}, {number + 1} of {setup.repeat}")
            with _learners(setup.directory) as learners:
                rates[ALONE].append(learners.rate(window_s))
            tempo.beat()
            for name in (YIELDING, EQUAL):
                tempo.say(f"{name}, {number + 1} of {setup.repeat}")
                with _crowd(count, yields=name == YIELDING) as crowd:
                    memory[START].append(crowd.start_s)
                    for kind, nbytes in crowd.memory().items():
                        memory[kind].append(nbytes)
                    with _learners(setup.directory) as learners:
                        crowd.replies = 0
                        rates[name].append(learners.rate(window_s, turn=crowd.turn))
                        replies[name].append(crowd.replies / window_s)
                tempo.beat()
    return _figures(rates, replies, memory)


def _figures(
    rates: dict[str, list[float]], replies: dict[str, list[float]], memory: dict[str, list[float]]
) -> list[Figure]:
    section = "environments"
    base = median_of(section, f"{ALONE}: {STEPS}", rates[ALONE], unit="steps/s")
    found = [base]
    for name in (YIELDING, EQUAL):
        found += [
            median_of(section, f"{name}: {STEPS}", rates[name], unit="steps/s", versus=base),
            median_of(section, f"{name}: {REPLIES}", replies[name], unit="replies/s"),
        ]
    return [
        *found,
        median_of(section, START, memory[START]),
        median_of(section, PRIVATE, memory[PRIVATE], unit="B"),
        median_of(section, SERVER, memory[SERVER], unit="B"),
    ]


class _Crowd:
    """Environments that are all called again and again."""

    def __init__(self, count: int, *, yields: bool) -> None:
        settings = {"wait_s": _WAIT_S, "compute_s": _BUSY * cores() * _WAIT_S / count}
        config = EnvironmentConfig(
            factory="holdfast.tools.bench.environments.busy_tool:BusyTool",
            settings=settings,
            limit_s=_PATIENT_S,
            processes=ProcessConfig(count=count, yields=yields, start_s=_PATIENT_S),
        )
        began_s = time.perf_counter()
        self._pool = ProcessPool(config, seed=0, owner="bench")
        self._calls, self.replies = ProcessCalls(self._pool, config), 0
        for ordinal in range(count):
            self._ask(ordinal)
        while self._pool.size < count or self._pool.starting:
            self.turn(_LOOK_S)
        self.start_s = time.perf_counter() - began_s

    def _ask(self, ordinal: int) -> None:
        self._calls.submit(Action(ordinal=ordinal, sample=0, turn=0, text="", ended=True))

    def turn(self, wait_s: float) -> None:
        """Take the replies that came; each is followed by another call."""
        for (ordinal, _), _ in self._calls.replies(wait_s):
            self.replies += 1
            self._ask(ordinal)

    def memory(self) -> dict[str, float]:
        """Return the bytes of a process and of the server; shared pages count in parts."""
        inside = [_proportional_bytes(pid) for _, pid in of_workers({"bench": os.getpid()})]
        server = sum(map(_proportional_bytes, _line_of(self._pool.pid)))
        return {PRIVATE: sum(inside) / len(inside), SERVER: server}

    def close(self) -> None:
        """End all of them."""
        self._pool.close()


@contextmanager
def _crowd(count: int, *, yields: bool) -> Iterator[_Crowd]:
    crowd = _Crowd(count, yields=yields)
    try:
        yield crowd
    finally:
        crowd.close()


class _Learners:
    """One training loop for each processor."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files

    def steps(self) -> int:
        """Return the steps of all loops so far."""
        return sum(COUNT.unpack(each.read_bytes())[0] for each in self._files)

    def rate(self, window_s: float, *, turn: Callable[[float], None] = time.sleep) -> float:
        """Return the steps per second of all loops over a while; ``turn`` passes the time."""
        while not all(COUNT.unpack(each.read_bytes())[0] for each in self._files):
            turn(_LOOK_S)
        before, began_s = self.steps(), time.perf_counter()
        while (seconds := time.perf_counter() - began_s) < window_s:
            turn(_LOOK_S)
        return (self.steps() - before) / seconds


@contextmanager
def _learners(directory: Path) -> Iterator[_Learners]:
    files = [directory / f"learner-{number}" for number in range(cores())]
    with ExitStack() as stack:
        for each in files:
            each.write_bytes(COUNT.pack(0))
            child = Child.start(
                (sys.executable, "-m", _LEARNER, str(each)), env=os.environ, tied=True
            )
            stack.callback(child.wait, 10.0)
            stack.callback(child.kill)
        yield _Learners(files)
    for each in files:
        each.unlink()


def _line_of(pid: int) -> list[int]:
    """Return a process and its only child, the first process of a sandbox, if it has one."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *map(int, children)] if len(children) == 1 else [pid]


def _proportional_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def show(figures: Sequence[Figure], *, console: Console) -> None:
    """Print one line for each figure."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("", "median", "min–max", f"× {ALONE}"):
        table.add_column(title, justify="right" if title else "left", no_wrap=True)
    for each in figures:
        shown = [_shown(value, each.unit) for value in (each.value, each.low, each.high)]
        ratio = "" if each.ratio is None else f"{each.ratio:.2f}"
        table.add_row(each.name, shown[0], f"{shown[1]}–{shown[2]}", ratio)
    console.print(table)


def _shown(value: float, unit: str) -> str:
    if unit == "B":
        return f"{value / (1 << 20):,.2f} MiB"
    return f"{value:,.2f} s" if unit == "s" else f"{value:,.0f} {unit}"
