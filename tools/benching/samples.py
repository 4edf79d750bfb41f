"""Repeated timings of several things in turn, and the rows of the table they become."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

Case: TypeAlias = Callable[[], Mapping[str, float]]
"""Does one thing once; returns seconds by name. What it prepares and checks is not in them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What every section is given. ``lap`` is called after each round."""

    size_bytes: int
    repeat: int
    directory: Path
    lap: Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Yardstick:
    """Something else that was timed in the same rounds."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured thing: the median of ``samples_s`` for ``size_bytes`` of state."""

    section: str
    name: str
    size_bytes: int
    samples_s: tuple[float, ...]
    reference: Yardstick
    peer: Yardstick | None = None

    def __post_init__(self) -> None:
        if not self.samples_s:
            raise ValueError(f"{self.section}: {self.name} was never timed")

    @property
    def seconds(self) -> float:
        """The median."""
        return statistics.median(self.samples_s)

    @property
    def gigabytes_per_s(self) -> float:
        """State per second, in units of 10^9 bytes."""
        return self.size_bytes / self.seconds / 1e9

    @property
    def of_reference(self) -> float:
        """The time as a multiple of the reference's."""
        return self.seconds / self.reference.seconds

    @property
    def of_peer(self) -> float | None:
        """The time as a multiple of the peer's."""
        return None if self.peer is None else self.seconds / self.peer.seconds

    def described(self) -> dict[str, Any]:
        """Return the row as JSON-typed values."""
        peer = self.peer
        return {
            "section": self.section,
            "name": self.name,
            "bytes": self.size_bytes,
            "seconds": self.seconds,
            "samples_s": list(self.samples_s),
            "gigabytes_per_s": self.gigabytes_per_s,
            "reference": {"name": self.reference.name, "seconds": self.reference.seconds},
            "of_reference": self.of_reference,
            "peer": None if peer is None else {"name": peer.name, "seconds": peer.seconds},
            "of_peer": self.of_peer,
        }


class Samples:
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
        self, section: str, name: str, size_bytes: int, *, reference: str, peer: str | None = None
    ) -> Row:
        """Return ``name`` beside its reference and peer; a peer that was not timed is left out."""
        return Row(
            section=section,
            name=name,
            size_bytes=size_bytes,
            samples_s=tuple(self._seconds[name]),
            reference=self.yardstick(reference),
            peer=self.yardstick(peer) if peer in self._seconds else None,
        )


def in_turn(cases: Sequence[Case], setup: Setup) -> Samples:
    """Run all cases once to warm up, then ``repeat`` times, one after the other.

    In turn, so that what else the machine does falls on the thing and its yardsticks alike.
    """
    samples = Samples()
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
