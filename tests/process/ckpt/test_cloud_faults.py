"""The stores of obstore under faults of a proxy, on real sockets, before a server.

Each operation survives passing faults, and fails clearly within its deadline under permanent ones.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator

import pytest
from service_fixtures import CloudPlace
from typing_extensions import Buffer

from holdfast.ckpt.errors import NotFoundError, StoreError
from holdfast.ckpt.store.cloud.calls import CloudConnection
from holdfast.ckpt.store.cloud.config import AZURE
from holdfast.ckpt.store.cloud.store import CloudStore
from holdfast.ckpt.testing.http_faults import FaultProxy, HttpFault, HttpFaultRule, faulty

MIB = 1 << 20
LARGE = os.urandom(11 * MIB + 77)
FOREVER = 10**9
PASSING = [
    HttpFaultRule(pattern="", fault=HttpFault.REFUSE, times=3, status=500, code="InternalError"),
    HttpFaultRule(pattern="", fault=HttpFault.REFUSE, times=3, status=503, code="ServerBusy"),
    HttpFaultRule(pattern="", fault=HttpFault.REFUSE, times=3, status=429, code="SlowDown"),
    HttpFaultRule(pattern="", fault=HttpFault.RESET_BEFORE, times=3),
    HttpFaultRule(pattern="", fault=HttpFault.RESET_DURING, times=3),
    HttpFaultRule(pattern="", fault=HttpFault.LOSE_REPLY, times=3),
]
LASTING = [
    HttpFaultRule(pattern="", fault=HttpFault.REFUSE, times=FOREVER, status=503, code="ServerBusy"),
    HttpFaultRule(pattern="", fault=HttpFault.RESET_BEFORE, times=FOREVER),
    HttpFaultRule(pattern="", fault=HttpFault.STALL, times=FOREVER),
]


@pytest.fixture
def proxy(cloud_place: CloudPlace) -> Iterator[FaultProxy]:
    with faulty(cloud_place.endpoint) as running:
        yield running


@pytest.fixture
def direct(cloud_place: CloudPlace) -> CloudStore:
    """The same files, without faults."""
    return CloudStore(cloud_place.url, cloud_place.config())


def through(place: CloudPlace, proxy: FaultProxy, **changes: float) -> CloudStore:
    changes = {"stall_s": 2.0, "deadline_s": 20.0, "pause_s": 0.005} | changes
    return CloudStore(place.url, place.through(proxy.endpoint).config(**changes))


def read_large(store: CloudStore) -> None:
    file, room = store.open("d/large"), bytearray(len(LARGE))
    assert file.read_into([memoryview(room)[: 5 * MIB], memoryview(room)[5 * MIB :]], 0) == len(
        LARGE
    )
    assert room == LARGE


def replace_small(store: CloudStore) -> None:
    version = store.fetch("d/small")[1]
    assert store.replace("d/small", b"second", expected=version)
    assert store.read("d/small") == b"second"
    store.write("d/small", [b"small"])


def create(store: CloudStore) -> None:
    assert store.replace("d/created", b"created", expected=None)
    assert not store.replace("d/created", b"other", expected=None)
    store.delete(["d/created"])


def write_large(store: CloudStore) -> None:
    assert store.write("new", [LARGE]) == len(LARGE)


OPERATIONS: dict[str, Callable[[CloudStore], object]] = {
    "names": lambda store: store.names("d") == ["large", "small"] or 1 / 0,
    "size": lambda store: store.size("d/small") == 5 or 1 / 0,
    "no size": lambda store: store.size("d/none") is None or 1 / 0,
    "read": lambda store: store.read("d/small") == b"small" or 1 / 0,
    "read large": read_large,
    "write": lambda store: store.write("new", [b"12", b"3"]) == 3 or 1 / 0,
    "write large": write_large,
    "replace": replace_small,
    "create": create,
    "delete": lambda store: store.delete(["new"]),
}


def filled(store: CloudStore) -> CloudStore:
    store.write("d/small", [b"small"])
    store.write("d/large", [LARGE])
    assert store.replace("e/g", b"x", expected=None)  # the server has shown its conditions
    return store


@pytest.mark.parametrize("rule", PASSING, ids=lambda rule: f"{rule.fault.name} {rule.status}")
def test_every_operation_survives_what_passes(
    cloud_place: CloudPlace, proxy: FaultProxy, direct: CloudStore, rule: HttpFaultRule
) -> None:
    store = filled(through(cloud_place, proxy))
    for name, operation in OPERATIONS.items():
        proxy.set(rule)
        operation(store)
        assert proxy.hits or rule.fault is HttpFault.RESET_DURING, name
        if name == "write large":
            assert direct.read("new") == LARGE
    assert direct.names("") == ["d", "e"]


def test_a_server_that_stalls_once_is_asked_again(
    cloud_place: CloudPlace, proxy: FaultProxy
) -> None:
    store = filled(through(cloud_place, proxy, stall_s=0.5))
    for operation in OPERATIONS.values():
        proxy.set(HttpFaultRule(pattern="", fault=HttpFault.STALL))
        operation(store)
        assert proxy.hits


@pytest.mark.parametrize("rule", LASTING, ids=lambda rule: rule.fault.name)
def test_every_operation_fails_clearly_and_in_time(
    cloud_place: CloudPlace, proxy: FaultProxy, direct: CloudStore, rule: HttpFaultRule
) -> None:
    filled(direct)
    store = through(cloud_place, proxy, stall_s=0.2, deadline_s=0.6)
    for operation in OPERATIONS.values():
        proxy.set(rule)
        start_s = time.monotonic()
        with pytest.raises(StoreError, match=rf"{cloud_place.url}/.*tried \d+ times") as caught:
            operation(store)
        assert time.monotonic() - start_s < 60
        for secret in cloud_place.secrets:
            assert secret not in str(caught.value)
        assert "then try again" in str(caught.value)


def test_a_lost_reply_to_any_request_of_a_write_does_no_harm(
    cloud_place: CloudPlace, proxy: FaultProxy, direct: CloudStore
) -> None:
    store = through(cloud_place, proxy)
    for number in itertools.count(1):
        proxy.set(HttpFaultRule(pattern="", fault=HttpFault.LOSE_REPLY, first=number))
        data = [LARGE, str(number).encode()]
        store.write("f", data)
        assert direct.read("f") == b"".join(data)
        if not proxy.hits:
            break
    assert number > 4  # three parts, complete


def test_a_lost_reply_to_any_request_of_a_commit_does_no_harm(
    cloud_place: CloudPlace, proxy: FaultProxy, direct: CloudStore
) -> None:
    for number in itertools.count(1):
        # a connection of its own asks the server again how it takes conditions
        store = through(cloud_place, proxy, stall_s=2.0 + number / 100)
        proxy.set(HttpFaultRule(pattern="", fault=HttpFault.LOSE_REPLY, first=number))
        name = f"d/{number}"
        assert store.replace(name, b"ours", expected=None)
        assert store.replace(name, b"ours again", expected=direct.fetch(name)[1])
        assert not store.replace(name, b"too late", expected=None)
        assert direct.read(name) == b"ours again"
        if not proxy.hits:
            break
    assert len(direct.names("d")) == number > 6


def test_a_commit_that_was_overtaken_is_not_taken_for_done(
    cloud_place: CloudPlace, proxy: FaultProxy, direct: CloudStore
) -> None:
    store = filled(through(cloud_place, proxy))
    _, version = direct.fetch("d/small")
    assert direct.replace("d/small", b"theirs", expected=version)
    proxy.set(HttpFaultRule(pattern="PUT", fault=HttpFault.RESET_BEFORE, times=2))
    assert not store.replace("d/small", b"ours", expected=version)
    assert len(proxy.hits) == 2
    assert direct.read("d/small") == b"theirs"


def test_a_server_that_ignores_conditions_is_refused_before_anything_is_committed(
    cloud_place: CloudPlace, proxy: FaultProxy, direct: CloudStore
) -> None:
    if cloud_place.provider is AZURE:
        pytest.skip("Azure signs the conditions: no proxy can drop them")
    proxy.set(HttpFaultRule(pattern="", fault=HttpFault.FORGET_CONDITIONS, times=FOREVER))
    with pytest.raises(StoreError, match=r"/f: the server ignores .*use a server with"):
        through(cloud_place, proxy).replace("f", b"x", expected=None)
    assert direct.names("") == []


def test_a_read_goes_on_where_it_was_cut_off(cloud_place: CloudPlace, proxy: FaultProxy) -> None:
    store = filled(through(cloud_place, proxy, threads=1))
    file, room = store.open("d/large"), bytearray(8 * MIB)
    proxy.set(HttpFaultRule(pattern="GET", fault=HttpFault.TRUNCATE, times=3))
    assert file.read_into([room], 1000) == len(room)
    assert room == LARGE[1000 : 1000 + 8 * MIB]


def test_a_reply_that_comes_too_slowly_ends_in_time(
    cloud_place: CloudPlace, proxy: FaultProxy, direct: CloudStore
) -> None:
    direct.write("d/some", [LARGE[:200_000]])
    store = through(cloud_place, proxy, stall_s=0.5, deadline_s=1.0)
    file = store.open("d/some")
    proxy.set(HttpFaultRule(pattern="GET", fault=HttpFault.DRIP, times=FOREVER, bytes_s=20_000))
    start_s = time.monotonic()
    with pytest.raises(StoreError, match=r"d/some: cannot read .*try again"):
        store.read("d/some")
    with pytest.raises(StoreError, match=r"d/some: cannot read .*try again"):
        file.read_into([bytearray(200_000)], 0)
    assert time.monotonic() - start_s < 60


def test_a_request_that_goes_too_slowly_ends_in_time(
    cloud_place: CloudPlace, proxy: FaultProxy, direct: CloudStore
) -> None:
    store = through(cloud_place, proxy, stall_s=1.0, deadline_s=2.0, part_bytes=32 * MIB)
    proxy.set(HttpFaultRule(pattern="PUT", fault=HttpFault.SIP, times=FOREVER, bytes_s=100_000))
    start_s = time.monotonic()
    with pytest.raises(StoreError, match=r"cannot write it"):
        store.write("f", [LARGE, LARGE, LARGE])
    assert time.monotonic() - start_s < 60
    assert direct.size("f") is None


def test_a_file_that_was_replaced_is_not_read_in_two_halves(direct: CloudStore) -> None:
    direct.write("f", [b"old" * 1000])
    file, room = direct.open("f"), bytearray(3000)
    direct.write("f", [b"new" * 1000])
    with pytest.raises(NotFoundError, match=r"/f: was replaced or removed since it was opened"):
        file.read_into([room], 0)
    direct.delete(["f"])
    with pytest.raises(NotFoundError):
        file.read_into([room], 0)


def test_writers_of_one_name_never_mix(direct: CloudStore) -> None:
    ours, theirs = os.urandom(len(LARGE)), os.urandom(len(LARGE))

    def parts() -> Iterator[Buffer]:
        yield ours[: 7 * MIB]
        direct.write("f", [theirs])
        yield ours[7 * MIB :]

    try:
        assert direct.write("f", parts()) == len(ours)
    except StoreError as error:
        assert "let no other program write that name" in str(error)
        assert direct.read("f") == theirs
    else:
        assert direct.read("f") == ours


def test_a_file_copied_from_one_such_store_to_another(direct: CloudStore) -> None:
    direct.write("f", [LARGE])
    file = direct.open("f")

    def parts() -> Iterator[Buffer]:
        for at in range(0, len(LARGE), 3 * MIB):
            room = bytearray(min(3 * MIB, len(LARGE) - at))
            file.read_into([room], at)
            yield room

    assert direct.write("g", parts()) == len(LARGE)
    assert direct.read("g") == LARGE


def test_a_connection_is_made_once(cloud_place: CloudPlace, proxy: FaultProxy) -> None:
    found = {id(store._connect()) for store in [through(cloud_place, proxy) for _ in range(3)]}
    assert len(found) == 1
    (one,) = [through(cloud_place, proxy)._connect()]
    assert isinstance(one, CloudConnection)
