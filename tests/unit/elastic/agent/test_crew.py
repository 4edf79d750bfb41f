"""The workers of a node without processes: order of starts, and reasons for the job's end."""

from __future__ import annotations

import errno
import os
import selectors
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import msgspec
import pytest
from doubles import fakes

from holdfast.elastic.agent import crew as crew_module
from holdfast.elastic.agent.config import AgentConfig, AgentTiming
from holdfast.elastic.agent.crew import Crew
from holdfast.elastic.agent.reporting import Reporter
from holdfast.elastic.agent.workers import SeatProcess
from holdfast.elastic.events import DataWorkerDeath, DataWorkerHang, encode
from holdfast.elastic.membership import messages
from holdfast.elastic.membership.records import JobSpec, Roster, Seating, WorkerState
from holdfast.elastic.processes.children import ChildChange, ChildStatus

LONG_S, MOMENT_S = 1e6, 1e-9


class FakeChild:
    """A process that ends when told so."""

    pid = 4711

    def __init__(self) -> None:
        self.code: int | None = None
        self._status: ChildStatus | None = None

    @property
    def alive(self) -> bool:
        return self.code is None

    def exit(self, code: int) -> None:
        self._status = ChildStatus(change=ChildChange.EXITED, code=code)

    def poll(self) -> ChildStatus | None:
        status, self._status = self._status, None
        self.code = status.code if status else self.code
        return status

    def kill(self) -> None:
        self.exit(-9)


class FakeWorker(SeatProcess):
    """A worker without a process."""

    def _spawn(self, *_: object, **__: object) -> FakeChild:  # type: ignore[override]
        return FakeChild()


class Node:
    """A crew, and what the job would tell it."""

    def __init__(self, directory: Path, *, yield_s: float, spec: JobSpec) -> None:
        self.spec = spec
        config = AgentConfig(
            run="unit",
            node="a",
            domain="a",
            run_dir=str(directory),
            key_file="",
            coordinator="",
            slots={"trainer": 3},
            wanted={"trainer": 3},
            nodes=1,
            command=("python", "train.py"),
            timing=AgentTiming(yield_s=yield_s),
        )
        self.reporter = Reporter(directory, node="a")
        self.crew = Crew(
            config,
            selector=selectors.DefaultSelector(),
            reporter=self.reporter,
            wake=lambda: None,
        )

    def seat(self, *attempts: int, failures: int = 0, progress: int = -1) -> list[int]:
        """Order the attempts of trainer/0, 1, ...; return those that run now."""
        orders = [
            Seating(seat=f"trainer/{i}", node="a", attempt=attempt, failures=failures)
            for i, attempt in enumerate(attempts)
        ]
        self.crew.follow(orders, sidecar="tcp://x", progress=progress)
        return [worker.attempt for worker in self.crew.table]

    def train(self, generation: int, *, stepped: int) -> None:
        """Have all that live take part in a generation, having completed steps of another."""
        for worker in self.crew.table.living():
            worker.state, worker.spec = WorkerState.ACTIVE, self.spec
            worker.generation, worker.stepped = generation, stepped
        self.tell()

    def end(self, seat: str, code: int = -9) -> None:
        worker = self.crew.table.get(seat)
        assert worker
        worker.child.exit(code)  # type: ignore[attr-defined]
        self.crew.check()
        self.tell()

    def tell(self) -> None:
        node = fakes.node("a", *self.crew.table.records())
        self.crew.tell(msgspec.structs.replace(Roster(), nodes=(node,)))


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    made: list[Node] = []

    def node(*, yield_s: float = LONG_S, spec: JobSpec | None = None) -> Node:
        made.append(Node(tmp_path, yield_s=yield_s, spec=spec or JobSpec()))
        return made[-1]

    monkeypatch.setattr(crew_module, "SeatProcess", FakeWorker)
    yield node
    for one in made:
        for worker in one.crew.table.living():
            one.end(worker.seat)
        one.reporter.close()


