"""A Holdfast job under faults, started as by ``holdfast run`` and watched by its events."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from holdfast.ckpt.errors import PeerError
from holdfast.elastic.events import (
    Detected,
    Event,
    FaultInjected,
    GenerationProposed,
    NodeExited,
    UserEvent,
    WorkerStarted,
    of_kind,
)
from holdfast.elastic.launch.config import LOCAL_TIMING, LaunchConfig, NodeSpec
from holdfast.elastic.launch.local import Launcher
from holdfast.elastic.membership.records import TRAINER
from holdfast.tools.bench.faults.faulted import HANG_SIGNAL, HUNG
from holdfast.tools.bench.faults.recoveries import MeasuredRecovery, after_change
from holdfast.tools.bench.faults.watching import Log, trained
from holdfast.tools.bench.samples import BenchSetup
from holdfast.tools.report.timeline import KILL_TRAINER

WORKERS: Final = 4
_END_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The shape of the job: ``nodes`` share the `WORKERS` evenly.

    ``spares`` are additional workers that take over, so that the job does not shrink. ``hang_s`` is
    the silence after which a worker counts as hung, if hangs are measured. Nodes that are ``apart``
    share no memory. With ``rehearse`` a joining worker rehearses and prefetches, otherwise it
    prepares nothing.
    """

    nodes: int = 1
    spares: int = 0
    parity: int = 0
    hang_s: float = 0.0
    apart: bool = False
    rehearse: bool = True


