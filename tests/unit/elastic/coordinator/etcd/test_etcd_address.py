"""Addresses of etcd contain credentials, places and files; errors name the fault."""

from __future__ import annotations

import pytest

from holdfast.elastic.coordinator.connecting import is_etcd, is_managed
from holdfast.elastic.coordinator.etcd.address import EtcdAddress
from holdfast.elastic.errors import ConfigError


def test_members_and_defaults() -> None:
    address = EtcdAddress.parse("etcd://a:1,b,[::1]:2,[::1]")
    assert address.endpoints == ("a:1", "b:2379", "[::1]:2", "[::1]:2379")
    assert address.prefix == "holdfast/"
    assert not address.secure
    assert str(address) == "etcd at a:1,b:2379,[::1]:2,[::1]:2379"


def test_everything_that_can_be_said() -> None:
    url = "etcds://job%40lab@a:1/team/jobs/?password=/p&ca=/ca%20x&cert=/c&key=/k"
    assert EtcdAddress.parse(url) == EtcdAddress(
        endpoints=("a:1",),
        prefix="team/jobs/",
        secure=True,
        user="job@lab",
        password="/p",
        ca="/ca x",
        cert="/c",
        key="/k",
    )


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("http://a:1", "write etcd://HOST:PORT"),
        ("etcd://", "write etcd://HOST:PORT"),
        ("a:1", "write etcd://HOST:PORT"),
        ("etcd://a:1,", "'' is not HOST:PORT"),
        ("etcd://a:0", "'a:0' is not HOST:PORT"),
        ("etcd://a:b", "'a:b' is not HOST:PORT"),
        ("etcd://a:65536", "is not HOST:PORT"),
        ("etcd://:2379", "is not HOST:PORT"),
        ("etcd://a:1?colour=red", "no option 'colour'; there are password, ca, cert, key"),
        ("etcd://u@a:1", "both a user and the file"),
        ("etcd://a:1?password=/p", "both a user and the file"),
        ("etcds://a:1?cert=/c", "needs its key"),
        ("etcd://a:1?ca=/ca", "write etcds://"),
    ],
)
def test_what_is_wrong_is_said(url: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        EtcdAddress.parse(url)


def test_a_password_in_the_address_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError, match="which others could read") as caught:
        EtcdAddress.parse("etcd://job:secret@a:1")
    assert "secret" not in str(caught.value)


def test_no_members_are_no_address() -> None:
    with pytest.raises(ConfigError, match="no etcd member"):
        EtcdAddress(endpoints=())


def test_what_is_an_address_of_etcd() -> None:
    assert is_etcd("etcd://a") and is_etcd("etcds://a")
    assert not is_etcd("tcp://127.0.0.1:1") and not is_etcd("etcd")


def test_a_managed_etcd_is_named_by_machines_and_a_cluster_by_its_token() -> None:
    address = EtcdAddress.parse("managed://a,b:1/token")
    assert (address.endpoints, address.token) == (("a:29400", "b:1"), "token")
    assert address.secure and address.managed and not address.exposed
    assert EtcdAddress.parse("managed://a").token == ""
    assert is_etcd("managed://a") and is_managed("managed://a") and not is_managed("etcd://a")
    for wrong in ("managed://", "managed://u@a", "managed://a?ca=f", "managed://a/b/c"):
        with pytest.raises(ConfigError, match="write managed://HOST"):
            EtcdAddress.parse(wrong)
