"""Section mttr: the pause of training when a worker dies, hangs, leaves or joins.

A job of four workers suffers one kind of fault after the other, and so does the same job under
other tools. Before each fault all ranks have trained for a while.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import partial
from itertools import islice
from typing import Final

import numpy as np
from rich.console import Console

from holdfast.ckpt.errors import PeerError
from holdfast.tools.bench.faults import pauses, peers, resize
from holdfast.tools.bench.faults.elastic_job import WORKERS, ElasticJob, Shape, elastic_job
from holdfast.tools.bench.faults.recoveries import MeasuredRecovery, after_fault
from holdfast.tools.bench.samples import BenchSetup, Figure, Tempo, stopwatch

FAULTS_A_ROUND: Final = 4
HANG_S: Final = 3.0

KILL: Final = "a worker killed, going on smaller"
JOIN: Final = "its replacement joins"
SPARE: Final = "a worker killed, a warm spare takes over"
HANG: Final = "a worker hangs"
NOTICE: Final = "a node leaves on notice"
NODE: Final = "a node joins"
TORCHRUN: Final = "torchrun restart, DCP load"
TORCHFT: Final = {
    0: "torchft, lighthouse at its defaults",
    1000: "torchft, heartbeat 1 s",
    300: "torchft, heartbeat 300 ms",
}
ENDED: Final = "faults before one that ended the job"

_PEER_FAULTS_A_ROUND: Final = 2
_OWN_WAYS: Final = 4
_Figures = list[Figure]
_Way = Callable[[], Generator[tuple[MeasuredRecovery, peers.PeerJob], None, None]]
_log = logging.getLogger(__name__)


def mttr(setup: BenchSetup) -> list[Figure]:
    """Inject faults of every kind; time each until training goes on."""
    faults = setup.repeat * (1 if setup.quick else FAULTS_A_ROUND)
    memcpy = pauses.sampled("mttr", f"memcpy of the state: {pauses.PAUSE}", _memcpy_s(setup))
    ways = _others(setup)
    peer_faults = setup.repeat * (1 if setup.quick else _PEER_FAULTS_A_ROUND)
    with Tempo(setup, total=_OWN_WAYS * faults + len(ways) * peer_faults) as tempo:
        own = _killed(setup, faults, tempo)
        first = own[0]
        own += _spared(setup, faults, tempo)
        own += _hung(setup, faults, tempo)
        own += _noticed(setup, faults, tempo)
        for name, way in ways.items():
            own += _under(name, way, faults=peer_faults, tempo=tempo, versus=first)
    return [memcpy, *own]


def _memcpy_s(setup: BenchSetup) -> list[float]:
    source = np.ones(setup.size_bytes, dtype=np.uint8)
    target = np.zeros_like(source)
    times = []
    for _ in range(setup.repeat):
        with stopwatch() as seconds:
            np.copyto(target, source)
        times.append(seconds[0])
    return times


def _killed(setup: BenchSetup, faults: int, tempo: Tempo) -> _Figures:
    """Go on with three workers, then with the replacement as well."""
    lost, joined = [], []
    with elastic_job(setup, "killed", Shape()) as job:
        for number in range(faults):
            tempo.say(f"{KILL}, {number + 1} of {faults}")
            seat = _victim(job, number)
            killed_s = job.kill(seat)
            lost.append(_over(job, killed_s, seat=seat))
            joined.append(job.joined(since_s=killed_s, what=f"another {seat}"))
            tempo.beat()
        step_s = pauses.step_s(job.log.events)
    return [
        *pauses.figures("mttr", KILL, lost, step_s=step_s),
        *pauses.figures("mttr", JOIN, joined, step_s=step_s),
    ]


def _spared(setup: BenchSetup, faults: int, tempo: Tempo) -> _Figures:
    """Go on with four workers, as a fifth was waiting; the replacement becomes the next spare."""
    found = []
    with elastic_job(setup, "spared", Shape(spares=1)) as job:
        for number in range(faults):
            tempo.say(f"{SPARE}, {number + 1} of {faults}")
            seat = _victim(job, number)
            killed_s = job.kill(seat)
            found.append(_over(job, killed_s, seat=seat))
            job.is_ready(seat, since_s=killed_s)
            job.settle(found[-1])
            tempo.beat()
        step_s = pauses.step_s(job.log.events)
    return pauses.figures("mttr", SPARE, found, step_s=step_s)


def _hung(setup: BenchSetup, faults: int, tempo: Tempo) -> _Figures:
    """Make a worker hang; nobody notices before the threshold."""
    found: list[MeasuredRecovery] = []
    with elastic_job(setup, "hung", Shape(hang_s=HANG_S)) as job:
        for number in range(faults):
            tempo.say(f"{HANG}, {number + 1} of {faults}")
            seat = _victim(job, number)
            hung_s = job.hang(seat)
            found.append(_over(job, hung_s, seat=seat))
            job.joined(since_s=hung_s, what=f"another {seat}")
            tempo.beat()
        step_s = pauses.step_s(job.log.events)
    beyond = [each.pause_s - HANG_S for each in found]
    name = f"{HANG}, threshold {HANG_S:g} s"
    return [
        *pauses.figures("mttr", name, found, step_s=step_s),
        pauses.sampled("mttr", f"{name}: {pauses.BEYOND}", beyond),
    ]


def _noticed(setup: BenchSetup, faults: int, tempo: Tempo) -> _Figures:
    left, joined, step_s = resize.there_and_back(setup, faults, tempo=tempo)
    return [
        *pauses.figures("mttr", NOTICE, left, step_s=step_s),
        *pauses.figures("mttr", NODE, joined, step_s=step_s),
    ]


def _victim(job: ElasticJob, number: int) -> str:
    """Return the next victim, in turn over all ranks."""
    return job.ranks()[number % WORKERS]


def _over(job: ElasticJob, fault_s: float, *, seat: str) -> MeasuredRecovery:
    return job.log.until(partial(after_fault, killed_s=fault_s), f"going on without {seat}")


def _others(setup: BenchSetup) -> dict[str, _Way]:
    """Return the installed tools' ways; with ``quick`` only one way of torchft."""
    ways: dict[str, _Way] = {TORCHRUN: partial(peers.restarted, setup, "torchrun")}
    if peers.has_torchft():
        for heartbeat_ms, name in list(TORCHFT.items())[-1 if setup.quick else 0 :]:
            directory = f"torchft-{heartbeat_ms}"
            ways[name] = partial(peers.replicated, setup, directory, heartbeat_ms=heartbeat_ms)
    return ways


