"""Launchers run the etcd of their job themselves, and it outlives each of them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import etcd
import keeper
import pytest
from machines import Machines, waits
from torchruns import DEADLINE_S
from undisturbed import alone, weights

from holdfast.ckpt.transport import RunKey
from holdfast.elastic.coordinator.etcd.address import EtcdAddress
from holdfast.elastic.coordinator.managed.authority import Authority
from holdfast.elastic.coordinator.managed.cluster import MembersAdmin
from holdfast.elastic.coordinator.managed.command import FOLDER
from holdfast.elastic.coordinator.managed.listed import ListedMember
from holdfast.elastic.errors import CoordinatorError
from holdfast.elastic.launch.member_service import read_member, read_member_pid


class ManagedMachines(Machines):
    """Launchers whose coordinator is an etcd of their own."""

    @property
    def place(self) -> str:
        return f"managed://127.0.0.2:{self.port}"

    def pid(self, number: int) -> int:
        """Return the process of a launcher's member, 0 if it has none."""
        return read_member_pid(self.run_dir(number) / FOLDER)

    def lose(self, number: int) -> None:
        """Take the member too."""
        if pid := self.pid(number):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        super().lose(number)

    def await_members(self, wanted: Callable[[list[ListedMember]], bool], *, at: int) -> None:
        """Wait until the list of members is as wanted; ``at`` has one of them."""
        deadline_s = time.monotonic() + 2 * DEADLINE_S
        authority = Authority.of(RunKey.load(self.directory / "key.json"))
        while (record := read_member(self.run_dir(at) / FOLDER)) is None:
            assert time.monotonic() < deadline_s, self.output()
            time.sleep(0.1)
        address = EtcdAddress.parse(f"managed://{record.endpoint}/{record.token}")
        found: list[ListedMember] = []
        with contextlib.closing(
            MembersAdmin(address, authority.client(record.token), timeout_s=5.0)
        ) as admin:
            while not wanted(found):
                assert time.monotonic() < deadline_s, f"{found}\n{self.output()}"
                time.sleep(0.1)
                with contextlib.suppress(CoordinatorError):
                    found = admin.members()


def voters(*numbers: int) -> Callable[[list[ListedMember]], bool]:
    """Say which lists have exactly these machines, each with a vote."""
    hosts = sorted(f"127.0.0.{number + 2}" for number in numbers)
    return lambda found: (
        sorted(each.machine for each in found if each.name and not each.learner) == hosts
        and len(found) == len(hosts)
    )


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ManagedMachines]:
    """Give launchers that end with the test."""
    try:
        monkeypatch.setenv("HOLDFAST_ETCD", str(etcd.program()))
    except keeper.CannotInstall as error:
        if keeper.required():
            pytest.fail(f"etcd is required here, but {error}", pytrace=False)
        pytest.skip(f"no etcd: {error}")
    found = ManagedMachines(tmp_path)
    yield found
    found.close()


