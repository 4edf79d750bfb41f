"""Repeated timings of several things in turn, their progress, and the table they become."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

from rich.table import Table

Case: TypeAlias = Callable[[], Mapping[str, float]]
"""Does one thing once; returns seconds by name. What it prepares and checks is not in them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSetup:
    """What every section is given.

    ``lap`` is called after each round, ``say`` with what is being done. ``free_bytes`` is the
    memory the machine has left, where that decides how it is done; ``minutes`` how long a section
    trains that does so for a given time, None for as long as it likes.
    """

    size_bytes: int
    repeat: int
    directory: Path
    lap: Callable[[], None]
    quick: bool = False
    free_bytes: int = sys.maxsize
    say: Callable[[str], None] = lambda text: None
    minutes: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Yardstick:
    """Something else that was timed in the same rounds."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRow:
    """One measured thing: the median of ``samples_s`` for ``size_bytes`` of state.

    ``beside`` are the physical reference, first, and peers. ``extra`` are other figures of it:
    name, value, unit.
    """

    section: str
    name: str
    size_bytes: int
    samples_s: tuple[float, ...]
    beside: tuple[Yardstick, ...]
    extra: tuple[tuple[str, float, str], ...] = ()

    def __post_init__(self) -> None:
        if not self.samples_s:
            raise ValueError(f"{self.section}: {self.name} was never timed")
        if not self.beside:
            raise ValueError(f"{self.section}: {self.name} stands beside nothing")

    @property
    def seconds(self) -> float:
        """The median."""
        return statistics.median(self.samples_s)

    @property
    def gigabytes_per_s(self) -> float:
        """State per second, in units of 10^9 bytes."""
        return self.size_bytes / self.seconds / 1e9

    @property
    def notes(self) -> tuple[str, ...]:
        """The other figures in words."""
        return tuple(f"{name}: {value:,.4g} {unit}".rstrip() for name, value, unit in self.extra)

    def ratio(self, other: Yardstick) -> float:
        """Return the time as a multiple of the other's."""
        return self.seconds / other.seconds

    def figures(self) -> list[dict[str, Any]]:
        """Return the row as JSON-typed values, one for each thing it stands beside."""
        found: list[dict[str, Any]] = [
            {
                "section": self.section,
                "name": self.name,
                "value": self.seconds,
                "unit": "s",
                "versus": other.name,
                "versus_value": other.seconds,
                "ratio": self.ratio(other),
                "bytes": self.size_bytes,
                "samples": list(self.samples_s),
            }
            for other in self.beside
        ]
        for name, value, unit in self.extra:
            found.append(
                {
                    "section": self.section,
                    "name": f"{self.name}: {name}",
                    "value": value,
                    "unit": unit,
                    "versus": None,
                    "ratio": None,
                }
            )
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of a section that has a table of its own.

    A median where ``low`` and ``high`` differ; ``ratio`` is value over that of ``versus``. ``p95``
    and all ``samples`` where there are enough of them to say.
    """

    section: str
    name: str
    value: float
    unit: str
    low: float
    high: float
    versus: str | None = None
    ratio: float | None = None
    p95: float | None = None
    samples: tuple[float, ...] = ()

    def figures(self) -> list[dict[str, Any]]:
        """Return it as JSON-typed values."""
        return [asdict(self)]


class Timings:
    """Seconds by name."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = {}

    def add(self, found: Mapping[str, float]) -> None:
        """Keep one sample of each name."""
        for name, seconds in found.items():
            self._seconds.setdefault(name, []).append(seconds)

    def yardstick(self, name: str) -> Yardstick:
        """Return the median of what was timed as ``name``."""
        return Yardstick(name=name, seconds=statistics.median(self._seconds[name]))

    def row(
        self,
        section: str,
        name: str,
        size_bytes: int,
        *beside: str,
        extra: Sequence[tuple[str, float, str]] = (),
    ) -> BenchRow:
        """Return ``name`` beside a reference and peers; a peer that was not timed is left out."""
        reference, *peers = beside
        return BenchRow(
            section=section,
            name=name,
            size_bytes=size_bytes,
            samples_s=tuple(self._seconds[name]),
            beside=tuple(
                self.yardstick(other)
                for other in (reference, *(peer for peer in peers if peer in self._seconds))
            ),
            extra=tuple(extra),
        )


def in_turn(cases: Sequence[Case], setup: BenchSetup) -> Timings:
    """Run all cases once to warm up, then ``repeat`` times, one after the other.

    In turn, so that what else the machine does falls on the thing and its yardsticks alike.
    """
    samples = Timings()
    for number in range(setup.repeat + 1):
        for case in cases:
            found = case()
            if number:
                samples.add(found)
        setup.lap()
    return samples


def timed(name: str, work: Callable[[], object]) -> Case:
    """Return a case that times the whole of ``work``."""

    def case() -> Mapping[str, float]:
        with stopwatch() as seconds:
            work()
        return {name: seconds[0]}

    return case


@contextmanager
def stopwatch() -> Iterator[list[float]]:
    """Yield a list that holds the seconds of the ``with`` block once it is left."""
    seconds: list[float] = []
    started = time.perf_counter()
    yield seconds
    seconds.append(time.perf_counter() - started)


def by_line(
    figures: Sequence[Figure],
    *,
    columns: Mapping[str, str],
    cell: Callable[[Figure], str],
) -> Table:
    """Return the table; ``columns`` maps what figures are called to titles, in their order.

    A figure that a line does not have is an empty cell.
    """
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("", no_wrap=True)
    for title in columns.values():
        table.add_column(title, justify="right", no_wrap=True)
    lines: dict[str, dict[str, Figure]] = {}
    for figure in figures:
        line, _, what = figure.name.partition(": ")
        lines.setdefault(line, {})[what] = figure
    for line, found in lines.items():
        table.add_row(line, *(cell(found[what]) if what in found else "" for what in columns))
    return table


class Tempo:
    """Shares the rounds that a section has on the bar out over its ``total`` parts."""

    def __init__(self, setup: BenchSetup, *, total: int) -> None:
        self._setup, self._total = setup, total
        self._rounds, self._parts, self._laps = setup.repeat + 1, 0, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lap(self._rounds)

    def say(self, text: str) -> None:
        """Tell what is being done."""
        self._setup.say(text)

    def beat(self) -> None:
        """Say that one more part is done."""
        self._parts += 1
        self._lap(self._rounds * self._parts // self._total)

    def _lap(self, due: int) -> None:
        while self._laps < due:
            self._laps += 1
            self._setup.lap()
