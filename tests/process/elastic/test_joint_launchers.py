"""Two launchers act as two machines of one job; one is lost with all its processes and returns."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from etcd_fixtures import StartCluster
from machines import Machines, waits
from torchruns import DEADLINE_S
from undisturbed import alone, weights

from holdfast.ckpt.memory.arena import arena_path, sweep
from holdfast.ckpt.memory.kept import give_up
from holdfast.elastic.coordinator.service import drop_memory
from holdfast.tools.leftovers import leftovers


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    """Give launchers that end with the test."""
    found = Machines(tmp_path)
    yield found
    found.close()


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_machine_is_lost_with_everything_and_comes_back(
    tmp_path: Path, machines: Machines
) -> None:
    place = machines.place
    first = machines.start("--nnodes", "2", "--coordinator", place)
    second = machines.start("--join", place)
    machines.await_lines(waits(2), count=2)
    addresses = [machines.processes(number).address for number in (first, second)]
    assert [address.rpartition(":")[0] for address in addresses] == [
        "tcp://127.0.0.2",
        "tcp://127.0.0.3",
    ]
    machines.lose(second)
    machines.await_lines(waits(1), count=1)
    after = len(machines.lines())
    third = machines.start("--join", place)
    machines.await_lines(waits(2), count=2, after=after)
    machines.end.touch()
    assert machines.await_end(first) == 0, machines.output()
    assert machines.await_end(third) == 0, machines.output()
    done = [weights(line) for line in machines.lines() if "done" in line]
    expected = alone()
    assert done == [expected, expected]
    run = msgspec.json.decode(
        (tmp_path / "run0" / "events-launcher.jsonl").read_bytes().split(b"\n")[0]
    )["run"]
    assert leftovers(run, timeout_s=DEADLINE_S) == []


@pytest.mark.parametrize(
    "lost",
    [
        "both",
        pytest.param("launcher", marks=pytest.mark.exhaustive),
        pytest.param("memory too", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_job_goes_on_when_the_launcher_of_its_coordinators_machine_is_back(
    machines: Machines, lost: str
) -> None:
    place = machines.place
    first = machines.start("--nnodes", "2", "--coordinator", place)
    second = machines.start("--join", place)
    machines.await_lines(waits(2), count=2)
    machines.await_protected(6, first, second)
    run = machines.run(first)
    after = len(machines.lines())
    if lost == "launcher":
        machines.signal(first, signal.SIGKILL)
        assert machines.await_end(first) == -signal.SIGKILL
    else:
        machines.lose(first)
    if lost == "memory too":
        give_up(arena_path(run, "node0"))
        assert [path.name for path in sweep()] == [arena_path(run, "node0").name]
    third = machines.start("--nnodes", "2", "--coordinator", place, again=first)
    machines.await_lines(waits(2), count=2, after=after)
    assert machines.run(third) == run
    begun = {line["begins"] for line in machines.lines()[after:] if "begins" in line}
    assert begun == {6}, "the job goes on where it was, and there is no checkpoint"
    machines.end.touch()
    assert machines.await_end(third) == 0, machines.output()
    assert machines.await_end(second) == 0, machines.output()
    done = [weights(line) for line in machines.lines() if "done" in line]
    assert done == [alone(), alone()]
    assert leftovers(run, timeout_s=DEADLINE_S) == []


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_job_begins_anew_when_all_machines_were_lost(machines: Machines) -> None:
    place = machines.place
    first = machines.start("--nnodes", "2", "--coordinator", place)
    second = machines.start("--join", place)
    machines.await_lines(waits(2), count=2)
    run, after = machines.run(first), len(machines.lines())
    machines.lose(first)
    machines.lose(second)
    drop_memory(run)
    again = [
        machines.start("--nnodes", "2", "--coordinator", place, again=first),
        machines.start("--join", place, again=second),
    ]
    machines.await_lines(waits(2), count=2, after=after)
    begun = {line["begins"] for line in machines.lines()[after:] if "begins" in line}
    assert begun == {0}
    machines.end.touch()
    assert [machines.await_end(number) for number in again] == [0, 0], machines.output()
    done = [weights(line) for line in machines.lines() if "done" in line]
    assert done == [alone(), alone()]
    assert leftovers(run, timeout_s=DEADLINE_S) == []


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_with_etcd_the_loss_of_the_machine_that_began_the_job_is_survived(
    machines: Machines, start_etcd: StartCluster
) -> None:
    place = start_etcd(1).url
    first = machines.start("--nnodes", "2", "--coordinator", place)
    second = machines.start("--nnodes", "2", "--coordinator", place)
    machines.await_lines(waits(2), count=2)
    machines.lose(first)
    machines.await_lines(waits(1), count=1)
    machines.end.touch()
    assert machines.await_end(second) == 0, machines.output()
    done = [weights(line) for line in machines.lines() if "done" in line]
    assert done == [alone()]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_machine_that_sleeps_for_longer_than_its_lease_is_left_behind_and_joins_again(
    machines: Machines,
) -> None:
    place = machines.place
    first = machines.start("--nnodes", "2", "--coordinator", place)
    second = machines.start("--join", place)
    machines.await_lines(waits(2), count=2)
    (asleep,) = machines.processes(second).workers.values()
    machines.signal_all(second, signal.SIGSTOP)
    machines.await_lines(waits(1), count=1)
    after = len(machines.lines())
    machines.signal_all(second, signal.SIGCONT)
    machines.await_lines(waits(2), count=2, after=after)
    assert all(line.get("pid") != asleep for line in machines.lines()[after:])
    machines.end.touch()
    assert machines.await_end(first) == 0, machines.output()
    assert machines.await_end(second) == 0, machines.output()
    done = [weights(line) for line in machines.lines() if "done" in line]
    assert done == [alone(), alone()]


def test_ctrl_c_ends_a_launcher_that_waits_for_others(machines: Machines) -> None:
    number = machines.start("--nnodes", "2", "--coordinator", machines.place)
    deadline_s = time.monotonic() + DEADLINE_S
    while "1 of 2 launchers are there" not in machines.output():
        assert time.monotonic() < deadline_s, machines.output()
        time.sleep(0.02)
    machines.signal(number, signal.SIGINT)
    assert machines.await_end(number) == 128 + signal.SIGINT, machines.output()
    assert "stopped by SIGINT while waiting" in machines.output()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.exhaustive
def test_a_launcher_that_is_stopped_leaves_and_the_others_go_on(machines: Machines) -> None:
    place = machines.place
    first = machines.start("--nnodes", "1:2", "--coordinator", place)
    second = machines.start("--join", place)
    machines.await_lines(waits(2), count=2)
    machines.signal(second, signal.SIGTERM)
    assert machines.await_end(second) == 128 + signal.SIGTERM, machines.output()
    machines.await_lines(waits(1), count=1)
    machines.end.touch()
    assert machines.await_end(first) == 0, machines.output()
