"""The command line of an etcd member: TLS on both sides, and no secret."""

from __future__ import annotations

from pathlib import Path

from holdfast.elastic.coordinator.managed.command import MemberAddress, member_command

PLACE = MemberAddress(host="head", listen="10.0.0.1", port=29400)


def options(**given: dict[str, str]) -> dict[str, str]:
    argv = member_command(Path("/usr/bin/etcd"), PLACE, Path("/run/etcd"), token="t", **given)
    assert argv[0] == "/usr/bin/etcd"
    return dict(word.removeprefix("--").split("=", 1) for word in argv[1:])


def test_a_first_member_begins_a_cluster() -> None:
    found = options()
    assert found["initial-cluster-state"] == "new"
    assert found["initial-cluster"] == "head=https://head:29401"
    assert found["listen-client-urls"] == "https://10.0.0.1:29400"
    assert found["advertise-client-urls"] == "https://head:29400"


def test_a_later_one_names_the_others() -> None:
    found = options(others={"b": "b:29401"})
    assert found["initial-cluster-state"] == "existing"
    assert found["initial-cluster"] == "b=https://b:29401,head=https://head:29401"


def test_clients_and_members_show_certificates_to_each_other() -> None:
    found = options()
    for side in ("", "peer-"):
        assert found[f"{side}client-cert-auth"] == "true"
        for name in ("cert-file", "key-file", "trusted-ca-file"):
            assert found[side + name].startswith("/run/etcd/")
    assert not [text for text in found.values() if "http://" in text]
