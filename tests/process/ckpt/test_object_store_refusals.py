"""Refusals of object stores: keys, names, rights, space, and servers that are not there."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import ceph
import pytest
from object_places import ObjectPlace, S3Place
from ports import free_ports

from holdfast.ckpt.errors import StoreError
from holdfast.ckpt.store.base import Store
from holdfast.ckpt.store.cloud.config import GOOGLE, CloudConfig
from holdfast.ckpt.store.cloud.store import CloudStore
from holdfast.ckpt.store.places import open_store
from holdfast.ckpt.store.s3.config import S3Config

MIB = 1 << 20
LARGE = os.urandom(12 * MIB)
KEYS = {
    "s3": "403 .*check AWS_ACCESS_KEY_ID",
    "az": "403 .*check AZURE_STORAGE_ACCOUNT_NAME",
    "gs": "401 .*check GOOGLE_APPLICATION_CREDENTIALS",
}
CONTAINER = {"s3": "bucket", "az": "container", "gs": "bucket"}


def every_action(store: Store) -> list[Callable[[], object]]:
    return [
        lambda: store.write("f", [b"x"]),
        lambda: store.write("f", [LARGE]),
        lambda: store.replace("f", b"x", expected=None),
        lambda: store.read("f"),
        lambda: store.names(""),
        lambda: store.delete(["f"]),
    ]


def test_wrong_keys_are_named_and_kept_secret(
    object_place: ObjectPlace, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="holdfast")
    for place in object_place.with_wrong_keys():
        store, start_s = place.store(), time.monotonic()
        actions = every_action(store)
        if place.kind == "s3":
            actions += [lambda: store.remove("d"), lambda: store.sweep("d")]  # noqa: B023
        for action in actions:
            with pytest.raises(StoreError, match=KEYS[place.kind]) as caught:
                action()
            assert place.url in str(caught.value)
            for text in (str(caught.value), repr(store), caplog.text):
                for secret in (*object_place.secrets, *place.secrets):
                    assert secret not in text
        for action in (lambda: store.size("f"), lambda: store.open("f")):  # noqa: B023
            with pytest.raises(StoreError, match=KEYS[place.kind][:3]):
                action()
        for secret in place.secrets:
            assert secret not in repr(place) + repr(store)
        assert time.monotonic() - start_s < 60  # it was not tried again


def test_a_missing_container_is_named(object_place: ObjectPlace) -> None:
    store, kind = object_place.within("not-there").store(), object_place.kind
    for action in every_action(store)[:5]:
        with pytest.raises(
            StoreError, match=rf"{kind}://not-there/.*create the {CONTAINER[kind]} or correct"
        ):
            action()


def test_an_endpoint_where_nobody_listens(object_place: ObjectPlace) -> None:
    place = object_place.through(f"http://127.0.0.1:{free_ports(1)[0]}")
    store, start_s = place.store(stall_s=0.1, deadline_s=0.3), time.monotonic()
    for action in every_action(store):
        with pytest.raises(StoreError, match=r"tried \d+ times.*check the.*then try again"):
            action()
    assert time.monotonic() - start_s < 60


def test_a_bucket_of_others_and_a_full_quota_are_told_apart(s3_place: S3Place) -> None:
    s3_place.store().write("f", [b"mine"])
    name = f"u{secrets.token_hex(4)}"
    config = Path(s3_place.ceph_config)
    user = replace(s3_place, **ceph.add_user(config, name))
    stranger = user.store()
    for action in (lambda: stranger.read("f"), lambda: stranger.write("f", [LARGE])):
        with pytest.raises(StoreError, match=r"AccessDenied.*let these credentials"):
            action()
    assert s3_place.store().read("f") == b"mine"

    quota = ("--quota-scope=user", f"--uid={name}")
    ceph.admin(config, "quota", "set", *quota, "--max-size=1M")
    ceph.admin(config, "quota", "enable", *quota)
    own = user.within(name)
    ceph.client(own.facts).create_bucket(Bucket=name)
    store = own.store()
    store.write("small", [b"x"])
    for data in (LARGE, LARGE[: 2 * MIB]):
        with pytest.raises(StoreError, match=r"QuotaExceeded.*make room"):
            store.write("large", [data])
    assert store.names("") == ["small"]


def test_without_credentials_it_is_said_how_to_give_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    endpoint = f"http://127.0.0.1:{free_ports(1)[0]}"
    store = open_store("s3://some/where", s3=S3Config(endpoint_url=endpoint))
    with pytest.raises(StoreError, match=r"s3://some/where/f: .*set AWS_ACCESS_KEY_ID"):
        store.read("f")
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(StoreError, match=r"nobody.*AWS_PROFILE"):
        open_store("s3://some/where")


def test_an_account_that_is_not_named_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("AZURE_", "AZURITE_"))]:
        monkeypatch.delenv(name)
    with pytest.raises(StoreError, match=r"az://some: .*AZURE_STORAGE_ACCOUNT_NAME"):
        open_store("az://some/where")


def test_credentials_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    settings = (("application_credentials", str(tmp_path / "none")),)
    with pytest.raises(StoreError, match=r"gs://some: .*GOOGLE_APPLICATION_CREDENTIALS"):
        CloudStore("gs://some/where", CloudConfig(provider=GOOGLE, settings=settings))


@pytest.mark.parametrize("root", ["az://", "az:///x", "gs://?x", "s3://", "s3:///x"])
def test_an_address_without_a_container_is_refused(root: str) -> None:
    with pytest.raises(StoreError, match=r"write (az://container|gs://bucket|s3://bucket)/prefix"):
        open_store(root)
