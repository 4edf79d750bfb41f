"""A launcher's part in a managed etcd, with the cluster and the member's process played."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from doubles.memory_coordinator import MemoryCoordinator

from holdfast.ckpt.transport import RunKey
from holdfast.elastic.coordinator.managed.command import DATA, MemberAddress
from holdfast.elastic.coordinator.managed.listed import ListedMember
from holdfast.elastic.errors import CoordinatorError
from holdfast.elastic.launch import members_keeper
from holdfast.elastic.launch.member_service import (
    MemberServiceConfig,
    read_member,
    write_member,
)
from holdfast.elastic.launch.members_keeper import KeeperConfig, LauncherPresence, MembersKeeper
from holdfast.elastic.membership.view import encode

KEY = RunKey.new()


class PlayedAdmin:
    """A cluster that does what it is told."""

    def __init__(self, *members: ListedMember) -> None:
        self.there = {each.id: each for each in members}
        self.silent: set[int] = set()
        self.requests = 0
        self.reached = True

    @property
    def endpoints(self) -> tuple[str, ...]:
        return tuple(each.client for each in self.there.values() if each.client)

    def members(self) -> list[ListedMember]:
        if not self.reached:
            raise CoordinatorError("no majority")
        return [*self.there.values()]

    def add_learner(self, peer: str) -> None:
        id = max(self.there) + 1
        self.there[id] = ListedMember(id=id, peer=peer, learner=True)

    def promote(self, id: int) -> None:
        self.there[id] = listed(id, self.there[id].machine)

    def remove(self, id: int) -> None:
        del self.there[id]

    def answers(self, member: ListedMember) -> bool:
        self.requests += 1
        return bool(member.client) and member.id not in self.silent

    def close(self) -> None:
        pass


class PlayedProcess:
    """A member's process that only counts."""

    def __init__(self, config: MemberServiceConfig) -> None:
        self.config, self.alive = config, True
        (Path(config.folder) / DATA / "member" / "wal").mkdir(parents=True, exist_ok=True)

    def kill(self, *, orderly: bool = False) -> None:
        self.alive = False

    def close(self) -> None:
        self.alive = False
        shutil.rmtree(self.config.folder)


def listed(id: int, host: str, *, learner: bool = False) -> ListedMember:
    return ListedMember(id=id, name=host, peer=f"{host}:2", client=f"{host}:1", learner=learner)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[PlayedProcess]:
    """Return the processes that were started."""
    found: list[PlayedProcess] = []

    class Starter:
        @staticmethod
        def start(config: MemberServiceConfig, *, token: str) -> PlayedProcess:
            found.append(PlayedProcess(config))
            return found[-1]

        @staticmethod
        def found(folder: Path, *, token: str) -> None:
            return None

    monkeypatch.setattr(members_keeper, "MemberProcess", Starter)
    monkeypatch.setattr(members_keeper, "_EVERY_S", 0.0)
    return found


Make = Callable[..., MembersKeeper]


@pytest.fixture
def make(tmp_path: Path, started: list[PlayedProcess]) -> Make:
    """Return a function that makes the keeper of a launcher."""

    def make(host: str, admin: PlayedAdmin, table: MemoryCoordinator) -> MembersKeeper:
        run_dir = tmp_path / host
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        config = KeeperConfig(
            program=Path("/usr/bin/etcd"),
            run_dir=run_dir,
            place=MemberAddress(host=host, listen="127.0.0.1", port=1),
            job="j",
            launchers="jobs/j/launchers/",
            return_s=600,
        )
        keeper: Any = MembersKeeper(config, KEY)
        keeper.token, keeper._admin, keeper._coordinator = "t", admin, table
        return keeper

    return make


def present(table: MemoryCoordinator, *hosts: str, leaving: str = "") -> None:
    for number, host in enumerate(hosts):
        said = LauncherPresence(host=host, leaving=host == leaving)
        table.put(f"jobs/j/launchers/{number}", encode(said))


