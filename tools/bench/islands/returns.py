"""Section returns: a killed island comes back beside a plain run that is killed in the same way.

Two islands of one sea train, or two plain runs of the same model; one of the two suffers the
faults. Steps have a least time, so that the other one does not slow the recoveries down.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Final, NamedTuple

from rich.console import Console

from holdfast.elastic.events import CheckpointDone, Event, of_kind
from holdfast.elastic.launch.config import LaunchConfig, NodeSpec
from holdfast.elastic.membership.records import TRAINER
from holdfast.tools.bench.faults import pauses
from holdfast.tools.bench.faults.elastic_job import ElasticJob, faulted_command, running
from holdfast.tools.bench.faults.recoveries import MeasuredRecovery, after_fault, after_restart
from holdfast.tools.bench.samples import BenchSetup, Figure, Tempo

WORKERS: Final = 2
"""Ranks of each of the two jobs."""

RUN, ISLAND = "a plain run", "an island"
KILLED: Final = "a worker killed"
LOST: Final = "killed whole, started again"

_OWN: Final = "own"
_PACE_S: Final = 0.25
_EVERY: Final = 4
"""Steps in which an island merges all of its parameters."""

_CHECKPOINT_EVERY: Final = 5


def returns(setup: BenchSetup) -> list[Figure]:
    """Kill a worker, then all of a job, of a plain run and of an island in turn."""
    rounds: dict[str, list[_Round]] = {RUN: [], ISLAND: []}
    with Tempo(setup, total=2 * setup.repeat) as tempo:
        for number in range(setup.repeat):
            for job, found in rounds.items():
                tempo.say(f"{job}, {number + 1} of {setup.repeat}")
                found.append(_Pair(setup, job, number=number).hurt())
                tempo.beat()
    return figures_of(rounds)


class _Round(NamedTuple):
    """The recoveries of a job from the loss of a worker, and of all; the seconds of a step."""

    killed: MeasuredRecovery
    lost: MeasuredRecovery
    step_s: float


def figures_of(rounds: Mapping[str, Sequence[_Round]]) -> list[Figure]:
    """Return the figures of all rounds; islands stand beside the plain runs."""
    found: list[Figure] = []
    versus: dict[str, Figure] = {}
    for job, each in rounds.items():
        step_s = statistics.median(one.step_s for one in each)
        faults = {KILLED: [one.killed for one in each], LOST: [one.lost for one in each]}
        for fault, recoveries in faults.items():
            found += (
                figures := pauses.figures(
                    "returns",
                    f"{job}, {fault}",
                    recoveries,
                    step_s=step_s,
                    versus=versus.get(fault),
                )
            )
            versus.setdefault(fault, figures[0])
    return found


class _Pair:
    """Two jobs of one kind, of which one is hurt."""

    def __init__(self, setup: BenchSetup, job: str, *, number: int) -> None:
        self._setup, self._job, self._number = setup, job, number
        self._place = setup.directory / f"{job.replace(' ', '-')}-{number}"

    def hurt(self) -> _Round:
        """Return the recovery from each fault."""
        self._place.mkdir()
        with self._running("other") as other:
            with self._running(_OWN) as own:
                own.started()
                other.started()
                killed = self._killed(own)
                step_s = pauses.step_s(own.log.events)
                own.log.until(partial(_stored, since_s=time.time()), "a checkpoint")
                killed_s = own.kill_whole()
            look = partial(after_restart, before=own.log.events, killed_s=killed_s)
            with self._running(_OWN, run=1) as again:
                lost = again.log.until(look, "its next new step")
        return _Round(killed=killed, lost=lost, step_s=step_s)

    def _killed(self, own: ElasticJob) -> MeasuredRecovery:
        """Kill a worker, another rank in each round; return once the replacement has joined."""
        seat = own.ranks()[self._number % WORKERS]
        killed_s = own.kill(seat)
        look = partial(after_fault, killed_s=killed_s)
        found = own.log.until(look, f"going on without {seat}")
        own.joined(since_s=killed_s, what=f"another {seat}")
        return found

    def _running(self, name: str, *, run: int = 0) -> AbstractContextManager[ElasticJob]:
        run_dir = self._place / f"{name}-{run}"
        options: dict[str, object] = {
            "--size-bytes": self._setup.size_bytes,
            "--microbatches": WORKERS,
            "--pace-s": _PACE_S,
            "--checkpoint": self._place / name,
            "--checkpoint-every": _CHECKPOINT_EVERY,
            "--every": _EVERY if self._job == ISLAND else 0,
        }
        at = {"name": name, "meet": str(self._place / "sea")}
        config = LaunchConfig(
            command=faulted_command(options),
            nodes=(NodeSpec(name="n0", slots={TRAINER: WORKERS}),),
            wanted={TRAINER: WORKERS},
            run_dir=run_dir,
            capture_output=True,
            settings={"islands": at} if self._job == ISLAND else {},
        )
        return running(config, run_dir, world=WORKERS)


def _stored(events: Sequence[Event], *, since_s: float) -> bool | None:
    return any(each.time_s > since_s for each in of_kind(events, CheckpointDone)) or None


def show(figures: Sequence[Figure], *, console: Console) -> None:
    """Print one line for each job and fault."""
    pauses.show(figures, console=console, versus="the plain run's time")
    console.print(
        f"{WORKERS} workers a job, a second such job beside it; a step takes {_PACE_S:g} s at "
        f"least, a checkpoint is due every {_CHECKPOINT_EVERY} steps\n",
        highlight=False,
    )
