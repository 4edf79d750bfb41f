"""IPv6 is refused at once and by name, and what travels in clear is known."""

from __future__ import annotations

import logging
import socket
from pathlib import Path
from typing import Any

import pytest

from holdfast.ckpt.transport import RunKey
from holdfast.elastic.addresses import checked_host, is_this_machine, own_addresses
from holdfast.elastic.channel.launched import bindable
from holdfast.elastic.coordinator import connecting
from holdfast.elastic.coordinator.etcd.address import EtcdAddress
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.rendezvous.link import CoordinatorPlace


@pytest.mark.parametrize("host", ["::1", "[::1]", "fd00::7", "[fd00::7]"])
def test_an_ipv6_address_is_refused_by_the_option_that_gave_it(host: str) -> None:
    with pytest.raises(ConfigError, match=r"--host .*does not speak IPv6; give an IPv4"):
        checked_host(host, given="--host")


@pytest.mark.parametrize("endpoint", ["[::1]:29400", "[::1]", "::1", "fd00::7:29400"])
def test_an_ipv6_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"endpoint .*does not speak IPv6"):
        CoordinatorPlace.parse(endpoint)


def test_a_name_with_ipv6_addresses_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(host: str, port: Any, family: Any) -> list[int]:
        if host == "gone" or family == socket.AF_INET:
            raise socket.gaierror("no address")
        return [1]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    with pytest.raises(ConfigError, match=r"MASTER_ADDR six: Holdfast does not speak IPv6"):
        checked_host("six", given="MASTER_ADDR")
    assert checked_host("gone", given="MASTER_ADDR") == "gone", "the name server may be away"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "10.0.0.7"])
def test_ipv4_is_taken(host: str) -> None:
    assert checked_host(host, given="--host") == host


def test_a_name_of_this_machine_that_means_the_loopback_is_served_on_all_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "gethostbyname", {"n7": "127.0.1.1", "n8": "10.0.0.8"}.get)
    assert (bindable("n7"), bindable("n8")) == ("*", "10.0.0.8")


@pytest.mark.parametrize(
    ("url", "exposed"),
    [
        ("etcd://127.0.0.1:2379", False),
        ("etcd://localhost", False),
        ("etcd://[::1]:2379", False),
        ("etcd://127.0.0.1:2379,10.0.0.7:2379", True),
        ("etcd://etcd.example.org", True),
        ("etcds://etcd.example.org", False),
    ],
)
def test_plain_etcd_beyond_the_loopback_is_known(url: str, exposed: bool) -> None:
    assert EtcdAddress.parse(url).exposed is exposed


def test_it_is_told_once_with_the_way_to_tls(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("grpc")
    connecting._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            connecting.connect("etcd://192.0.2.1:2379", RunKey.new()).close()
    assert caplog.text.count("without TLS") == 1
    assert "etcds://" in caplog.text
    assert is_this_machine("127.0.0.5")


def test_the_machines_own_addresses_come_from_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "127.0.0.1" in own_addresses()
    trie = """Local:
  +-- 0.0.0.0/0 3 0 5
     |-- 10.1.2.0
        /24 link UNICAST
     |-- 10.1.2.3
        /32 host LOCAL
     |-- 10.1.2.255
        /32 link BROADCAST
"""
    monkeypatch.setattr(Path, "read_text", lambda self: trie)
    assert own_addresses() == ("10.1.2.3", "127.0.0.1")


def test_without_the_kernels_table_the_loopback_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: Path) -> str:
        raise PermissionError

    monkeypatch.setattr(Path, "read_text", refused)
    assert own_addresses() == ("127.0.0.1",)
