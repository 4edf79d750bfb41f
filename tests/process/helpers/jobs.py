"""Real jobs of toy workers, with the queries that tests need."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from event_lines import EventLines
from session_imports import PRELOAD, session_imports

from holdfast.elastic.launch.config import LOCAL_TIMING, LaunchConfig, NodeSpec, python_command
from holdfast.elastic.launch.local import Launcher
from holdfast.elastic.membership.records import JobOutcome
from holdfast.tools.leftovers import leftovers

TOY = Path(__file__).with_name("toy_worker.py")
REMEMBERING = Path(__file__).with_name("remembering_worker.py")
DEADLINE_S = 120.0

PATIENT = msgspec.structs.replace(
    LOCAL_TIMING, lease_ttl_s=30.0, self_fence_s=20.0, park_timeout_s=20.0, stop_timeout_s=2.0
)
"""Of jobs in which it is not a lease that is tested: a process that gets no processor for some
seconds is taken neither for dead nor for one that does not leave. The launcher sees the end of an
agent at once."""

Event = dict[str, Any]


def trainers(
    script: Path,
    args: Sequence[object],
    *,
    run_dir: Path,
    nodes: int = 1,
    slots: int = 1,
    preload: tuple[str, ...] = PRELOAD,
) -> LaunchConfig:
    """Return a patient job: as many trainers as fit on the nodes ``n0``, ``n1`` and so on."""
    names = [f"n{number}" for number in range(nodes)]
    return LaunchConfig(
        command=python_command(script, [str(each) for each in args]),
        nodes=tuple(NodeSpec(name=n, domain=n, slots={"trainer": slots}) for n in names),
        wanted={"trainer": nodes * slots},
        run_dir=run_dir,
        timing=PATIENT,
        preload=preload,
    )


class Job:
    """A launched job whose events can be waited for."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self.history: list[Event] = []
        self._reader = EventLines(launcher.run_dir)

    def await_event(self, wanted: Callable[[Event], bool], *, after: int = 0) -> Event:
        """Return the first event from position ``after`` on that is wanted."""
        deadline_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline_s:
            self.history += self._reader.new()
            for event in self.history[after:]:
                if wanted(event):
                    return event
            after = max(after, len(self.history))  # there are thousands: none is asked twice
            time.sleep(0.01)
        seen = "\n".join(str(event) for event in self.history if event["kind"] != "step")
        raise AssertionError(f"the event did not come; seen:\n{seen}")

    def await_step(self, step: int) -> None:
        """Wait until somebody completed ``step``."""
        self.await_event(lambda e: e["kind"] == "step" and e["step"] >= step)

    def generation(self, number: int) -> Event:
        """Wait until a worker resumed in that generation or a later one, and return that."""
        return self.await_event(lambda e: e["kind"] == "resumed" and e["generation"] >= number)

    def world_of(self, ranks: int, *, after: int = 0, generation: int = 1) -> Event:
        """Wait for a generation of so many ranks, proposed after event number ``after``.

        Its number is ``generation`` at least. A replacement may be ready before the others go on
        without it: then there is no smaller world in between.
        """
        return self.await_event(
            lambda e: (
                e["kind"] == "proposed"
                and len(e["ranks"]) == ranks
                and e["generation"] >= generation
            ),
            after=after,
        )

    def events(self, kind: str) -> list[Event]:
        """Return the events of one kind so far."""
        self.history += self._reader.new()
        return [event for event in self.history if event["kind"] == kind]

    def worker(self, seat: str) -> int:
        """Return the process id of a worker; one that is being replaced is waited for."""
        deadline_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline_s:
            for node in self.launcher.processes().values():
                if seat in node.workers:
                    return node.workers[seat]
            time.sleep(0.02)
        raise AssertionError(f"no {seat} in {self.launcher.processes()}")

    def finish(self) -> JobOutcome:
        """Wait for the end."""
        outcome = self.launcher.wait(DEADLINE_S)
        self.history += self._reader.new()
        last = "\n".join(map(str, self.history[-60:]))
        assert outcome is not None, f"the job is not over; the last events:\n{last}"
        return outcome


@contextmanager
def job(
    directory: Path,
    *toy_args: str,
    nodes: int = 1,
    per_node: int = 2,
    roles: dict[str, int] | None = None,
    timing: dict[str, float] | None = None,
    script: Path = TOY,
    **options: Any,
) -> Iterator[Job]:
    """Run toy workers, or those of another ``script``, which trains with torch.

    On leaving, the job has ended and nothing of it is left.
    """
    roles = roles or {}
    slots = {"trainer": per_node, **roles}
    options.setdefault("preload", () if script in (TOY, REMEMBERING) else PRELOAD)
    options["timing"] = msgspec.structs.replace(PATIENT, **(timing or {}))
    config = LaunchConfig(
        command=python_command(script, ["--progress", str(directory / "progress"), *toy_args]),
        nodes=tuple(NodeSpec(name=f"n{i}", domain=f"n{i}", slots=slots) for i in range(nodes)),
        wanted={"trainer": nodes * per_node, **roles},
        run_dir=directory / "run",
        **options,
    )
    with launched(config) as running:
        yield running


@contextmanager
def launched(config: LaunchConfig) -> Iterator[Job]:
    """Run a job; on leaving, it has ended and nothing of it is left."""
    launcher = Launcher(config, imports=session_imports(config))
    launcher.start()
    try:
        yield Job(launcher)
    finally:
        launcher.stop("the test is over")
        if launcher.wait(DEADLINE_S) is None:
            launcher.kill()
            launcher.wait(DEADLINE_S)
        assert leftovers(launcher.run, timeout_s=DEADLINE_S) == []


def hurt(pid: int, number: signal.Signals = signal.SIGKILL) -> float:
    """Send a signal and return the wall time it was sent."""
    now = time.time()
    os.kill(pid, number)
    return now
