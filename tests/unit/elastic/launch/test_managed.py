"""The launcher that begins the job's etcd, and the address of its member."""

from __future__ import annotations

from pathlib import Path

import pytest
from doubles.memory_coordinator import MemoryCoordinator

from holdfast.ckpt.transport import RunKey
from holdfast.elastic.coordinator.managed.command import MemberAddress
from holdfast.elastic.launch.config import LaunchConfig, NodeSpec
from holdfast.elastic.launch.joint import JointConfig
from holdfast.elastic.launch.managed import ManagedLauncher, founds
from holdfast.elastic.rendezvous.link import CoordinatorPlace

FAR = "192.0.2.200"


@pytest.mark.parametrize(
    ("first", "host", "may_host", "begins"),
    [
        ("127.0.0.2", "127.0.0.2", None, True),
        ("127.0.0.2", "127.0.0.3", None, False),
        ("127.0.0.2", "", None, True),
        (FAR, "", None, False),
        (FAR, "127.0.0.1", None, False),
        (FAR, "", True, True),
        ("127.0.0.2", "", False, False),
    ],
)
def test_the_first_host_begins(first: str, host: str, may_host: bool | None, begins: bool) -> None:
    assert founds(first, host, told=may_host) is begins


def launcher(run_dir: Path, url: str, *, joins: bool = False, host: str = "") -> ManagedLauncher:
    return ManagedLauncher(
        LaunchConfig(
            command=("true",),
            nodes=(NodeSpec(name="node0", slots={}),),
            wanted={},
            run_dir=run_dir,
            return_s=60,
        ),
        JointConfig(
            place=CoordinatorPlace.parse(url, may_host=False if joins else None),
            key_file=run_dir / "shared" / "key.json",
            joins=joins,
            host=host,
        ),
        program=Path("/usr/bin/etcd"),
    )


def test_a_member_is_at_the_given_host_and_at_the_port_of_the_address(tmp_path: Path) -> None:
    found = launcher(tmp_path, "managed://127.0.0.2:1,127.0.0.3", joins=True, host="127.0.0.3")
    assert found._keeper_config.place == MemberAddress(host="127.0.0.3", listen="127.0.0.3", port=1)
    assert not found._may_begin()
    assert found._bind() == ""


def test_the_one_that_begins_is_found_where_the_address_says(tmp_path: Path) -> None:
    found = launcher(tmp_path, "managed://localhost:1")
    assert found._keeper_config.place == MemberAddress(host="localhost", listen="127.0.0.1", port=1)
    assert found._may_begin()


def test_a_member_outlives_only_a_launcher_with_a_run_directory(tmp_path: Path) -> None:
    found = launcher(tmp_path, "managed://127.0.0.2")
    assert found._keeper_config.return_s == 60
    assert found._keeper_config.folder == tmp_path / "etcd"


def test_its_presence_names_the_member_that_it_can_run(tmp_path: Path) -> None:
    found = launcher(tmp_path, "managed://127.0.0.2", host="127.0.0.2")
    assert found._presence_record() == '{"host":"127.0.0.2","leaving":false}'
    found._hand_over_by_s = 1.0
    assert found._presence_record() == '{"host":"127.0.0.2","leaving":true}'


def test_all_its_connections_are_to_the_cluster_that_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[str] = []

    def connect(url: str, key: RunKey, *, timeout_s: float) -> MemoryCoordinator:
        requests.append(url)
        return MemoryCoordinator()

    class Ended(Exception):
        pass

    def end(self: ManagedLauncher) -> None:
        raise Ended

    monkeypatch.setattr("holdfast.elastic.launch.joint.connect", connect)
    monkeypatch.setattr("holdfast.elastic.launch.members_keeper.connect", connect)
    monkeypatch.setattr(ManagedLauncher, "_find", lambda self: ("t",))
    monkeypatch.setattr(ManagedLauncher, "_job", end)
    found = launcher(tmp_path, "managed://127.0.0.2:1", joins=True, host="127.0.0.3")
    with pytest.raises(Ended):
        found._connect()
    assert {*requests, found.coordinator_address} == {"managed://127.0.0.2:1/t"}
