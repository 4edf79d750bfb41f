"""Section exact: the cost and the accuracy of sums that do not depend on the order.

Ranks are processes on this machine with one thread each. They produce the gradients of a step. The
numbers are given, and only the work between a backward pass and the optimizer is computed: plain
(``exact=None``), rounded (``"float32"``), and in fixed point (``"int64"``). The reference means are
summed in float64. A small model is trained as well, to see how far its weights drift
apart between world sizes; with rounding that all world sizes share they do not.
"""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Final

import numpy as np
from rich.console import Console

from holdfast.ckpt.errors import PeerError
from holdfast.ckpt.torch_private import TCPStore
from holdfast.elastic.config import Exact
from holdfast.tools.bench.exact.extras import PriceTask
from holdfast.tools.bench.exact.summands import (
    RankTask,
    Sum,
    SummingSeat,
    SummingWay,
    Times,
    TimingTask,
    TrainingTask,
    given_gradient,
    serve,
)
from holdfast.tools.bench.samples import BenchSetup, Figure, by_line

WORLDS: Final = (1, 2, 4)
PLAIN: Final = "plain"
METHODS: Final[dict[str, Exact]] = {PLAIN: None, "float32": "float32", "int64": "int64"}
ALONE: Final = "all_reduce"
_MICROBATCHES: Final = 16
_MOST_BYTES: Final = 32 << 20
"""Largest size that is timed: rates do not change beyond the caches."""

_CHECKED: Final = 1 << 20
"""Most elements whose sums are compared with those in float64."""

_STEPS: Final = 500
_QUICK_STEPS: Final = 30
_ANSWER_S: Final = 300.0
_COLUMNS: Final = {
    "step": "step",
    "beside": "× all_reduce",
    "processor time": "cpu × plain",
    "error": "error",
    "worst error": "worst",
    "error, spread": "spread",
    "moved": "moved",
    "drift": "drift",
    "from plain": "apart",
}
_EXTRAS: Final = {"with it": "with it", "without": "without", "times": "× without"}
_WIDTH, _QUICK_WIDTH = 512, 64
"""Rows and columns of the matrices whose updates are timed."""