def test_a_replacement_waits_until_the_survivors_train_again(make) -> None:  # type: ignore[no-untyped-def]
    node = make()
    assert node.seat(1, 1, 1) == [1, 1, 1]
    node.train(1, stepped=1)
    node.end("trainer/1")
    assert node.seat(1, 2, 1) == [1, 1, 1]
    node.train(2, stepped=1)
    assert node.seat(1, 2, 1) == [1, 1, 1]
    node.train(2, stepped=2)
    assert node.seat(1, 2, 1) == [1, 2, 1]


def test_a_replacement_does_not_wait_for_ever(make) -> None:  # type: ignore[no-untyped-def]
    node = make(yield_s=MOMENT_S)
    node.seat(1, 1, 1)
    node.train(1, stepped=1)
    node.end("trainer/1")
    assert node.seat(1, 2, 1) == [1, 2, 1]


def test_workers_that_die_before_they_are_ready_are_counted_in_a_row(make) -> None:  # type: ignore[no-untyped-def]
    node = make(yield_s=MOMENT_S)

    def unready() -> int:
        worker = node.crew.table.get("trainer/0")
        assert worker
        return int(worker.unready)

    for attempt in (1, 2, 3):
        node.seat(attempt)
        assert unready() == attempt - 1
        if attempt == 3:
            node.train(1, stepped=1)
        node.end("trainer/0")
    node.seat(4)
    assert unready() == 0, "the one before it had been ready"