def _under(name: str, way: _Way, *, faults: int, tempo: Tempo, versus: Figure) -> _Figures:
    """Inject the same faults under another tool; report it if the job does not survive one."""
    found: list[MeasuredRecovery] = []
    result: _Figures = []
    tempo.say(name)
    try:
        with closing(way()) as faulted:
            for recovery, job in islice(faulted, faults):
                found.append(recovery)
                tempo.beat()
                tempo.say(f"{name}, {len(found)} of {faults}")
                step_s = pauses.step_s(job.log.events)
    except PeerError as error:
        _log.warning("%s: %s", name, error)
        result = [pauses.sampled("mttr", f"{name}: {ENDED}", [float(len(found))], unit="")]
    if found:
        result += pauses.figures("mttr", name, found, step_s=step_s, versus=versus)
    return result


def show(figures: Sequence[Figure], *, console: Console) -> None:
    """Print one line per fault and tool."""
    memcpy, *rest = figures
    pauses.show(rest, console=console)
    console.print(f"memcpy of the state: {statistics.median(memcpy.samples) * 1e3:.1f} ms")
    for figure in rest:
        if figure.name.endswith(ENDED):
            console.print(f"{figure.name}: {figure.value:.0f}", style="red")
    if not peers.has_torchft():
        console.print("torchft: not installed")
