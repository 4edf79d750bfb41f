"""Security of etcd: only authorised clients get access, and refusals name the cause."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from etcd_control import require_password
from etcd_fixtures import Connect, StartCluster
from etcd_security import Certificates

from holdfast.elastic.errors import ConfigError, CoordinatorError

PASSWORD = "hush-hush"


@pytest.fixture
def password_file(tmp_path: Path) -> Path:
    path = tmp_path / "password"
    path.write_text(f"{PASSWORD}\n")
    return path


def test_certificates_of_both_sides(
    tmp_path: Path, start_etcd: StartCluster, connect_etcd: Connect
) -> None:
    cluster = start_etcd(1, certificates=Certificates.make(tmp_path / "ours"))
    coordinator = connect_etcd(cluster.url)
    lease = coordinator.grant(30)
    revision = coordinator.put("r/a", "1", lease=lease)
    coordinator.keep_alive(lease)
    coordinator.put("r/a", "2")
    events, _ = coordinator.watch("r/", after=revision, timeout_s=10)
    assert [event.value for event in events] == ["2"]
    # neither a stranger's certificate, nor a stranger's authority, nor none at all
    others = Certificates.make(tmp_path / "theirs")
    ours = cluster.certificates
    assert ours is not None
    stranger = f"ca={ours.file('ca.crt')}&" + others.query.partition("&")[2]
    for url, text in (
        (f"etcds://{cluster.endpoints}?{stranger}", "does not answer"),
        (f"etcds://{cluster.endpoints}?{others.query}", "check the ca=FILE"),
        (f"etcd://{cluster.endpoints}", "does not answer"),
    ):
        with pytest.raises(CoordinatorError, match=text):
            connect_etcd(url, timeout_s=1.0).get("r/a")


def test_a_token_that_expired_is_replaced(
    password_file: Path, start_etcd: StartCluster, connect_etcd: Connect
) -> None:
    cluster = start_etcd(1, token_s=1)
    require_password(cluster, user="job", password=PASSWORD, prefix="holdfast/")
    url = f"etcd://job@{cluster.endpoints}?password={password_file}"
    coordinator, watching = connect_etcd(url), connect_etcd(url)
    revision = coordinator.put("r/a", "1")
    assert watching.watch("r/", after=revision - 1, timeout_s=10)[0][0].value == "1"
    lease = coordinator.grant(60)
    time.sleep(2.5)  # tokens end by time alone
    assert coordinator.compare_and_set("r/a", "2", expected=revision, lease=lease)
    coordinator.keep_alive(lease)
    events, after = watching.watch("r/", after=revision, timeout_s=10)
    assert [event.value for event in events] == ["2"]
    time.sleep(2.5)
    coordinator.put("r/b", "3")
    again = connect_etcd(url)
    for one in (watching, again):  # a stream that stands, and a new one
        assert [e.value for e in one.watch("r/", after=after, timeout_s=10)[0]] == ["3"]
    time.sleep(2.5)
    assert [e.value for e in again.watch("r/b", after=after, timeout_s=10)[0]] == ["3"]


def test_a_member_that_restarted_has_forgotten_all_tokens(
    password_file: Path, start_etcd: StartCluster, connect_etcd: Connect
) -> None:
    cluster = start_etcd(1)
    require_password(cluster, user="job", password=PASSWORD, prefix="holdfast/")
    coordinator = connect_etcd(f"etcd://job@{cluster.endpoints}?password={password_file}")
    revision = coordinator.put("r/a", "1")
    cluster.stop()
    cluster.start()
    entry = coordinator.get("r/a")
    assert entry is not None and entry.revision == revision
    coordinator.put("r/a", "2")
    events, _ = coordinator.watch("r/", after=revision, timeout_s=10)
    assert [event.value for event in events] == ["2"]


def test_authentication_may_be_turned_on_later(
    password_file: Path, start_etcd: StartCluster, connect_etcd: Connect
) -> None:
    cluster = start_etcd(1)
    coordinator = connect_etcd(f"etcd://job@{cluster.endpoints}?password={password_file}")
    coordinator.put("r/a", "1")
    require_password(cluster, user="job", password=PASSWORD, prefix="holdfast/")
    assert coordinator.get("r/a") is not None


def test_who_may_not_is_told_what_to_do(
    tmp_path: Path, password_file: Path, start_etcd: StartCluster, connect_etcd: Connect
) -> None:
    cluster = start_etcd(1)
    require_password(cluster, user="job", password=PASSWORD, prefix="holdfast/")
    wrong = tmp_path / "wrong"
    wrong.write_text("guess")
    place = cluster.endpoints
    for url, text in (
        (f"etcd://{place}", "it wants a user"),
        (f"etcd://job@{place}?password={wrong}", "check user and password file"),
        (f"etcd://job@{place}/elsewhere?password={password_file}", "grant the user's role"),
    ):
        coordinator = connect_etcd(url)
        for call in (
            lambda one=coordinator: one.get("r/a"),
            lambda one=coordinator: one.watch("r/", after=0, timeout_s=10),
        ):
            with pytest.raises(CoordinatorError, match=text):
                call()
    with pytest.raises(ConfigError, match="needs this file on every node"):
        connect_etcd(f"etcd://job@{place}?password={tmp_path / 'absent'}")
