"""The contract of the object stores, on servers: Ceph's gateway, Azurite and one of our own.

A fourth place is an emulator that behaves as AWS does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest
from object_places import PLACES, ObjectPlace
from store_conformance import StoreConformance
from typing_extensions import Buffer
from wire import Wire

from holdfast.ckpt.errors import NotFoundError, StoreError
from holdfast.ckpt.store.base import Store
from holdfast.ckpt.store.places import open_store

MIB = 1 << 20
MANY = {"s3": 1003, "az": 12, "gs": 1003}
"""More files than a reply lists. One of Azurite's lists 5,000, which would take half a minute."""


class TestObjectStore(StoreConformance):
    @pytest.fixture(params=[*PLACES.values(), "emulator_place"])
    def store(self, request: pytest.FixtureRequest) -> Store:
        place: ObjectPlace = request.getfixturevalue(request.param)
        return place.store()


def test_more_files_than_one_reply_lists(object_place: ObjectPlace) -> None:
    store = object_place.store()
    names = [f"{number:04d}" for number in range(MANY[object_place.kind])]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: store.write(f"d/{name}", [b"x"]), names))
    assert store.names("d") == names
    store.delete(f"d/{name}" for name in names[1:])
    assert store.names("d") == names[:1]


def test_the_environment_says_where_the_server_is(object_environment: ObjectPlace) -> None:
    store = open_store(object_environment.url)
    store.write("step-000000000001/f", [b"x"])
    assert store.names("") == ["step-000000000001"]
    assert store.where("f") == f"{object_environment.url}/f"


def test_the_scheme_may_be_written_in_capitals(object_environment: ObjectPlace) -> None:
    url = object_environment.url
    scheme, _, rest = url.partition(":")
    assert open_store(f"{scheme.upper()}:{rest}").root == url


def test_connections_are_used_again(object_place: ObjectPlace) -> None:
    wire = Wire(urlsplit(object_place.endpoint).netloc)
    place, data = object_place.through(f"http://{wire.endpoint}"), os.urandom(100_000)
    try:
        for number in range(10):
            store = place.store(threads=2)
            store.write("f", [data])
            assert store.read("f") == data
            file, room = store.open("f"), bytearray(50_000)
            file.read_into([room], number)
            assert store.size("f") == len(data)
        assert wire.taken < 10  # of 50 requests; a server ends a connection that idles
    finally:
        wire.close()


def test_a_file_copied_from_one_such_store_to_another(object_place: ObjectPlace) -> None:
    store, data = object_place.store(), os.urandom(11 * MIB + 77)
    store.write("f", [data])
    file = store.open("f")

    def parts() -> Iterator[Buffer]:
        for at in range(0, len(data), 3 * MIB):
            room = bytearray(min(3 * MIB, len(data) - at))
            file.read_into([room], at)
            yield room

    assert store.write("g", parts()) == len(data)
    assert store.read("g") == data


def test_a_file_that_was_replaced_is_not_read_in_two_halves(object_place: ObjectPlace) -> None:
    store = object_place.store()
    store.write("f", [b"old" * 1000])
    file, room = store.open("f"), bytearray(3000)
    store.write("f", [b"new" * 1000])
    replaced = r"/f: was replaced (or removed )?since it was opened"
    with pytest.raises(NotFoundError, match=replaced):
        file.read_into([room], 0)
    store.delete(["f"])
    with pytest.raises(NotFoundError, match=rf"{replaced}|/f: not there"):
        file.read_into([room], 0)


def test_a_forked_child_has_connections_of_its_own_or_is_refused_by_name(
    object_place: ObjectPlace,
) -> None:
    store, data = object_place.store(), os.urandom(11 * MIB)
    store.write("parent", [data])
    child = os.fork()
    if not child:
        code = 1
        try:
            if object_place.kind == "s3":
                store.write("child", [data])
                code = 0 if store.read("child") == data else 2
            else:
                with pytest.raises(StoreError, match=r"forked from one .* start it by spawn"):
                    store.read("parent")
                code = 0
        finally:
            os._exit(code)
    store.write("parent", [data[::-1]])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store.read("parent") == data[::-1]
    assert store.names("") == (["child", "parent"] if object_place.kind == "s3" else ["parent"])
