"""The same job under other tools, with the same faults: torchrun with DCP, and torchft."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from holdfast.ckpt.errors import PeerError
from holdfast.elastic.events import Event, RankReformed, UserEvent, WorkerStarted, of_kind
from holdfast.tools.bench.faults.elastic_job import WORKERS
from holdfast.tools.bench.faults.faulted_torchrun import SAVED
from holdfast.tools.bench.faults.recoveries import MeasuredRecovery, after_fault, after_loss
from holdfast.tools.bench.faults.watching import Log, trained
from holdfast.tools.bench.samples import BenchSetup

SAVED_EVERY: Final = 5
"""Steps between two checkpoints of torchrun's job."""

_ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""A new store for every restart: in a reused one, gloo finds the addresses of dead ranks."""

_HOST: Final = "127.0.0.1"
_RESTARTS: Final = 1000
_END_S: Final = 30.0
_START_S: Final = 60.0
_POLL_S: Final = 0.02


def has_torchft() -> bool:
    """Say whether torchft is installed."""
    return importlib.util.find_spec("torchft") is not None


class PeerJob:
    """A running job of another tool; ``main`` are its processes that must not end."""

    def __init__(self, directory: Path, main: Sequence[subprocess.Popen[bytes]]) -> None:
        self._directory, self._main = directory, main
        self.log = Log(
            directory, ended=self._ended, outputs=lambda: sorted(directory.glob("*.out"))
        )

    def _ended(self) -> str:
        codes = [process.poll() for process in self._main]
        return next((f"ended with {code}" for code in codes if code is not None), "")

    def kill(self, seat: str) -> float:
        """Kill a worker without warning; return the time."""
        starts = of_kind(self.log.events, WorkerStarted)
        started = [event for event in starts if event.seat == seat]
        killed_s = time.time()
        os.kill(started[-1].pid, signal.SIGKILL)
        return killed_s


def restarted(
    setup: BenchSetup, name: str
) -> Generator[tuple[MeasuredRecovery, PeerJob], None, None]:
    """Kill workers of torchrun's job, one after the other; yield the recovery from each."""
    directory = setup.directory / name
    directory.mkdir()
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port = probe.getsockname()[1]
    argv = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1"),
        *(f"--nproc-per-node={WORKERS}", f"--max-restarts={_RESTARTS}", f"--rdzv-id={name}"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint={_HOST}:{port}"),
        *("-m", "holdfast.tools.bench.faults.faulted_torchrun", *_size(setup)),
        *("--microbatches", str(WORKERS), "--every", str(SAVED_EVERY)),
        *("--directory", str(directory)),
    ]
    with _process(argv, directory / "torchrun.out") as process:
        job = PeerJob(directory, [process])
        since_s, number = 0.0, 0
        while True:
            job.log.until(partial(trained, since_s=since_s, world=WORKERS), "steps of all ranks")
            job.log.until(partial(_saved, since_s=since_s), "a checkpoint")
            seat = f"trainer/{number % WORKERS}"
            look = partial(after_fault, killed_s=job.kill(seat))
            found = job.log.until(look, f"another {seat}")
            yield found, job
            since_s, number = found.new_s, number + 1


def _saved(events: Sequence[Event], *, since_s: float) -> bool | None:
    own = (event for event in of_kind(events, UserEvent) if event.name == SAVED)
    return any(event.time_s > since_s for event in own) or None


def replicated(
    setup: BenchSetup, name: str, *, heartbeat_ms: int
) -> Generator[tuple[MeasuredRecovery, PeerJob], None, None]:
    """Kill replicas of torchft's job, one after the other; yield the recovery from each.

    A replacement starts once the others train again, so that its start does not slow them down.
    ``heartbeat_ms`` is the silence after which the lighthouse considers a replica dead, 0 for its
    default.
    """
    directory = setup.directory / name
    directory.mkdir()
    argv = [
        sys.executable,
        "-m",
        "holdfast.tools.bench.faults.faulted_torchft",
        "--directory",
        str(directory),
    ]
    with ExitStack() as stack:
        words = ["--lighthouse", "--heartbeat-ms", str(heartbeat_ms)]
        lighthouse = stack.enter_context(_process([*argv, *words], directory / "lighthouse.out"))
        _await_file(directory / "lighthouse", lighthouse)
        job = PeerJob(directory, [lighthouse])

        def start(number: int) -> None:
            words = [*_size(setup), "--replica", str(number)]
            output = directory / f"replica{number}.out"
            stack.enter_context(_process([*argv, *words], output))

        for number in range(WORKERS):
            start(number)
        number = 0
        while True:
            job.log.until(_whole, "steps of all replicas")
            seat = f"trainer/{number}"
            look = partial(after_loss, killed_s=job.kill(seat), others=WORKERS - 1)
            found = job.log.until(look, f"going on without {seat}")
            yield found, job
            start(number)
            number = (number + 1) % WORKERS


def _whole(events: Sequence[Event]) -> bool | None:
    """Say whether all replicas have done some steps in one quorum, the newest; None if not."""
    formed = of_kind(events, RankReformed)
    newest = {event.seat: event for event in formed}
    quorums = {(event.generation, event.world) for event in newest.values()}
    if len(newest) < WORKERS or len(quorums) > 1 or newest.popitem()[1].world < WORKERS:
        return None
    since_s = max(event.time_s for event in formed)
    return trained(events, since_s=since_s, world=WORKERS)


def _size(setup: BenchSetup) -> list[str]:
    return ["--size-bytes", str(setup.size_bytes)]


def _await_file(path: Path, process: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + _START_S
    while not path.exists():
        if process.poll() is not None or time.monotonic() > deadline_s:
            output = path.with_suffix(".out").read_text(errors="replace")
            raise PeerError(f"the {path.name} does not start: {output}")
        time.sleep(_POLL_S)


@contextmanager
def _process(argv: Sequence[str], output: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process, and end it with all its children."""
    with output.open("ab") as file:
        process = subprocess.Popen(
            argv,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | _ENVIRONMENT,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
