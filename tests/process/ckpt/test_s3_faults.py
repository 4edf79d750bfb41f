"""The S3 store under faults of a proxy, on real sockets, before a real server.

Each operation survives passing faults, and fails clearly within its deadline under permanent ones.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from service_fixtures import S3Place
from typing_extensions import Buffer

from holdfast.ckpt.errors import NotFoundError, StoreError
from holdfast.ckpt.store.s3.calls import S3Connection
from holdfast.ckpt.store.s3.store import S3Store
from holdfast.ckpt.store.s3.unfinished import UploadTarget, parts_of, unfinished
from holdfast.ckpt.testing.http_faults import FaultProxy, HttpFault, HttpFaultRule, faulty

MIB = 1 << 20
LARGE = os.urandom(11 * MIB + 77)
FOREVER = 10**9
PASSING = [
    HttpFaultRule(pattern="", fault=HttpFault.REFUSE, times=3, status=500, code="InternalError"),
    HttpFaultRule(pattern="", fault=HttpFault.REFUSE, times=3, status=503, code="SlowDown"),
    HttpFaultRule(pattern="", fault=HttpFault.REFUSE, times=3, status=429, code="TooManyRequests"),
    HttpFaultRule(pattern="", fault=HttpFault.RESET_BEFORE, times=3),
    HttpFaultRule(pattern="", fault=HttpFault.RESET_DURING, times=3),
    HttpFaultRule(pattern="", fault=HttpFault.LOSE_REPLY, times=3),
    HttpFaultRule(pattern="", fault=HttpFault.TRUNCATE, times=3),
    HttpFaultRule(pattern="PUT|POST", fault=HttpFault.FLIP_REQUEST, times=3),
]
LASTING = [
    HttpFaultRule(
        pattern="", fault=HttpFault.REFUSE, times=FOREVER, status=503, code="ServiceUnavailable"
    ),
    HttpFaultRule(pattern="", fault=HttpFault.RESET_BEFORE, times=FOREVER),
    HttpFaultRule(pattern="", fault=HttpFault.STALL, times=FOREVER),
]


@pytest.fixture
def proxy(s3_place: S3Place) -> Iterator[FaultProxy]:
    with faulty(s3_place.endpoint) as running:
        yield running


@pytest.fixture
def direct(s3_place: S3Place) -> S3Store:
    """The same files, without faults."""
    return S3Store(s3_place.url, s3_place.config())


def through(place: S3Place, proxy: FaultProxy, **changes: float) -> S3Store:
    changes = {"stall_s": 2.0, "deadline_s": 20.0, "pause_s": 0.005} | changes
    return S3Store(place.url, place.through(proxy.endpoint).config(**changes))


def read_large(store: S3Store) -> None:
    file, room = store.open("d/large"), bytearray(len(LARGE))
    assert file.read_into([memoryview(room)[: 5 * MIB], memoryview(room)[5 * MIB :]], 0) == len(
        LARGE
    )
    assert room == LARGE


def replace_small(store: S3Store) -> None:
    version = store.fetch("d/small")[1]
    assert store.replace("d/small", b"second", expected=version)
    assert store.read("d/small") == b"second"
    store.write("d/small", [b"small"])


def create(store: S3Store) -> None:
    assert store.replace("d/created", b"created", expected=None)
    assert not store.replace("d/created", b"other", expected=None)
    store.delete(["d/created"])


def write_large(store: S3Store) -> None:
    assert store.write("new", [LARGE]) == len(LARGE)


OPERATIONS: dict[str, Callable[[S3Store], object]] = {
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
    "sweep": lambda store: store.sweep("d"),
    "remove": lambda store: store.remove("e"),
}


def filled(store: S3Store) -> S3Store:
    store.write("d/small", [b"small"])
    store.write("d/large", [LARGE])
    store.write("e/f", [b"x"])
    assert store.replace("e/g", b"x", expected=None)  # the server has shown its conditions
    return store


@pytest.mark.parametrize("rule", PASSING, ids=lambda rule: f"{rule.fault.name} {rule.status}")
def test_every_operation_survives_what_passes(
    s3_place: S3Place, proxy: FaultProxy, direct: S3Store, rule: HttpFaultRule
) -> None:
    store = filled(through(s3_place, proxy))
    for name, operation in OPERATIONS.items():
        proxy.set(rule)
        operation(store)
        bodiless = rule.fault in (
            HttpFault.RESET_DURING,
            HttpFault.FLIP_REQUEST,
            HttpFault.TRUNCATE,
        )
        assert proxy.hits or bodiless, name
        if name == "write large":
            assert direct.read("new") == LARGE
    assert direct.names("") == ["d", "e"]


def test_a_server_that_stalls_once_is_asked_again(s3_place: S3Place, proxy: FaultProxy) -> None:
    store = filled(through(s3_place, proxy, stall_s=0.5))
    for operation in OPERATIONS.values():
        proxy.set(HttpFaultRule(pattern="", fault=HttpFault.STALL))
        operation(store)
        assert proxy.hits


@pytest.mark.parametrize("rule", LASTING, ids=lambda rule: rule.fault.name)
def test_every_operation_fails_clearly_and_in_time(
    s3_place: S3Place, proxy: FaultProxy, direct: S3Store, rule: HttpFaultRule
) -> None:
    filled(direct)
    store = through(s3_place, proxy, stall_s=0.2, deadline_s=0.5)
    for operation in OPERATIONS.values():
        proxy.set(rule)
        start_s = time.monotonic()
        with pytest.raises(StoreError, match=rf"{s3_place.url}/.*tried \d+ times") as caught:
            operation(store)
        assert time.monotonic() - start_s < 60
        assert s3_place.secret_key not in str(caught.value)
        assert "then try again" in str(caught.value)


def test_a_lost_reply_to_any_request_of_a_write_does_no_harm(
    s3_place: S3Place, proxy: FaultProxy, direct: S3Store
) -> None:
    store = through(s3_place, proxy)
    for number in itertools.count(1):
        proxy.set(HttpFaultRule(pattern="", fault=HttpFault.LOSE_REPLY, first=number))
        data = [LARGE, str(number).encode()]
        store.write("f", data)
        assert direct.read("f") == b"".join(data)
        if not proxy.hits:
            break
    assert number > 5  # list, create, three parts, complete


def test_a_lost_reply_to_any_request_of_a_commit_does_no_harm(
    s3_place: S3Place, proxy: FaultProxy, direct: S3Store
) -> None:
    connection = S3Connection(s3_place.through(proxy.endpoint).config(pause_s=0.005))
    store = S3Store(s3_place.url, connection)
    for number in itertools.count(1):
        connection.quoted_versions.clear()  # the server is asked again how it takes conditions
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
    s3_place: S3Place, proxy: FaultProxy, direct: S3Store
) -> None:
    store = filled(through(s3_place, proxy))
    _, version = direct.fetch("d/small")
    assert direct.replace("d/small", b"theirs", expected=version)
    proxy.set(HttpFaultRule(pattern="PUT", fault=HttpFault.RESET_BEFORE, times=2))
    assert not store.replace("d/small", b"ours", expected=version)
    assert len(proxy.hits) == 2
    assert direct.read("d/small") == b"theirs"


def test_a_read_goes_on_where_it_was_cut_off(s3_place: S3Place, proxy: FaultProxy) -> None:
    store = filled(through(s3_place, proxy, threads=1))
    file, room = store.open("d/large"), bytearray(8 * MIB)
    proxy.set(HttpFaultRule(pattern="GET", fault=HttpFault.TRUNCATE, times=4))
    assert file.read_into([room], 1000) == len(room)
    assert room == LARGE[1000 : 1000 + 8 * MIB]
    assert len(proxy.seen) == 5


def test_a_reply_that_comes_too_slowly_ends_in_time(
    s3_place: S3Place, proxy: FaultProxy, direct: S3Store
) -> None:
    direct.write("d/some", [LARGE[:200_000]])
    store = through(s3_place, proxy, stall_s=0.5, deadline_s=1.0)
    file = store.open("d/some")
    proxy.set(HttpFaultRule(pattern="GET", fault=HttpFault.DRIP, times=FOREVER, bytes_s=20_000))
    start_s = time.monotonic()
    with pytest.raises(StoreError, match="not complete within 1 s, though bytes were moving"):
        store.read("d/some")
    with pytest.raises(StoreError, match="check the endpoint"):
        file.read_into([bytearray(200_000)], 0)
    assert time.monotonic() - start_s < 60


def test_a_request_that_goes_too_slowly_ends_in_time(
    s3_place: S3Place, proxy: FaultProxy, direct: S3Store
) -> None:
    store = through(s3_place, proxy, stall_s=1.0, deadline_s=2.0, part_bytes=32 * MIB)
    proxy.set(HttpFaultRule(pattern="PUT", fault=HttpFault.SIP, times=FOREVER, bytes_s=100_000))
    start_s = time.monotonic()
    with pytest.raises(StoreError, match=r"cannot write it"):
        store.write("f", [LARGE, LARGE])
    assert time.monotonic() - start_s < 60
    assert direct.size("f") is None


def test_bytes_that_change_on_their_way_are_never_published(
    s3_place: S3Place, proxy: FaultProxy, direct: S3Store
) -> None:
    store = through(s3_place, proxy, stall_s=0.3, deadline_s=1.0)
    proxy.set(HttpFaultRule(pattern="PUT", fault=HttpFault.FLIP_REQUEST, times=FOREVER))
    with pytest.raises(StoreError, match="XAmzContentSHA256Mismatch"):
        store.write("small", [b"small"])
    with pytest.raises(StoreError, match="XAmzContentSHA256Mismatch"):
        store.write("large", [LARGE])
    assert direct.names("") == []


WRITER = """
import os, sys
from holdfast.ckpt.store.places import open_store
from holdfast.ckpt.store.s3.config import S3Config
import dataclasses
config = dataclasses.replace(S3Config.from_environment(os.environ), part_bytes=5 << 20, threads=1)
data = open(sys.argv[2], "rb").read()
open_store(sys.argv[1], s3=config).write("d/f", [data])
"""


def test_a_killed_writer_is_taken_up_where_it_was(
    s3_place: S3Place, proxy: FaultProxy, direct: S3Store, tmp_path: Path
) -> None:
    (tmp_path / "data").write_bytes(LARGE)
    proxy.set(HttpFaultRule(pattern="partNumber=3", fault=HttpFault.STALL))
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, s3_place.url, str(tmp_path / "data")],
        env={**os.environ, **s3_place.through(proxy.endpoint).environment},
    )
    deadline_s = time.monotonic() + 60
    while not proxy.hits:
        assert writer.poll() is None and time.monotonic() < deadline_s
        time.sleep(0.02)
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    assert direct.names("d") == []
    direct.sweep("d")  # it may live, for all we know
    (begun,) = direct.unpublished("d")
    assert begun.where == direct.where("d/f") and not begun.abandoned
    proxy.set()
    through(s3_place, proxy).write("d/f", [LARGE])
    assert [line for line in proxy.seen if "partNumber=1" in line] == []
    assert [line for line in proxy.seen if "partNumber=2" in line] == []
    assert len([line for line in proxy.seen if "partNumber=3" in line]) == 1
    assert direct.read("d/f") == LARGE
    assert direct.unpublished("d") == []


@pytest.mark.parametrize("theirs", [LARGE, LARGE[::-1]], ids=["the same", "other"])
def test_an_upload_taken_from_a_living_writer_never_mixes(
    s3_place: S3Place, direct: S3Store, theirs: bytes
) -> None:
    done, failed = threading.Event(), list[StoreError]()

    def slowly() -> Iterator[memoryview]:
        yield memoryview(LARGE)[: 6 * MIB]
        done.wait(60)
        yield memoryview(LARGE)[6 * MIB :]

    slow = threading.Thread(target=_write, args=(direct, slowly(), failed))
    slow.start()
    try:
        _await_a_part(s3_place)
        direct.write("f", [theirs])
    finally:
        done.set()
        slow.join(60)
    if theirs == LARGE:
        assert failed == []
    assert direct.read("f") == theirs
    assert all("another program" in str(error) for error in failed)


def test_writers_of_one_name_at_once_get_their_own_bytes_or_an_error(direct: S3Store) -> None:
    # Their parts replace each other's in every order: both may fail, and try again.
    files = {LARGE, LARGE[::-1]}
    failed: list[StoreError] = []
    writers = [threading.Thread(target=_write, args=(direct, [file], failed)) for file in files]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    if len(failed) < len(writers):
        assert direct.read("f") in files
    direct.write("f", [LARGE])
    assert direct.read("f") == LARGE


def _write(store: S3Store, parts: Iterable[Buffer], failed: list[StoreError]) -> None:
    try:
        store.write("f", parts)
    except StoreError as error:
        failed.append(error)


def _await_a_part(place: S3Place) -> None:
    """Return once an upload of the place's file ``f`` has a part on the server."""
    bucket, _, prefix = place.url.removeprefix("s3://").partition("/")
    target = UploadTarget(bucket=bucket, key=f"{prefix}/f", where=f"{place.url}/f")
    connection, deadline = S3Connection(place.config()), time.monotonic() + 60
    while not any(parts_of(connection, upload) for upload in unfinished(connection, target)):
        assert time.monotonic() < deadline, "no part arrived"
        time.sleep(0.01)


