"""etcd members are killed, stopped and cut off; no acknowledged write and no change is lost."""

from __future__ import annotations

import signal
import time

import pytest
from etcd import Cluster, Member
from etcd_control import compact, leader_of
from etcd_fixtures import Connect, StartCluster
from etcd_history import History
from wire import Wire

from holdfast.elastic.coordinator.base import Coordinator, EventKind
from holdfast.elastic.errors import CoordinatorError, LeaseExpiredError

TIMEOUT_S = 5.0


def _await(coordinator: Coordinator) -> None:
    """Wait until the store answers again."""
    deadline_s = time.monotonic() + 60
    while True:
        try:
            coordinator.get("ready")
            return
        except CoordinatorError:
            assert time.monotonic() < deadline_s


def _first(cluster: Cluster, member: Member) -> str:
    """Return an address whose connections begin at ``member``."""
    others = [other.endpoint for other in cluster.members if other is not member]
    return "etcd://" + ",".join([member.endpoint, *others])


def test_the_leader_is_killed_twice(start_etcd: StartCluster, connect_etcd: Connect) -> None:
    cluster = start_etcd(3)
    with History(lambda: connect_etcd(cluster.url, timeout_s=TIMEOUT_S)) as history:
        for _ in range(2):
            history.goes_on()
            leader = leader_of(cluster)
            leader.kill()
            history.goes_on()
            cluster.start()
        history.goes_on()


@pytest.mark.exhaustive
def test_every_member_is_restarted_in_turn(start_etcd: StartCluster, connect_etcd: Connect) -> None:
    cluster = start_etcd(3)
    with History(lambda: connect_etcd(cluster.url, timeout_s=TIMEOUT_S)) as history:
        for member in cluster.members:
            history.goes_on()
            member.kill()
            cluster.start()
        history.goes_on()


def test_all_members_are_down_and_come_back(
    start_etcd: StartCluster, connect_etcd: Connect
) -> None:
    cluster = start_etcd(3)
    with History(lambda: connect_etcd(cluster.url, timeout_s=0.5)) as history:
        patient = connect_etcd(cluster.url)
        coordinator = connect_etcd(cluster.url, timeout_s=0.5)
        lease = patient.grant(30)
        patient.put("leased", "1", lease=lease)
        history.goes_on()
        cluster.stop()
        for call in (lambda: coordinator.get("leased"), lambda: coordinator.keep_alive(lease)):
            with pytest.raises(CoordinatorError, match="a majority of its members runs"):
                call()
        cluster.start()
        history.goes_on()
        _await(coordinator)
        patient.keep_alive(lease)
        entry = patient.get("leased")
        assert entry is not None and entry.lease == lease


def test_one_member_alone_is_killed_and_comes_back(
    start_etcd: StartCluster, connect_etcd: Connect
) -> None:
    cluster = start_etcd(1)
    with History(lambda: connect_etcd(cluster.url, timeout_s=1.0)) as history:
        for _ in range(2):
            history.goes_on()
            cluster.stop()
            cluster.start()
        history.goes_on()


def test_a_member_that_hangs_is_left(start_etcd: StartCluster, connect_etcd: Connect) -> None:
    cluster = start_etcd(3)
    follower = next(m for m in cluster.members if m is not leader_of(cluster))
    with History(lambda: connect_etcd(_first(cluster, follower), timeout_s=1.0)) as history:
        history.goes_on()
        follower.signal(signal.SIGSTOP)
        history.goes_on()
        coordinator = connect_etcd(_first(cluster, follower), timeout_s=1.0)
        assert coordinator.get("absent") is None, "a read goes to the next member by itself"
        history.catches_up()
        follower.signal(signal.SIGCONT)
        history.goes_on()


def test_a_leader_that_hangs_is_replaced(start_etcd: StartCluster, connect_etcd: Connect) -> None:
    cluster = start_etcd(3)
    leader = leader_of(cluster)
    with History(lambda: connect_etcd(_first(cluster, leader), timeout_s=1.0)) as history:
        history.goes_on()
        leader.signal(signal.SIGSTOP)
        history.goes_on()
        history.catches_up()
        leader.signal(signal.SIGCONT)
        history.goes_on()


def test_a_cut_connection_is_left_for_another_member(
    start_etcd: StartCluster, connect_etcd: Connect
) -> None:
    cluster = start_etcd(3)
    wire = Wire(cluster.members[0].endpoint)
    url = f"etcd://{wire.endpoint},{cluster.members[1].endpoint}"
    with History(lambda: connect_etcd(url, timeout_s=1.0)) as history:
        history.goes_on()
        wire.cut()
        history.goes_on()
        history.catches_up()
        wire.mend()
        history.goes_on()
    wire.close()


