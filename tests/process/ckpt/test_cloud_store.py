"""The stores of obstore: Azurite for Azure, and a server of the tests' own for Google."""

from __future__ import annotations

import os

import pytest
from service_fixtures import CloudPlace
from store_conformance import StoreConformance

from holdfast.ckpt.errors import StoreError
from holdfast.ckpt.store.base import Store
from holdfast.ckpt.store.cloud.store import CloudStore


class TestAzurite(StoreConformance):
    @pytest.fixture
    def store(self, azure_place: CloudPlace) -> Store:
        return CloudStore(azure_place.url, azure_place.config())


class TestGoogle(StoreConformance):
    @pytest.fixture
    def store(self, google_place: CloudPlace) -> Store:
        return CloudStore(google_place.url, google_place.config())


def test_more_files_than_one_reply_lists(cloud_place: CloudPlace) -> None:
    store = CloudStore(cloud_place.url, cloud_place.config())
    names = [f"{number:04d}" for number in range(12)]
    for name in names:
        store.write(f"d/{name}", [b"x"])
    assert store.names("d") == names
    store.delete(f"d/{name}" for name in names[1:])
    assert store.names("d") == names[:1]


def test_a_forked_child_is_refused_by_name(cloud_place: CloudPlace) -> None:
    store, code = CloudStore(cloud_place.url, cloud_place.config()), 1
    store.write("f", [b"x"])
    child = os.fork()
    if not child:
        try:
            with pytest.raises(StoreError, match=r"forked from one .* start it by spawn"):
                store.read("f")
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store.read("f") == b"x"