def test_a_server_without_conditions_is_refused(
    emulator_place: S3Place, s3_place: S3Place, proxy: FaultProxy, direct: S3Store
) -> None:
    with faulty(emulator_place.endpoint) as careless:
        store = S3Store(emulator_place.url, emulator_place.through(careless.endpoint).config())
        careless.set(HttpFaultRule(pattern="PUT", fault=HttpFault.FORGET_CONDITIONS, times=FOREVER))
        with pytest.raises(StoreError, match="ignores If-None-Match"):
            store.replace("d/f", b"x", expected=None)
        assert store.names("d") == []
    store = through(s3_place, proxy)
    refusing = HttpFaultRule(
        pattern="PUT",
        fault=HttpFault.REFUSE,
        first=2,
        times=FOREVER,
        status=501,
        code="NotImplemented",
    )
    proxy.set(refusing)
    with pytest.raises(StoreError, match=r"on a condition.*501 NotImplemented.*use another one"):
        store.replace("d/f", b"x", expected=None)
    assert direct.names("d") == []


def test_a_replaced_file_cannot_be_read_on(direct: S3Store) -> None:
    direct.write("f", [b"old" * 100])
    file = direct.open("f")
    direct.write("f", [b"new" * 100])
    with pytest.raises(NotFoundError, match="was replaced since it was opened"):
        file.read_into([bytearray(10)], 0)
    direct.delete(["f"])
    with pytest.raises(NotFoundError, match="not there"):
        file.read_into([bytearray(10)], 0)