def test_three_launchers_make_three_voters(make: Make, started: list[PlayedProcess]) -> None:
    admin, table = PlayedAdmin(listed(1, "a")), MemoryCoordinator()
    present(table, "a", "b", "c")
    keepers = [make(host, admin, table) for host in "abc"]
    keepers[0].begin()
    keepers[0].token = "t"

    def start_listed() -> None:
        for each in started:
            host = Path(each.config.folder).parent.name
            for id, member in [*admin.there.items()]:
                if member.machine == host and not member.name:
                    admin.there[id] = listed(id, host, learner=True)

    for _ in range(8):
        for keeper in keepers:
            keeper._turn()
            start_listed()
    assert sorted(each.machine for each in admin.there.values()) == ["a", "b", "c"]
    assert not any(each.learner for each in admin.there.values())
    assert len(started) == 3
    record = read_member(keepers[2].config.folder)
    assert record is not None and record.id == 3
    assert record.endpoints == ("a:1", "b:1", "c:1")
    assert "--initial-cluster=a=https://a:2,b=https://b:2,c=https://c:2" in started[2].config.argv


def test_one_launcher_has_the_turn(make: Make) -> None:
    admin, table = PlayedAdmin(listed(1, "x")), MemoryCoordinator()
    first, second = make("a", admin, table), make("b", admin, table)
    first._turn()
    assert admin.requests == 1
    second._turn()
    assert admin.requests == 1, "the other one only looks"
    assert first._lease is not None
    table.revoke(first._lease)
    first._turn()
    second._turn()
    assert admin.requests == 2


def test_silence_before_its_turn_does_not_count(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin, table = PlayedAdmin(listed(1, "x"), listed(2, "y"), listed(3, "z")), MemoryCoordinator()
    present(table, "x", "y", "w")
    admin.silent.add(3)
    now_s = 1000.0
    monkeypatch.setattr(members_keeper.time, "monotonic", lambda: now_s)
    first = make("a", admin, table)
    first._turn()
    lease = first._lease
    assert lease is not None
    table.revoke(lease)
    now_s += 59
    first._turn()
    for _ in range(12):
        first._turn()
        now_s += 5  # a lease lasts 10 s
    assert 3 in admin.there, "it counts from its new turn"
    first._turn()
    assert 3 not in admin.there
    first._turn()
    assert {each.machine for each in admin.there.values()} == {"x", "y", "w"}


def test_a_member_that_ended_starts_again_also_without_a_majority(
    make: Make, started: list[PlayedProcess]
) -> None:
    admin, table = PlayedAdmin(listed(1, "a")), MemoryCoordinator()
    keeper = make("a", admin, table)
    keeper.begin()
    assert "--initial-cluster-state=new" in started[0].config.argv
    keeper._due_s = 0.0
    keeper._turn()
    started[0].alive = admin.reached = False
    with pytest.raises(CoordinatorError):
        keeper._turn()
    assert len(started) == 2
    assert "--initial-cluster-state=existing" in started[1].config.argv


def test_the_data_of_a_removed_member_goes_and_a_leaver_is_told(make: Make) -> None:
    admin, table = PlayedAdmin(listed(1, "a"), listed(2, "b")), MemoryCoordinator()
    present(table, "a", "b", leaving="a")
    keeper = make("a", admin, table)
    keeper.begin()
    keeper.token = "t"
    keeper.leave()
    keeper._turn()
    assert [each.machine for each in admin.there.values()] == ["b"]
    assert not keeper.handed_over.is_set()
    keeper._turn()
    assert keeper.handed_over.is_set()
    assert not keeper.config.folder.exists()


def test_a_leaver_with_nobody_left_does_not_wait(make: Make) -> None:
    admin, table = PlayedAdmin(listed(1, "a")), MemoryCoordinator()
    present(table, "a", leaving="a")
    keeper = make("a", admin, table)
    keeper.begin()
    keeper.leave()
    keeper._turn()
    assert keeper.handed_over.is_set()


def test_only_the_data_of_the_same_job_key_and_address_is_taken_up(
    make: Make, started: list[PlayedProcess], tmp_path: Path
) -> None:
    admin, table = PlayedAdmin(listed(1, "a")), MemoryCoordinator()
    first = make("a", admin, table)
    assert not first.take_up()
    first.begin()
    token = first.token
    first.close(forget=False)
    second = make("a", admin, table)
    assert second.take_up()
    assert second.token == token and second.known == ("a:1",)
    assert len(started) == 2
    record = read_member(second.config.folder)
    assert record is not None
    other = record.__class__(job="k", authority=record.authority, token="t", endpoint="a:1")
    write_member(second.config.folder, other)
    third = make("a", admin, table)
    assert not third.take_up()
    assert not third.config.folder.exists()
