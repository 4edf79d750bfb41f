"""The jobs of the benchmark of islands: processes of one thread each, and their outcomes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

import msgspec

from holdfast.ckpt.errors import InternalError, PeerError
from holdfast.elastic.events import TideAdopted, TidePublished, of_kind
from holdfast.elastic.events.log import EventReader
from holdfast.tools.bench.islands.outcome import LineBytes, Outcome

SAMPLES: Final = 8
"""Samples of a process's step, of both ways."""

_PACKAGE: Final = "holdfast.tools.bench.islands"
_POLL_S: Final = 0.05
_END_S: Final = 20.0
_START_S: Final = 120.0
_TOLD_LINES: Final = 12
_TOLD_CHARACTERS: Final = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place of a job's process: its address, and the words before a command that runs there.

    ``device`` is the network device of its line, "" for none; ``env`` has further variables of its
    environment.
    """

    address: str = "127.0.0.1"
    within: Sequence[str] = ()
    device: str = ""
    env: Mapping[str, str] = field(default_factory=dict)


def ddp(
    directory: Path,
    places: Sequence[Place],
    *,
    steps: int,
    port: int,
    more: Sequence[str] = (),
) -> list[Outcome]:
    """Train under DDP, a rank at each place; return the outcomes.

    ``more`` are further words of the trainings' command line, as for the other ways.
    """
    world = len(places)

    def argv(rank: int, result: Path) -> list[str]:
        return [
            *(sys.executable, "-m", f"{_PACKAGE}.ddp_training"),
            *("--steps", str(steps), "--samples", str(SAMPLES)),
            *("--rank", str(rank), "--world", str(world)),
            *("--address", f"{places[0].address}:{port}"),
            *("--device", places[rank].device, "--result", str(result), *more),
        ]

    return _run(directory, places, argv)


def islands(
    directory: Path,
    places: Sequence[Place],
    *,
    steps: int,
    sea: str,
    more: Sequence[str] = (),
) -> list[Outcome]:
    """Train as islands, one at each place, which meet at ``sea``; return the outcomes."""
    founders = len(places)

    def argv(number: int, result: Path) -> list[str]:
        return [
            *(sys.executable, "-m", "holdfast.tools.cli", "run", "--nproc", "1"),
            *("--island", f"island-{number}", "--sea", sea),
            *("--run-dir", str(result.with_suffix(".run"))),
            *("-m", f"{_PACKAGE}.island_training"),
            *("--steps", str(steps), "--samples", str(SAMPLES)),
            *("--founders", str(founders)),
            *("--device", places[number].device, "--result", str(result), *more),
        ]

    found = _run(directory, places, argv)
    if len({each.digest for each in found}) != 1:
        raise InternalError(f"{directory}: the islands end with different weights; report this")
    return [_with_payloads(each, directory / f"{number}.run") for number, each in enumerate(found)]


def torchft(
    directory: Path,
    places: Sequence[Place],
    *,
    steps: int,
    hub: Place,
    more: Sequence[str] = (),
) -> list[Outcome]:
    """Train under torchft's DiLoCo, a replica at each place; return the outcomes.

    Its lighthouse is at ``hub``.
    """
    directory.mkdir()
    found = directory / "lighthouse"
    module = (sys.executable, "-m", f"{_PACKAGE}.torchft_training", "--world", str(len(places)))
    with (directory / "lighthouse.out").open("wb") as output, ExitStack() as stack:
        words = ["--serve", "--host", hub.address, "--result", str(found)]
        serving = _started(hub, [*module, *words], output)
        stack.callback(_end, serving)
        until_s = time.monotonic() + _START_S
        while not found.exists():
            if serving.poll() is not None or time.monotonic() > until_s:
                said = (directory / "lighthouse.out").read_text(errors="replace")
                raise PeerError(f"torchft's lighthouse does not start: {said[-_TOLD_CHARACTERS:]}")
            time.sleep(_POLL_S)
        address = found.read_text()

        def argv(rank: int, result: Path) -> list[str]:
            return [
                *(*module, "--steps", str(steps), "--samples", str(SAMPLES)),
                *("--rank", str(rank), "--host", places[rank].address, "--lighthouse", address),
                *("--device", places[rank].device, "--result", str(result), *more),
            ]

        return _run(directory / "replicas", places, argv)


def _with_payloads(outcome: Outcome, run_dir: Path) -> Outcome:
    """Return the outcome with the bytes of the island's payloads, and its waits for merges."""
    window = outcome.window
    events = [each for each in EventReader(run_dir).new() if each.time_s <= window.ended_s]
    fetched = [(each.time_s, each.fetched_bytes) for each in of_kind(events, TideAdopted)]
    before = [nbytes for time_s, nbytes in fetched if time_s < window.began_s]
    sent = sum(e.bytes for e in of_kind(events, TidePublished) if e.time_s >= window.began_s)
    received = max((nbytes for _, nbytes in fetched), default=0) - max(before, default=0)
    adopted = [each for each in of_kind(events, TideAdopted) if each.time_s >= window.began_s]
    waited_s = sum(each.waited_s for each in adopted)
    content = LineBytes(sent, received)
    return msgspec.structs.replace(outcome, content=content, waited_s=waited_s)


def _run(
    directory: Path, places: Sequence[Place], argv: Callable[[int, Path], list[str]]
) -> list[Outcome]:
    """Run a process at each place until all have ended.

    Raises ``PeerError`` with the last lines of one that fails, and ends the others.
    """
    directory.mkdir()
    results = [directory / f"{number}.json" for number in range(len(places))]
    with ExitStack() as stack:
        running = []
        for number, place in enumerate(places):
            output = stack.enter_context(results[number].with_suffix(".out").open("wb"))
            process = _started(place, argv(number, results[number]), output)
            stack.callback(_end, process)
            running.append(process)
        while any(process.poll() is None for process in running):
            for process, result in zip(running, results, strict=True):
                if process.poll():
                    said = result.with_suffix(".out").read_text(errors="replace").splitlines()
                    raise PeerError("\n".join(["a process failed:", *said[-_TOLD_LINES:]]))
            time.sleep(_POLL_S)
    return [msgspec.json.decode(result.read_bytes(), type=Outcome) for result in results]


def _started(place: Place, argv: Sequence[str], output: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*place.within, *argv],
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **place.env},
        start_new_session=True,
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