def test_a_seat_that_fails_again_and_again_is_taken_ever_later(
    make, monkeypatch: pytest.MonkeyPatch
) -> None:  # type: ignore[no-untyped-def]
    now_s = 100.0
    monkeypatch.setattr(crew_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    node = make(yield_s=MOMENT_S)
    node.seat(1)
    node.end("trainer/0")
    assert node.seat(2, failures=1) == [2]
    for failures, pause_s in enumerate([0.5, 1.0, 2.0], start=2):
        node.end("trainer/0")
        assert node.seat(failures + 1, failures=failures) == [failures]
        now_s += pause_s - 0.01
        assert node.seat(failures + 1, failures=failures) == [failures]
        now_s += 0.02
        assert node.seat(failures + 1, failures=failures) == [failures + 1]


class RefusedWorker(FakeWorker):
    """A worker whose process the machine refuses to start, with one error after another."""

    errors: ClassVar[list[int]] = []

    def _spawn(self, *_: object, **__: object) -> FakeChild:  # type: ignore[override]
        if self.errors:
            number = self.errors.pop(0)
            raise OSError(number, os.strerror(number))
        return FakeChild()


def test_a_machine_that_refuses_a_process_for_a_while_ends_no_job(
    make, monkeypatch: pytest.MonkeyPatch
) -> None:  # type: ignore[no-untyped-def]
    now_s = 100.0
    monkeypatch.setattr(crew_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(crew_module, "SeatProcess", RefusedWorker)
    RefusedWorker.errors = [errno.EAGAIN] * 12
    node, tries = make(), 0
    while not node.seat(1, progress=tries // 4):
        now_s, tries = now_s + 5.0, tries + 1
    assert tries == 12
    assert not node.crew.job_failure
    RefusedWorker.errors = [errno.ENOMEM] * 9
    while not node.crew.job_failure:
        node.seat(1, 1, progress=7)
        now_s += 30.0
    assert len(RefusedWorker.errors) == 3, "five more attempts without progress"
    assert "trainer/1 cannot be started (python train.py)" in node.crew.job_failure


def test_a_program_that_does_not_exist_is_named_at_once(
    make, monkeypatch: pytest.MonkeyPatch
) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(crew_module, "SeatProcess", RefusedWorker)
    RefusedWorker.errors = [errno.ENOENT]
    node = make()
    assert node.seat(1) == []
    assert "No such file" in node.crew.job_failure


@pytest.mark.parametrize(
    "spec", [JobSpec(dp=3), JobSpec(min_dp=3)], ids=["fixed size", "smallest size"]
)
def test_a_replacement_without_which_nobody_can_go_on_does_not_wait(make, spec) -> None:  # type: ignore[no-untyped-def]
    node = make(spec=spec)
    node.seat(1, 1, 1)
    node.train(1, stepped=1)
    node.end("trainer/1")
    assert node.seat(1, 2, 1) == [1, 2, 1]


def test_a_replacement_waits_where_a_spare_takes_over_in_a_job_of_fixed_size(make) -> None:  # type: ignore[no-untyped-def]
    node = make(spec=JobSpec(dp=2))
    node.seat(1, 1, 1)
    node.train(1, stepped=1)
    node.crew.table.get("trainer/2").state = WorkerState.READY
    node.tell()
    node.end("trainer/1")
    assert node.seat(1, 2, 1) == [1, 1, 1]
    node.train(2, stepped=2)
    assert node.seat(1, 2, 1) == [1, 2, 1]


def test_when_nobody_survives_all_replacements_start(make) -> None:  # type: ignore[no-untyped-def]
    node = make()
    node.seat(1, 1, 1)
    node.train(1, stepped=1)
    for seat in ("trainer/0", "trainer/1", "trainer/2"):
        node.end(seat)
    assert node.seat(2, 2, 2) == [2, 2, 2]


def test_a_replacement_that_dies_while_it_starts_is_replaced_at_once(make) -> None:  # type: ignore[no-untyped-def]
    node = make(yield_s=MOMENT_S)
    node.seat(1, 1, 1)
    node.train(1, stepped=1)
    node.end("trainer/1")
    node.seat(1, 2, 1)
    node.crew._timing = AgentTiming(yield_s=LONG_S)
    node.end("trainer/1")
    assert node.seat(1, 3, 1) == [1, 3, 1]


def test_the_data_workers_that_a_rank_lost_are_told_as_long_as_it_lives(make) -> None:  # type: ignore[no-untyped-def]
    node = make()
    node.seat(1, 1)
    worker = node.crew.table.get("trainer/1")
    assert node.crew.data_troubles == {}
    for event in (
        DataWorkerHang(loader="words", how="it gave nothing", times=1),
        DataWorkerDeath(loader="words", how="x", times=1),
        DataWorkerDeath(loader="words", how="killed by SIGKILL", times=1),
    ):
        node.crew._handle(worker, messages.Emit(event=msgspec.Raw(encode(event))))
    assert node.crew.data_troubles == {
        "trainer/1": "trainer/1 lost data workers (2 died, 1 stuck), "
        "the last of loader 'words': killed by SIGKILL"
    }
    node.end("trainer/1")
    assert node.crew.data_troubles == {}


def test_a_script_that_ends_well_without_training_fails_the_job(make) -> None:  # type: ignore[no-untyped-def]
    node = make()
    node.seat(1, 1)
    node.end("trainer/0", code=0)
    assert "trainer/0 ended without training (python train.py)" in node.crew.job_failure


def test_a_script_that_crashes_is_tried_again(make) -> None:  # type: ignore[no-untyped-def]
    node = make()
    node.seat(1, 1)
    node.end("trainer/0", code=1)
    assert not node.crew.job_failure


def test_a_worker_that_broke_fails_the_job_unless_another_stage_misses_it(make) -> None:  # type: ignore[no-untyped-def]
    node = make(yield_s=MOMENT_S)
    node.seat(1, 1)
    node.train(4, stepped=4)
    for worker in node.crew.table:
        worker.state, worker.lingers = WorkerState.DONE, True
    node.end("trainer/1")
    broke = node.crew.table.get("trainer/1")
    assert node.crew.failures == [
        "trainer/1 completed its part of the job and then ended with killed by SIGKILL"
    ]
    assert (broke.state, broke.record().broke) == (WorkerState.DONE, True)
    other = node.crew.table.get("trainer/0")
    other.state, other.spec = WorkerState.READY, JobSpec(stage=1)
    node.tell()
    assert (broke.state, node.crew.failures) == (WorkerState.DEAD, [])
    assert node.seat(1, 2) == [1, 2]