def test_the_only_connection_is_cut_and_mended(
    start_etcd: StartCluster, connect_etcd: Connect
) -> None:
    cluster = start_etcd(1)
    wire = Wire(cluster.endpoints)
    with History(lambda: connect_etcd(f"etcd://{wire.endpoint}", timeout_s=0.5)) as history:
        history.goes_on()
        wire.cut()
        failures = len(history.failures)
        while len(history.failures) < failures + 3:
            time.sleep(0.01)
        wire.mend()
        history.goes_on()
    wire.close()


def test_a_member_without_majority_does_not_answer_from_memory(
    start_etcd: StartCluster, connect_etcd: Connect
) -> None:
    cluster = start_etcd(3)
    alone, *others = cluster.members
    patient = connect_etcd(f"etcd://{alone.endpoint}")
    coordinator = connect_etcd(f"etcd://{alone.endpoint}", timeout_s=1.0)
    revision = patient.put("r/a", "1")
    _await(coordinator)
    assert coordinator.watch("r/", after=revision, timeout_s=0) == ([], revision)
    for other in others:
        other.signal(signal.SIGSTOP)
    with pytest.raises(CoordinatorError):
        coordinator.get("r/a")
    deadline_s = time.monotonic() + 30
    with pytest.raises(CoordinatorError):  # the watch is not silent for ever
        while time.monotonic() < deadline_s:
            coordinator.watch("r/", after=revision, timeout_s=1.0)
    for other in others:
        other.signal(signal.SIGCONT)
    _await(coordinator)
    patient.put("r/a", "2")
    events, _ = patient.watch("r/", after=revision, timeout_s=10)
    assert [event.value for event in events] == ["2"]


def test_a_write_without_an_answer_is_done_once_or_not_at_all(
    start_etcd: StartCluster, connect_etcd: Connect
) -> None:
    cluster = start_etcd(1)
    patient = connect_etcd(cluster.url)
    coordinator = connect_etcd(cluster.url, timeout_s=0.5)
    revision = patient.put("r/a", "first")
    _await(coordinator)
    cluster.members[0].signal(signal.SIGSTOP)
    with pytest.raises(CoordinatorError, match="DEADLINE_EXCEEDED"):
        coordinator.put("r/a", "second")
    cluster.members[0].signal(signal.SIGCONT)
    _await(coordinator)  # by the connection of the write: what comes next is behind it
    patient.put("r/end", "")
    values, after = [], revision
    while "" not in values:
        events, after = patient.watch("r/", after=after, timeout_s=10)
        values += [event.value for event in events]
    assert values in (["second", ""], [""])


def test_compaction_passes_a_watch(start_etcd: StartCluster, connect_etcd: Connect) -> None:
    cluster = start_etcd(1)
    coordinator = connect_etcd(cluster.url)
    old = coordinator.put("r/a", "1")
    for number in range(5):
        newest = coordinator.put("r/a", str(number))
    compact(cluster, newest)
    events, after = coordinator.watch("r/", after=old, timeout_s=5)
    assert [event.kind for event in events] == [EventKind.RESET]
    assert after == newest
    entries, after = coordinator.range("r/")
    assert [entry.value for entry in entries] == ["4"]
    coordinator.put("r/a", "5")
    events, _ = coordinator.watch("r/", after=after, timeout_s=5)
    assert [event.value for event in events] == ["5"]


def test_compaction_does_not_disturb_a_watch_that_keeps_up(
    start_etcd: StartCluster, connect_etcd: Connect
) -> None:
    cluster = start_etcd(1)
    with History(lambda: connect_etcd(cluster.url)) as history:
        for _ in range(3):
            history.goes_on()
            compact(cluster, history.seen())


def test_a_lease_outlives_its_leader_and_ends_without_its_holder(
    start_etcd: StartCluster, connect_etcd: Connect
) -> None:
    cluster = start_etcd(3)
    coordinator = connect_etcd(cluster.url, timeout_s=TIMEOUT_S)
    kept, left = coordinator.grant(2), coordinator.grant(2)
    coordinator.put("r/kept", "1", lease=kept)
    revision = coordinator.put("r/left", "1", lease=left)
    leader_of(cluster).kill()
    deadline_s, gone = time.monotonic() + 60, False
    while not gone:
        coordinator.keep_alive(kept)
        events, revision = coordinator.watch("r/", after=revision, timeout_s=0.2)
        gone = any((e.kind, e.key) == (EventKind.DELETE, "r/left") for e in events)
        assert time.monotonic() < deadline_s
    assert coordinator.get("r/kept") is not None
    with pytest.raises(LeaseExpiredError):
        coordinator.keep_alive(left)