class ElasticJob:
    """A running job of ``world`` ranks."""

    def __init__(self, launcher: Launcher, log: Log, *, world: int) -> None:
        self._launcher, self.log, self._world = launcher, log, world

    def started(self) -> None:
        """Wait until all ranks train."""
        self.log.until(partial(trained, since_s=0.0, world=self._world), "its first steps")

    def ranks(self) -> Sequence[str]:
        """Return the seats of the newest generation, by rank."""
        return of_kind(self.log.events, GenerationProposed)[-1].ranks

    def kill(self, seat: str, *, what: str = KILL_TRAINER) -> float:
        """Kill a worker without warning; return the time. ``what`` is the name of the fault."""
        started = self._started(seat)
        self._launcher.emit(FaultInjected(what=what, victim=seat, on=started.node, seats=(seat,)))
        killed_s = time.time()
        os.kill(started.pid, signal.SIGKILL)
        return killed_s

    def kill_whole(self) -> float:
        """Kill all processes of the job, and take its memory; return the time of the kill."""
        processes = self._launcher.processes()
        self._launcher.kill()  # or it would start the nodes again
        killed_s = time.time()
        for node in processes.values():
            for pid in (node.agent, node.sidecar, *node.workers.values()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._launcher.wait(_END_S)
        self.log.read()
        return killed_s

    def hang(self, seat: str) -> float:
        """Make a worker hang in the middle of a step; return the time at which it did."""
        os.kill(self._started(seat).pid, HANG_SIGNAL)
        since_s = time.time()

        def look(events: Sequence[Event]) -> float | None:
            hung = (event for event in of_kind(events, UserEvent) if event.name == HUNG)
            return next((event.time_s for event in hung if event.time_s > since_s), None)

        return self.log.until(look, f"{seat} hangs")

    def _started(self, seat: str) -> WorkerStarted:
        starts = of_kind(self.log.events, WorkerStarted)
        return [event for event in starts if event.seat == seat][-1]

    def shrink(self, node: str) -> MeasuredRecovery:
        """Give a node notice that it will be taken away; return the recovery of the others."""
        agent = self._launcher.processes()[node].agent
        since_s = time.time()
        os.kill(agent, signal.SIGTERM)
        found = self.log.until(
            partial(after_change, since_s=since_s, world=self._without(node)),
            f"going on without {node}",
        )
        self.log.until(partial(_gone, node=node, since_s=since_s), f"the end of {node}")
        return found

    def _without(self, node: str) -> int:
        return len([seat for seat in self.ranks() if self._started(seat).node != node])

    def grow(self, node: str) -> MeasuredRecovery:
        """Return a node that was taken away; return the pause of its join."""
        since_s = time.time()
        self._launcher.return_machine(node)
        return self.joined(since_s=since_s, what=node)

    def joined(self, *, since_s: float, what: str) -> MeasuredRecovery:
        """Return the recovery to all ranks, after they have trained for a while."""
        found = self.log.until(
            partial(after_change, since_s=since_s, world=self._world), f"the join of {what}"
        )
        self.settle(found)
        return found

    def settle(self, after: MeasuredRecovery) -> None:
        """Wait until all ranks have trained for a while."""
        self.log.until(
            partial(trained, since_s=after.new_s, world=self._world), "steps after a recovery"
        )

    def is_ready(self, seat: str, *, since_s: float) -> None:
        """Wait until a new worker of ``seat`` is ready to take part."""

        def look(events: Sequence[Event]) -> bool | None:
            joins = (e for e in of_kind(events, Detected) if e.what == "join")
            names = (event.victim for event in joins if event.time_s > since_s)
            return True if seat in names else None

        self.log.until(look, f"another {seat}")

    def end(self) -> None:
        """Stop the job cleanly."""
        self._launcher.stop("measured")
        self._launcher.wait(_END_S)
        self.log.read()


def _gone(events: Sequence[Event], *, node: str, since_s: float) -> bool | None:
    ends = (event.victim for event in of_kind(events, NodeExited) if event.time_s > since_s)
    return True if node in ends else None


@contextmanager
def elastic_job(setup: BenchSetup, name: str, shape: Shape) -> Iterator[ElasticJob]:
    """Run a job, yield it once it trains, and end all its processes."""
    with running(_config(setup, shape, name=name), setup.directory / name) as job:
        job.started()
        yield job


@contextmanager
def running(
    config: LaunchConfig, run_dir: Path, *, world: int | None = None
) -> Iterator[ElasticJob]:
    """Start a job in its ``run_dir``, and end all its processes at the end of the block.

    It has ``world`` ranks; None: `WORKERS`.
    """
    launcher = Launcher(config)
    launcher.start()
    log = Log(
        run_dir, ended=_ended(launcher), outputs=lambda: sorted((run_dir / "logs").glob("*.log"))
    )
    job = ElasticJob(launcher, log, world=world or WORKERS)
    try:
        yield job
    finally:
        job.end()
        launcher.kill()
        if launcher.wait(_END_S) is None:
            raise PeerError(f"the job of {run_dir.name} does not end")


def _ended(launcher: Launcher) -> Callable[[], str]:
    def ended() -> str:
        outcome = launcher.wait(0)
        return f"ended ({outcome.message})" if outcome else ""

    return ended


def _config(setup: BenchSetup, shape: Shape, *, name: str) -> LaunchConfig:
    count = (WORKERS + shape.spares) // shape.nodes
    timing = LOCAL_TIMING
    if shape.hang_s:
        timing = msgspec.structs.replace(timing, min_hang_s=shape.hang_s, max_hang_s=shape.hang_s)
    options = {
        "--size-bytes": setup.size_bytes,
        "--microbatches": WORKERS,
        "--world": WORKERS if shape.spares else 0,
        "--parity": shape.parity,
    }
    return LaunchConfig(
        command=faulted_command(options),
        nodes=tuple(
            NodeSpec(name=f"n{number}", domain=f"n{number}", slots={TRAINER: count})
            for number in range(shape.nodes)
        ),
        wanted={TRAINER: WORKERS + shape.spares},
        run_dir=setup.directory / name,
        capture_output=True,
        timing=timing,
        settings={"rehearse": shape.rehearse},
        apart=shape.apart,
    )


def faulted_command(options: Mapping[str, object]) -> tuple[str, ...]:
    """Return the argv of a worker of a faulted job, with options and their values."""
    words = [str(word) for pair in options.items() for word in pair]
    return (sys.executable, "-m", "holdfast.tools.bench.faults.faulted", *words)
