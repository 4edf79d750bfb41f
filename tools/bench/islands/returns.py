"""Section returns: a killed island comes back beside a plain run that is killed in the same way.

Two islands of one sea train, or two plain runs of the same model; one of the two suffers the
faults. Steps have a least time, so that the other one does not slow the recoveries down.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Final, TypeAlias

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

_Look: TypeAlias = Callable[[Sequence[Event]], MeasuredRecovery | None]

_OWN: Final = "own"
_PACE_S: Final = 0.25
_EVERY: Final = 8
"""Steps in which an island merges all of its parameters."""

_CHECKPOINT_EVERY: Final = 5


def returns(setup: BenchSetup) -> list[Figure]:
    """Kill workers, then all of a job, of a plain run and of an island."""
    found: list[Figure] = []
    versus: dict[str, Figure] = {}
    with Tempo(setup, total=4 * setup.repeat) as tempo:
        for job in (RUN, ISLAND):
            pair = _Pair(setup, job)
            for fault, recoveries in pair.hurt(tempo).items():
                figures = pauses.figures(
                    "returns",
                    f"{job}, {fault}",
                    recoveries,
                    step_s=pair.step_s,
                    versus=versus.get(fault),
                )
                versus.setdefault(fault, figures[0])
                found += figures
    return found


class _Pair:
    """Two jobs of one kind, of which one is hurt; ``step_s`` are the seconds of its steps."""

    def __init__(self, setup: BenchSetup, job: str) -> None:
        self._setup, self._job = setup, job
        self._place = setup.directory / job.replace(" ", "-")
        self.step_s = 0.0

    def hurt(self, tempo: Tempo) -> dict[str, list[MeasuredRecovery]]:
        """Return the recoveries from each kind of fault."""
        self._place.mkdir()
        lost: list[MeasuredRecovery] = []
        with self._running("other") as other:
            with self._running(_OWN) as own:
                own.started()
                other.started()
                killed = self._killed(own, tempo)
                self.step_s = pauses.step_s(own.log.events)
                loss = self._kill_whole(own)
            while len(lost) < self._setup.repeat:
                tempo.say(f"{self._job}, {LOST}, {len(lost) + 1} of {self._setup.repeat}")
                with self._running(_OWN, run=len(lost) + 1) as own:
                    lost.append(own.log.until(loss, "its next new step"))
                    own.settle(lost[-1])
                    loss = self._kill_whole(own)
                tempo.beat()
        return {KILLED: killed, LOST: lost}

    def _killed(self, own: ElasticJob, tempo: Tempo) -> list[MeasuredRecovery]:
        """Kill one worker after the other, each time after the replacement has joined."""
        found = []
        for number in range(self._setup.repeat):
            tempo.say(f"{self._job}, {KILLED}, {number + 1} of {self._setup.repeat}")
            seat = own.ranks()[number % WORKERS]
            killed_s = own.kill(seat)
            look = partial(after_fault, killed_s=killed_s)
            found.append(own.log.until(look, f"going on without {seat}"))
            own.joined(since_s=killed_s, what=f"another {seat}")
            tempo.beat()
        return found

    def _kill_whole(self, own: ElasticJob) -> _Look:
        """Kill all of a job right after a checkpoint; return the look for its recovery."""
        own.log.until(partial(_stored, since_s=time.time()), "a checkpoint")
        killed_s = own.kill_whole()
        return partial(after_restart, before=own.log.events, killed_s=killed_s)

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