def test_the_first_launcher_begins_the_etcd_and_ends_it_if_it_gives_up(
    machines: ManagedMachines,
) -> None:
    first = machines.start("--nnodes", "3", "--coordinator", machines.place)
    deadline_s = time.monotonic() + DEADLINE_S
    while "1 of 3 launchers are there" not in machines.output():
        assert time.monotonic() < deadline_s, machines.output()
        time.sleep(0.02)
    record = read_member(machines.run_dir(first) / FOLDER)
    assert record is not None and machines.pid(first)
    stranger = Authority.of(RunKey.new()).client(record.token)
    address = EtcdAddress.parse(f"managed://{record.endpoint}/{record.token}")
    with (
        contextlib.closing(MembersAdmin(address, stranger, timeout_s=1.0)) as admin,
        pytest.raises(CoordinatorError, match="does not answer"),
    ):
        admin.members()
    machines.signal(first, signal.SIGINT)
    assert machines.await_end(first) == 128 + signal.SIGINT, machines.output()
    assert not (machines.run_dir(first) / FOLDER).exists()


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_machine_is_lost_with_its_member_and_another_takes_its_place(
    machines: ManagedMachines, lost: int
) -> None:
    options = ("--nnodes", "3:4", "--coordinator", machines.place)
    for _ in range(3):
        machines.start(*options)
    machines.await_lines(waits(3), count=3)
    kept = [number for number in range(3) if number != lost]
    machines.await_members(voters(0, 1, 2), at=kept[0])
    machines.lose(lost)
    machines.await_lines(waits(2), count=2)
    place = machines.place.replace("127.0.0.2", f"127.0.0.{kept[0] + 2}")
    fourth = machines.start("--join", place)
    machines.await_lines(waits(3), count=6)
    machines.await_members(voters(*kept, fourth), at=kept[0])
    machines.end.touch()
    for number in (*kept, fourth):
        assert machines.await_end(number) == 0, machines.output()
    done = [weights(line) for line in machines.lines() if "done" in line]
    assert done == [alone()] * 3
    assert not any((machines.run_dir(number) / FOLDER).exists() for number in (*kept, fourth))


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_five_machines_have_five_members_and_two_of_them_may_be_lost(
    machines: ManagedMachines,
) -> None:
    for _ in range(5):
        machines.start("--nnodes", "5", "--world", "4", "--coordinator", machines.place)
    machines.await_lines(waits(4), count=4)
    machines.await_members(voters(0, 1, 2, 3, 4), at=2)
    after = len(machines.lines())
    machines.lose(0)
    machines.lose(1)
    machines.await_lines(waits(3), count=3, after=after)
    machines.await_members(voters(2, 3, 4), at=2)
    machines.end.touch()
    for number in (2, 3, 4):
        assert machines.await_end(number) == 0, machines.output()
    assert [weights(line) for line in machines.lines() if "done" in line] == [alone()] * 3


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_member_outlives_its_launcher_which_takes_it_up_again(machines: ManagedMachines) -> None:
    options = ("--nnodes", "1:3", "--coordinator", machines.place)
    first = machines.start(*options)
    machines.await_lines(waits(1), count=1)
    member, before = machines.pid(first), read_member(machines.run_dir(first) / FOLDER)
    machines.signal(first, signal.SIGKILL)
    assert machines.await_end(first) == -signal.SIGKILL
    second = machines.start(*options, again=first)
    machines.await_lines(waits(1), count=2)
    assert machines.pid(first) == member
    after = read_member(machines.run_dir(first) / FOLDER)
    assert before is not None and after is not None and after.token == before.token
    os.kill(member, signal.SIGKILL)
    deadline_s = time.monotonic() + DEADLINE_S
    while machines.pid(first) == member:
        assert time.monotonic() < deadline_s, machines.output()
        time.sleep(0.02)
    machines.end.touch()
    assert machines.await_end(second) == 0, machines.output()
    assert [weights(line) for line in machines.lines() if "done" in line] == [alone()]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_launchers_that_leave_hand_their_members_over(machines: ManagedMachines) -> None:
    options = ("--nnodes", "1:3", "--coordinator", machines.place)
    for _ in range(3):
        machines.start(*options)
    machines.await_lines(waits(3), count=3)
    machines.await_members(voters(0, 1, 2), at=1)
    for number, left in ((0, 2), (1, 1)):
        after = len(machines.lines())
        machines.signal(number, signal.SIGTERM)
        assert machines.await_end(number) == 128 + signal.SIGTERM, machines.output()
        assert not (machines.run_dir(number) / FOLDER).exists()
        machines.await_lines(waits(left), count=left, after=after)
    machines.await_members(voters(2), at=2)
    machines.end.touch()
    assert machines.await_end(2) == 0, machines.output()
    assert [weights(line) for line in machines.lines() if "done" in line] == [alone()]
