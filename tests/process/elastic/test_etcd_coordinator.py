"""The coordinator on etcd: the suite of all coordinators, and etcd's own cases."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from coordinator_conformance import CoordinatorConformance
from etcd_control import write_bytes
from etcd_fixtures import Connect, StartCluster

from holdfast.elastic.coordinator.base import Coordinator
from holdfast.elastic.errors import CoordinatorError


class TestEtcd(CoordinatorConformance):
    @pytest.fixture
    def coordinator(self, etcd_place: str, connect_etcd: Connect) -> Coordinator:
        return connect_etcd(etcd_place)


def test_runs_of_different_prefixes_do_not_see_each_other(
    etcd_place: str, connect_etcd: Connect
) -> None:
    one, two = connect_etcd(f"{etcd_place}/one"), connect_etcd(f"{etcd_place}/two")
    revision = one.put("r/a", "1")
    assert two.get("r/a") is None
    assert two.range("")[0] == []
    assert two.watch("", after=revision - 1, timeout_s=0) == ([], revision - 1)
    assert [entry.key for entry in one.range("")[0]] == ["r/a"]


def test_a_value_too_large_is_refused_with_the_way_out(
    etcd_place: str, connect_etcd: Connect
) -> None:
    with pytest.raises(CoordinatorError, match="raise its --max-request-bytes"):
        connect_etcd(etcd_place).put("r/a", "x" * (2 << 20))


def test_what_others_wrote_under_the_prefix_is_refused(
    etcd_place: str, connect_etcd: Connect
) -> None:
    ours = connect_etcd(etcd_place)
    revision = ours.put("r/a", "1")
    write_bytes(etcd_place, "r/b", b"\xff\xfe")
    for call in (
        lambda: ours.get("r/b"),
        lambda: ours.range("r/"),
        lambda: ours.watch("r/", after=revision, timeout_s=10),
    ):
        with pytest.raises(CoordinatorError, match="choose a prefix"):
            call()


def test_a_large_range_comes_whole(etcd_place: str, connect_etcd: Connect) -> None:
    coordinator = connect_etcd(etcd_place)
    for number in range(6):  # more than gRPC takes by default
        coordinator.put(f"r/{number}", str(number) * (1 << 20))
    assert [entry.value[0] for entry in coordinator.range("r/")[0]] == list("012345")


def test_nobody_there_is_said_within_the_deadline(connect_etcd: Connect) -> None:
    coordinator = connect_etcd("etcd://127.0.0.1:1,127.0.0.1:2", timeout_s=0.5)
    for call in (
        lambda: coordinator.get("r/a"),
        lambda: coordinator.grant(1),
        lambda: coordinator.put("r/a", "1"),
        lambda: coordinator.watch("r/", after=0, timeout_s=0),
    ):
        with pytest.raises(CoordinatorError, match=r"etcd at 127\.0\.0\.1:1,127\.0\.0\.1:2 does"):
            call()


def test_a_closed_connection_says_so(etcd_place: str, connect_etcd: Connect) -> None:
    coordinator = connect_etcd(etcd_place)
    coordinator.put("r/a", "1")
    coordinator.close()
    for call in (
        lambda: coordinator.get("r/a"),
        lambda: coordinator.watch("r/", after=0, timeout_s=5),
    ):
        with pytest.raises(CoordinatorError, match="closed"):
            call()


def test_closing_ends_a_watch_of_another_thread(etcd_place: str, connect_etcd: Connect) -> None:
    coordinator = connect_etcd(etcd_place)
    revision = coordinator.put("r/a", "1")
    assert coordinator.watch("r/", after=revision, timeout_s=0) == ([], revision)
    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(coordinator.watch, "r/", after=revision, timeout_s=100)
        while watching.running() is False:
            time.sleep(0.001)
        coordinator.close()
        with pytest.raises(CoordinatorError, match="this connection is closed"):
            watching.result(30)


def test_a_member_that_was_down_is_passed_over(
    start_etcd: StartCluster, connect_etcd: Connect
) -> None:
    cluster = start_etcd(1)
    coordinator = connect_etcd(f"etcd://127.0.0.1:1,{cluster.endpoints},127.0.0.1:2")
    assert coordinator.compare_and_set("r/a", "1", expected=0), "not even a write notices"


def test_processes_can_be_started_beside_busy_connections(
    etcd_place: str, connect_etcd: Connect, capfd: pytest.CaptureFixture[str]
) -> None:
    coordinator, over = connect_etcd(etcd_place), threading.Event()

    def work() -> None:
        while not over.is_set():
            coordinator.get("r/a")

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(30):  # with a function between fork and exec, Python really forks
            subprocess.run(["true"], preexec_fn=lambda: None, check=True)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert "fork" not in capfd.readouterr().err
    assert "GRPC_ENABLE_FORK_SUPPORT" not in os.environ


def test_what_workers_import_leaves_protobuf_alone() -> None:
    script = (
        "import sys, holdfast.elastic.coordinator.connecting\n"
        "assert not {'grpc', 'aetcd', 'etcd3'} & set(sys.modules), 'a client of etcd'\n"
        "from google.protobuf.internal import api_implementation\n"
        "print(api_implementation.Type())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "upb"
