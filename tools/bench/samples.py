"""Repeated timings of several operations in turn, their progress, and their table."""

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
"""A function that does one operation once and returns seconds by name.

Its preparation and checks are not included in the times.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSetup:
    """The parameters of every section.

    ``lap`` is called after each round, ``say`` with the current activity. ``free_bytes`` is the
    machine's free memory, for sections that adapt to it. ``minutes`` is the duration of sections
    that train for a given time; None leaves it to the section. ``store`` is the root of the
    section of that name, ``server`` the processes of its server that are on this machine. ``lines``
    are the limits of the section of that name, in Mbit/s; 0: none, (): those that it has.
    ``width`` is that of the model of islands and lines.
    """

    size_bytes: int
    repeat: int
    directory: Path
    lap: Callable[[], None]
    quick: bool = False
    free_bytes: int = sys.maxsize
    say: Callable[[str], None] = lambda text: None
    minutes: float | None = None
    store: str | None = None
    server: tuple[int, ...] = ()
    lines: tuple[float, ...] = ()
    width: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Yardstick:
    """Another operation, timed in the same rounds."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRow:
    """One measurement: the median of ``samples_s`` for ``size_bytes`` of state.

    ``beside`` holds the physical reference first, then peers. ``extra`` holds further figures:
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
            raise ValueError(f"{self.section}: {self.name} has no reference beside it")

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
        """The further figures as text."""
        return tuple(f"{name}: {value:,.4g} {unit}".rstrip() for name, value, unit in self.extra)

    def ratio(self, other: Yardstick) -> float:
        """Return the time as a multiple of the other's."""
        return self.seconds / other.seconds

    def figures(self) -> list[dict[str, Any]]:
        """Return the row as JSON-typed values, one for each operation it is compared with."""
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
    """One figure of a section that has its own table.

    ``value`` is a median if ``low`` and ``high`` differ; ``ratio`` is value over that of
    ``versus``. ``p95`` and ``samples`` are set if there are enough samples.
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
        """Return the figure as JSON-typed values."""
        return [asdict(self)]


class Timings:
    """Seconds by name."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = {}

    def add(self, found: Mapping[str, float]) -> None:
        """Add one sample of each name."""
        for name, seconds in found.items():
            self._seconds.setdefault(name, []).append(seconds)

    def __contains__(self, name: str) -> bool:
        return name in self._seconds

    def yardstick(self, name: str) -> Yardstick:
        """Return the median of the samples of ``name``."""
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

    They alternate so that other load on the machine affects all of them alike.
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
    """Yield a list that holds the seconds of the ``with`` block after its end."""
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
    """Return the table; ``columns`` maps figures' names to titles, in their order.

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
    """Spreads a section's rounds on the progress bar over its ``total`` parts."""

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
        """Show the current activity."""
        self._setup.say(text)

    def beat(self) -> None:
        """Record that one more part is done."""
        self._parts += 1
        self._lap(self._rounds * self._parts // self._total)

    def _lap(self, due: int) -> None:
        while self._laps < due:
            self._laps += 1
            self._setup.lap()
