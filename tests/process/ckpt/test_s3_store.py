"""The S3 store against a real server: Ceph's gateway."""

from __future__ import annotations

import logging
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from service_fixtures import S3Place
from store_conformance import StoreConformance

from holdfast.ckpt.store.base import Store
from holdfast.ckpt.store.s3.store import S3Store


class TestCeph(StoreConformance):
    @pytest.fixture
    def store(self, s3_place: S3Place) -> Store:
        return S3Store(s3_place.url, s3_place.config())


class TestEmulator(StoreConformance):
    @pytest.fixture
    def store(self, emulator_place: S3Place) -> Store:
        return S3Store(emulator_place.url, emulator_place.config())


def test_connections_are_used_again(s3_place: S3Place, caplog: pytest.LogCaptureFixture) -> None:
    store = S3Store(s3_place.url, s3_place.config(threads=2))
    caplog.set_level(logging.DEBUG, logger="urllib3.connectionpool")
    data = os.urandom(100_000)
    for number in range(10):
        store.write("f", [data])
        assert store.read("f") == data
        file, room = store.open("f"), bytearray(50_000)
        file.read_into([room], number)
        assert store.size("f") == len(data)
    begun = [r for r in caplog.records if "Starting new HTTP connection" in r.getMessage()]
    assert len(begun) == 1


def test_a_forked_child_has_connections_of_its_own(s3_place: S3Place) -> None:
    store, data = S3Store(s3_place.url, s3_place.config()), os.urandom(11 << 20)
    store.write("parent", [data])
    child = os.fork()
    if not child:
        code = 1
        try:
            store.write("child", [data])
            code = 0 if store.read("child") == data else 2
        finally:
            os._exit(code)
    store.write("parent", [data[::-1]])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store.read("parent") == data[::-1]
    assert store.read("child") == data


def test_more_files_than_one_reply_lists(s3_place: S3Place) -> None:
    store = S3Store(s3_place.url, s3_place.config())
    names = [f"{number:04d}" for number in range(1003)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: store.write(f"d/{name}", [b"x"]), names))
    assert store.names("d") == names
    store.delete(f"d/{name}" for name in names[1:])
    assert store.names("d") == names[:1]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: store.write(f"d/{name}", [b"x"]), names))
    store.delete(f"d/{name}" for name in names)
    assert store.names("") == []
