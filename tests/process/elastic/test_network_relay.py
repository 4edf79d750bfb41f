"""Faults on the wire to the coordinator, without network namespaces.

The wire is cut in one or both directions, slow, or half open. Every worker's actions are recorded:
no two generations act at once.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from event_lines import EventLines
from jobs import TOY
from machines import Machines
from torchruns import DEADLINE_S
from wire import Wire

from holdfast.elastic.channel.shared_key import shared_key
from holdfast.elastic.coordinator.connecting import connect

Event = dict[str, Any]


class History:
    """All that two launchers and their workers did so far."""

    def __init__(self, machines: Machines) -> None:
        self._machines = machines
        self._readers = [EventLines(machines.run_dir(number)) for number in range(2)]
        self.events: list[Event] = []

    def await_event(self, wanted: Callable[[Event], bool], *, after: int = 0) -> int:
        """Wait for a wanted event behind the first ``after``; return how many there are."""
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            self.events += [event for reader in self._readers for event in reader.new()]
            if any(wanted(event) for event in self.events[after:]):
                return len(self.events)
            assert time.monotonic() < deadline_s, self._machines.output()
            time.sleep(0.01)

    def await_world(self, ranks: int, *, after: int = 0) -> int:
        """Wait until rank 0 steps on in a world of so many ranks that began behind ``after``."""
        after = self.await_event(
            lambda e: e["kind"] == "reformed" and e["world"] == ranks, after=after
        )
        newest = max(e["generation"] for e in self.events if e["kind"] == "reformed")
        return self.await_event(
            lambda e: e["kind"] == "step" and e["generation"] >= newest, after=after - 1
        )

    def overlaps(self) -> list[Event]:
        """Return the steps of older generations behind the first of a newer one."""
        steps = sorted((e for e in self.events if e["kind"] == "step"), key=lambda e: e["time_s"])
        newest, found = 0, []
        for step in steps:
            newest = max(newest, step["generation"])
            if step["generation"] < newest:
                found.append(step)
        return found


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    found = Machines(tmp_path)
    yield found
    found.close()


@pytest.fixture
def wire(machines: Machines) -> Iterator[Wire]:
    found = Wire(machines.place)
    yield found
    found.close()


class Two:
    """Two launchers that share a job of toy workers; the second speaks through the wire."""

    def __init__(self, machines: Machines, wire: Wire, folder: Path, *, least: int) -> None:
        self._machines, self._wire, self._least = machines, wire, least
        self._progress = str(folder / "progress")
        self.history = History(machines)

    def start(self, *, steps: int) -> None:
        script = (str(TOY), "--progress", self._progress, "--steps", str(steps))
        nodes = "2" if self._least == 2 else f"{self._least}:2"
        place = self._machines.place
        self._first = self._machines.start("--nnodes", nodes, "--coordinator", place, script=script)
        self._second = self._machines.start("--join", self._wire.endpoint, script=script)

    def stop(self) -> None:
        """End the job by SIGTERM to the first."""
        self._machines.signal(self._first, signal.SIGTERM)
        self.await_ends(128 + signal.SIGTERM, 1)

    def await_ends(self, *statuses: int) -> None:
        for launcher, status in zip((self._first, self._second), statuses, strict=True):
            assert self._machines.await_end(launcher) == status, self._machines.output()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(lambda wire: wire.cut(), id="cut"),
        pytest.param(
            lambda wire: wire.cut(forth=False), id="heard but deaf", marks=pytest.mark.exhaustive
        ),
        pytest.param(
            lambda wire: wire.cut(back=False), id="mute but hearing", marks=pytest.mark.exhaustive
        ),
        pytest.param(lambda wire: wire.half_open(), id="half open"),
    ],
)
def test_a_launcher_without_the_coordinator_fences_itself_and_comes_back(
    tmp_path: Path, machines: Machines, wire: Wire, fault: Callable[[Wire], None]
) -> None:
    two = Two(machines, wire, tmp_path, least=1)
    two.start(steps=1_000_000)
    history = two.history
    both = history.await_world(2)
    fault(wire)
    history.await_event(lambda e: e["kind"] == "detected" and e["what"] == "lease_lost")
    left = history.await_world(1, after=both)
    wire.mend()
    history.await_world(2, after=left)
    assert history.overlaps() == []
    two.stop()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_launcher_out_of_reach_for_long_takes_its_number_again(
    tmp_path: Path, machines: Machines, wire: Wire
) -> None:
    two = Two(machines, wire, tmp_path, least=2)
    two.start(steps=1_000_000)
    two.history.await_world(2)
    key = shared_key(tmp_path / "key.json")
    with contextlib.closing(connect(f"tcp://{machines.place}", key)) as coordinator:

        def await_launchers(*numbers: int) -> None:
            deadline_s = time.monotonic() + DEADLINE_S
            wanted = [f"jobs/job/launchers/{number}" for number in numbers]
            while [entry.key for entry in coordinator.range("jobs/job/launchers/")[0]] != wanted:
                assert time.monotonic() < deadline_s, machines.output()
                time.sleep(0.05)

        await_launchers(0, 1)
        wire.cut()
        await_launchers(0)
        wire.mend()
        await_launchers(0, 1)
    two.stop()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_slow_wire_to_the_coordinator_costs_no_generation(
    tmp_path: Path, machines: Machines, wire: Wire
) -> None:
    wire.delay_s = 0.1
    two = Two(machines, wire, tmp_path, least=2)
    two.start(steps=80)
    two.history.await_world(2)
    two.await_ends(0, 0)
    two.history.await_event(lambda e: e["kind"] == "job_ended")
    assert two.history.overlaps() == []
