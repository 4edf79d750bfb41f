"""Time and processor time that a token takes: those of its server, and those of all others."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from holdfast.tools.environment import children, cpu_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Seconds for each token, on the clock and of the processor.

    ``others_s`` are those of this process and all that it started, but for servers.
    """

    wall_s: float
    server_s: float
    others_s: float


def spent(work: Callable[[], int], *, servers: Sequence[int]) -> Spent:
    """Return what ``work`` takes for each of the tokens that it returns the number of.

    The first of the processes ``servers`` samples them; all of them may have children.
    """
    readings: tuple[Callable[[], float], ...] = (
        time.perf_counter,
        partial(_cpu_s, servers[0]),
        partial(_cpu_s, os.getpid(), without=servers),
    )
    before = [read() for read in readings]
    count = work()
    took = [(read() - was) / count for read, was in zip(readings, before, strict=True)]
    return Spent(wall_s=took[0], server_s=took[1], others_s=took[2])


def _cpu_s(pid: int, *, without: Collection[int] = ()) -> float:
    """Return what a process and all below it used; one that ends meanwhile no longer counts."""
    found = 0.0
    for each in _family(pid, without):
        with suppress(OSError):
            found += cpu_s(each)
    return found


def _family(pid: int, without: Collection[int]) -> Iterator[int]:
    yield pid
    for child in children(pid):
        if child not in without:
            yield from _family(child, without)
