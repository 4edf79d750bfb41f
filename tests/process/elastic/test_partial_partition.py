"""Two machines reach the coordinator but not each other: one is excluded until they do again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from event_lines import EventLines
from lan import Lan, why_not
from machines import Machines, waits
from undisturbed import alone, weights

NO_LAN = why_not()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(NO_LAN), reason=NO_LAN),
]


@pytest.fixture
def lan() -> Iterator[Lan]:
    with Lan(3) as found:
        yield found


@pytest.fixture
def machines(tmp_path: Path, lan: Lan, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    """Give launchers on three machines whose ranks meet while they wait."""
    monkeypatch.setenv("HOLDFAST_TEST_MEET", "1")
    found = Machines(tmp_path, lan=lan)
    yield found
    lan.heal()
    found.close()


def test_of_two_machines_that_do_not_reach_each_other_one_is_left_out_and_returns(
    machines: Machines, lan: Lan
) -> None:
    limits = ("--min-hang-s", "2")
    first = machines.start("--nnodes", "3", "--coordinator", machines.place, *limits)
    others = [machines.start("--join", machines.place, *limits) for _ in range(2)]
    machines.await_lines(waits(3), count=3)
    before = len(machines.lines())
    lan.cut(1, 2)
    lan.cut(2, 1)
    machines.await_lines(waits(2), count=2, after=before)
    pids = {line["pid"] for line in machines.lines()[before:] if "waits" in line}
    homes = [number for number in (first, *others) if pids & set(workers(machines, number))]
    assert first in homes, "one of the two is left out, not whom both reach"
    before = len(machines.lines())
    lan.heal()
    machines.await_lines(waits(3), count=3, after=before)
    assert set(pids) < {line["pid"] for line in machines.lines()[before:] if "waits" in line}
    machines.end.touch()
    assert [machines.await_end(number) for number in (first, *others)] == [0, 0, 0]
    done = [weights(line) for line in machines.lines() if "done" in line]
    assert done == [alone()] * 3
    assert {"unreachable"} == {
        event["what"]
        for number in others
        for event in EventLines(machines.run_dir(number)).new()
        if event["kind"] == "detected" and event["what"] not in ("join", "node_lost")
    }


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", [(1, 2), (2, 1)], ids=["one way", "the other way"])
def test_a_first_generation_that_cannot_form_is_formed_without_one_of_two(
    machines: Machines, lan: Lan, way: tuple[int, int]
) -> None:
    lan.cut(*way)
    limits = ("--min-hang-s", "2")
    numbers = [machines.start("--nnodes", "3", "--coordinator", machines.place, *limits)]
    numbers += [machines.start("--join", machines.place, *limits) for _ in range(2)]
    machines.await_lines(waits(2), count=2)
    before = len(machines.lines())
    lan.heal()
    machines.await_lines(waits(3), count=3, after=before)
    machines.end.touch()
    assert [machines.await_end(number) for number in numbers] == [0, 0, 0]
    assert [weights(line) for line in machines.lines() if "done" in line] == [alone()] * 3


def workers(machines: Machines, number: int) -> list[int]:
    return list(machines.processes(number).workers.values())