def exact(setup: BenchSetup, *, worlds: Sequence[int] = WORLDS) -> list[Figure]:
    """Measure every way of summing at every world size, on at most 32 MiB of the state."""
    elements = max(min(setup.size_bytes, _MOST_BYTES) // 4, 1024)
    steps = _QUICK_STEPS if setup.quick else _STEPS
    bench = _Bench(elements, steps=steps, repeat=setup.repeat)
    for world_size in worlds:
        with _crew(world_size) as pipes:
            bench.measure(world_size, pipes)
            if world_size <= 2:
                width = _QUICK_WIDTH if setup.quick else _WIDTH
                bench.price(pipes, width=width, is_sharded=world_size == 2)
    for _ in range(setup.repeat + 1):
        setup.lap()
    return bench.figures


class _Bench:
    """Collects the figures; the first world measured is the reference for the others."""

    def __init__(self, elements: int, *, steps: int, repeat: int) -> None:
        self._elements, self._steps, self._repeat = elements, steps, repeat
        self._checked = min(elements, _CHECKED)
        self.figures: list[Figure] = []
        self._means: dict[str, Any] = {}
        self._weights: dict[str, Any] = {}
        self._truth = {spread: _truth(self._checked, spread=spread) for spread in (False, True)}

    def measure(self, world_size: int, pipes: Sequence[Connection]) -> None:
        """Measure one world."""
        found: dict[str, list[Times]] = {}
        for method, exact_ in METHODS.items():
            how = SummingWay(exact=exact_, elements=self._elements, microbatches=_MICROBATCHES)
            found[method] = _ask(pipes, TimingTask(how=how, repeat=self._repeat))
        alone = _slowest([times.alone_s for each in found.values() for times in each])
        self._add_times(f"{world_size} ranks, {ALONE}", alone, beside=alone)
        base_s = _busy(found[PLAIN])
        for method, exact_ in METHODS.items():
            name = f"{world_size} ranks, {method}"
            self._add_times(name, _slowest([t.steps_s for t in found[method]]), beside=alone)
            self._add(name, "processor time", _busy(found[method]) / base_s, "×")
            self._add_errors(name, method, pipes, exact_)
            training = TrainingTask(exact=exact_, steps=self._steps, microbatches=_MICROBATCHES)
            self._add_drift(name, method, _ask(pipes, training)[0])

    def price(self, pipes: Sequence[Connection], *, width: int, is_sharded: bool) -> None:
        """Measure what else costs, beside the same without it."""
        task = PriceTask(repeat=self._repeat, width=width, is_sharded=is_sharded)
        for name, found in _ask(pipes, task)[0].items():
            with_s, without_s = map(statistics.median, (found.with_s, found.without_s))
            ratio = with_s / without_s
            self.figures.append(
                Figure(
                    section="exact",
                    name=f"{name}: with it",
                    value=with_s,
                    unit="s",
                    low=min(found.with_s),
                    high=max(found.with_s),
                    versus="without",
                    ratio=ratio,
                )
            )
            self._add(name, "without", without_s, "s")
            self._add(name, "times", ratio, "×")

    def _add_times(self, name: str, samples_s: list[float], *, beside: list[float]) -> None:
        seconds, other_s = statistics.median(samples_s), statistics.median(beside)
        self.figures.append(
            Figure(
                section="exact",
                name=f"{name}: step",
                value=seconds,
                unit="s",
                low=min(samples_s),
                high=max(samples_s),
                versus=ALONE,
                ratio=seconds / other_s,
            )
        )
        self._add(name, "beside", seconds / other_s, "×")
        self._add(name, "per byte", seconds / (4 * self._elements) * 1e9, "ns/byte")

    def _add_errors(
        self, name: str, method: str, pipes: Sequence[Connection], exact_: Exact
    ) -> None:
        for spread, truth in self._truth.items():
            how = SummingWay(
                exact=exact_, elements=self._checked, microbatches=_MICROBATCHES, spread=spread
            )
            mean = _ask(pipes, Sum(how=how))[0]
            off = mean.astype(np.float64) - truth
            self._add(name, "error" + ", spread" * spread, _norm(off) / _norm(truth), "")
            if not spread:
                self._add(name, "worst error", _worst(off, truth), "ulp of the largest")
                first = self._means.setdefault(method, mean)
                moved = np.mean(first.view(np.int32) != mean.view(np.int32))
                self._add(name, "moved", float(moved) * 100, "%")

    def _add_drift(self, name: str, method: str, weights: Any) -> None:
        first = self._weights.setdefault(method, weights)
        self._add(name, "drift", _norm(weights - first) / _norm(first), "")
        base = self._weights[PLAIN]
        self._add(name, "from plain", _norm(weights - base) / _norm(base), "")

    def _add(self, name: str, what: str, value: float, unit: str) -> None:
        self.figures.append(
            Figure(
                section="exact",
                name=f"{name}: {what}",
                value=value,
                unit=unit,
                low=value,
                high=value,
            )
        )


def _truth(elements: int, *, spread: bool) -> Any:
    """Return the mean gradient in float64."""
    total = np.zeros(elements, dtype=np.float64)
    for microbatch in range(_MICROBATCHES):
        total += given_gradient(microbatch, elements, spread=spread).numpy()
    return total / _MICROBATCHES


def _slowest(by_rank: Sequence[list[float]]) -> list[float]:
    """Return the time of the slowest rank, round by round."""
    return [max(times) for times in zip(*by_rank, strict=True)]


def _busy(ranks: Sequence[Times]) -> float:
    """Return the processor time of all ranks together, as the median of the rounds."""
    return statistics.median(map(sum, zip(*(each.processor_s for each in ranks), strict=True)))


def _norm(values: Any) -> float:
    return float(np.linalg.norm(values.astype(np.float64)))


def _worst(off: Any, truth: Any) -> float:
    """Return the largest error, in units of float32's last place of the largest number."""
    largest = np.float32(np.abs(truth).max())
    return float(np.abs(off).max() / np.spacing(largest))


def _ask(pipes: Sequence[Connection], task: RankTask) -> list[Any]:
    """Run the task on all ranks. Raises ``PeerError`` if a rank does not answer."""
    for pipe in pipes:
        pipe.send(task)
    found = []
    for pipe in pipes:
        if not pipe.poll(_ANSWER_S):
            raise PeerError(f"a rank did not answer within {_ANSWER_S:g} s; report this")
        try:
            found.append(pipe.recv())
        except EOFError as error:
            raise PeerError("a rank ended early; run with a smaller --megabytes") from error
    return found


@contextmanager
def _crew(world_size: int) -> Iterator[list[Connection]]:
    """Start the ranks of a world; yield their pipes."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        pipes = []
        for rank in range(world_size):
            pipe, theirs = context.Pipe()
            seat = SummingSeat(rank=rank, world_size=world_size, meeting_port=store.port)
            process = context.Process(target=serve, args=(seat, theirs))
            process.start()
            theirs.close()
            stack.callback(_end, process, pipe)
            pipes.append(pipe)
        yield pipes


def _end(process: BaseProcess, pipe: Connection) -> None:
    """Kill a rank; it has nothing to clean up."""
    process.kill()
    process.join()
    pipe.close()


def show(figures: Sequence[Figure], *, console: Console) -> None:
    """Print one line per way of summing and world size."""
    extras = [figure for figure in figures if figure.name.partition(": ")[2] in _EXTRAS]
    sums = [figure for figure in figures if figure not in extras]
    console.print(by_line(sums, columns=_COLUMNS, cell=_cell))
    console.print(
        "step: the gradients of 16 microbatches; cpu: processor time of all ranks.\nTheir mean "
        "beside float64's: error in the 2-norm, relative; worst of one element, in ulp of the "
        "largest;\nspread: error where gradients span decades; moved: elements whose bits differ "
        "from 1 rank's.\nTrained weights, 2-norm, relative: drift from 1 rank's; apart from "
        "those of plain sums at 1 rank.\n"
    )
    console.print(by_line(extras, columns=_EXTRAS, cell=_extra))


def _extra(figure: Figure) -> str:
    return f"{figure.value:.2f}" if figure.unit == "×" else f"{figure.value * 1e6:,.0f} µs"


def _cell(figure: Figure) -> str:
    match figure.unit:
        case "s":
            return f"{figure.value * 1e3:.1f} ms ({figure.low * 1e3:.0f}–{figure.high * 1e3:.0f})"
        case "%":
            return f"{figure.value:.1f} %"
        case "×" | "ns/byte" | "ulp of the largest":
            return f"{figure.value:.2f}"
        case _:
            return f"{figure.value:.1e}" if figure.value else "0"
