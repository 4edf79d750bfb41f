"""Machines in network namespaces under cuts and a bad network: the weights are not affected.

The data path is separate as well: no machine can map the memory of another.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from event_lines import EventLines
from lan import Lan, Trouble, why_not
from machines import Machines, waits
from torchruns import DEADLINE_S
from undisturbed import alone, weights

NO_LAN = why_not()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(NO_LAN), reason=NO_LAN),
]


@pytest.fixture
def lan() -> Iterator[Lan]:
    with Lan(2) as found:
        yield found


@pytest.fixture
def machines(tmp_path: Path, lan: Lan) -> Iterator[Machines]:
    """Give launchers on two machines; those end before these."""
    found = Machines(tmp_path, lan=lan)
    yield found
    lan.heal()
    found.close()


def acts(pid: int) -> bool:
    """Say if a process may still do something: it is there, and more than its exit status."""
    try:
        return b") Z " not in Path(f"/proc/{pid}/stat").read_bytes()
    except FileNotFoundError:
        return False


def wait_until(true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline_s, "it did not come true in time"
        time.sleep(0.02)


def done(machines: Machines) -> list[list[str]]:
    return [weights(line) for line in machines.lines() if "done" in line]


OUT_OF_REACH: dict[str, Callable[[Lan], None]] = {
    "cut off": lambda lan: lan.isolate(1),
    "heard but deaf": lambda lan: lan.cut(0, 1),
    "mute but hearing": lambda lan: lan.cut(1, 0),
}


def test_a_machine_out_of_reach_in_any_way_ends_its_workers_and_returns(
    machines: Machines, lan: Lan
) -> None:
    first = machines.start("--nnodes", "2", "--coordinator", machines.place)
    second = machines.start("--join", machines.place)
    machines.await_lines(waits(2), count=2)
    reader = EventLines(machines.run_dir(second))
    for how, fault in OUT_OF_REACH.items():
        (worker,) = machines.processes(second).workers.values()
        before = len(machines.lines())
        print(f"machine 1 is {how}")
        fault(lan)
        machines.await_lines(waits(1), count=1, after=before)
        wait_until(lambda: not acts(worker))  # noqa: B023 - though nobody can tell it
        wait_until(lambda: any(e.get("what") == "lease_lost" for e in reader.new()))
        after = len(machines.lines())
        lan.heal()
        machines.await_lines(waits(2), count=2, after=after)
    machines.end.touch()
    assert machines.await_end(first) == 0, machines.output()
    assert machines.await_end(second) == 0, machines.output()
    assert done(machines) == [alone(), alone()]


def test_a_slow_and_lossy_network_changes_nothing(machines: Machines, lan: Lan) -> None:
    lan.trouble(0, 1, Trouble(delay_s=0.02, loss=0.02))
    lan.trouble(1, 0, Trouble(delay_s=0.01, loss=0.02))
    machines.end.touch()  # nobody waits for anything but the network
    first = machines.start("--nnodes", "2", "--coordinator", machines.place)
    second = machines.start("--join", machines.place)
    assert machines.await_end(first) == 0, machines.output()
    assert machines.await_end(second) == 0, machines.output()
    assert done(machines) == [alone(), alone()]


@pytest.mark.exhaustive
def test_a_machine_that_is_lost_for_good_is_gone_on_without(machines: Machines, lan: Lan) -> None:
    first = machines.start("--nnodes", "2", "--coordinator", machines.place)
    second = machines.start("--join", machines.place)
    machines.await_lines(waits(2), count=2)
    lan.isolate(1)
    machines.await_lines(waits(1), count=1)
    machines.end.touch()
    assert machines.await_end(first) == 0, machines.output()
    assert done(machines) == [alone()]
    machines.signal(second, signal.SIGINT)
    machines.signal(second, signal.SIGINT)  # at once: it reaches nobody to ask
    assert machines.await_end(second) == 128 + signal.SIGINT
