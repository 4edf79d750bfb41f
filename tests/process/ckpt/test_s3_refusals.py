"""Refusals of a real S3 server: rights, names, space, and gateways that die or stop."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import ceph
import keeper
import pytest
from ports import free_ports
from service_fixtures import S3Place

from holdfast.ckpt.errors import StoreError
from holdfast.ckpt.store.places import open_store
from holdfast.ckpt.store.s3.config import S3Config
from holdfast.ckpt.store.s3.store import S3Store

MIB = 1 << 20
LARGE = os.urandom(12 * MIB)
Abused = tuple[S3Place, "subprocess.Popen[bytes]"]


def store_of(place: S3Place, **changes: Any) -> S3Store:
    return S3Store(place.url, place.config(**changes))


def other_user(place: S3Place) -> S3Place:
    name = f"u{secrets.token_hex(4)}"
    keys = ceph.add_user(Path(place.ceph_config), name)
    return replace(place, **keys, bucket=name)


@pytest.mark.parametrize("wrong", ["secret_key", "access_key"])
def test_wrong_keys_are_named_and_kept_secret(
    s3_place: S3Place, wrong: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="ckpt")
    secret = "not-the-right-one-4711"
    place = replace(s3_place, **{wrong: secret})
    store, start_s = store_of(place), time.monotonic()
    actions = (
        lambda: store.write("f", [b"x"]),
        lambda: store.write("f", [LARGE]),
        lambda: store.replace("f", b"x", expected=None),
        lambda: store.read("f"),
        lambda: store.names(""),
        lambda: store.delete(["f"]),
        lambda: store.remove("d"),
        lambda: store.sweep("d"),
    )
    for action in actions:
        with pytest.raises(StoreError, match=r"AWS_ACCESS_KEY_ID") as caught:
            action()
        assert place.url in str(caught.value)
        for text in (str(caught.value), repr(store), repr(place.config()), caplog.text):
            assert place.secret_key not in text
    with pytest.raises(StoreError, match=r"403"):
        store.size("f")
    assert time.monotonic() - start_s < 60  # it was not tried again


def test_a_missing_bucket_is_named(s3_place: S3Place) -> None:
    store = store_of(replace(s3_place, bucket="not-there"))
    for action in (
        lambda: store.write("f", [b"x"]),
        lambda: store.write("f", [LARGE]),
        lambda: store.read("f"),
        lambda: store.names(""),
        lambda: store.replace("f", b"x", expected=None),
    ):
        with pytest.raises(StoreError, match=r"s3://not-there/.*create the bucket or correct"):
            action()


def test_foreign_bucket_and_full_quota_are_told_apart(s3_place: S3Place) -> None:
    store_of(s3_place).write("f", [b"mine"])
    user = other_user(s3_place)
    stranger = store_of(replace(user, bucket=s3_place.bucket))
    for action in (lambda: stranger.read("f"), lambda: stranger.write("f", [LARGE])):
        with pytest.raises(StoreError, match=r"AccessDenied.*let these credentials"):
            action()
    assert store_of(s3_place).read("f") == b"mine"

    config, name = Path(user.ceph_config), user.bucket
    quota = ("--quota-scope=user", f"--uid={name}")
    ceph.admin(config, "quota", "set", *quota, "--max-size=1M")
    ceph.admin(config, "quota", "enable", *quota)
    ceph.client(user.facts).create_bucket(Bucket=name)
    store = store_of(user)
    store.write("small", [b"x"])
    with pytest.raises(StoreError, match=r"QuotaExceeded.*make room"):
        store.write("large", [LARGE])
    with pytest.raises(StoreError, match=r"QuotaExceeded.*make room"):
        store.write("large", [LARGE[: 2 * MIB]])
    assert store.names("") == ["small"]


def test_without_credentials_it_is_said_how_to_give_them(
    s3_place: S3Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    store = open_store("s3://some/where", s3=S3Config(endpoint_url=s3_place.endpoint))
    with pytest.raises(StoreError, match=r"s3://some/where/f: .*set AWS_ACCESS_KEY_ID"):
        store.read("f")
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(StoreError, match=r"nobody.*AWS_PROFILE"):
        open_store("s3://some/where")


def test_an_endpoint_where_nobody_listens(s3_place: S3Place) -> None:
    place = s3_place.through(f"http://127.0.0.1:{free_ports(1)[0]}")
    store, start_s = store_of(place, stall_s=0.3, deadline_s=1.0), time.monotonic()
    with pytest.raises(StoreError, match=r"tried \d+ times.*EndpointConnectionError.*check the"):
        store.names("")
    assert time.monotonic() - start_s < 60


def test_the_environment_says_where_the_server_is(s3_environment: S3Place) -> None:
    store = open_store(s3_environment.url)
    store.write("step-000000000001/f", [b"x"])
    assert store.names("") == ["step-000000000001"]
    assert store.where("f") == f"{s3_environment.url}/f"


def half_then(action: Any) -> Iterator[bytes]:
    yield LARGE[: 7 * MIB]
    action()
    yield LARGE[7 * MIB :]


def test_a_gateway_killed_during_a_write_leaves_no_torn_file(
    s3_place: S3Place, second_gateway: Abused
) -> None:
    place, process = second_gateway
    store, direct = store_of(place, stall_s=0.5, deadline_s=1.5), store_of(s3_place)
    direct.write("f", [b"old"])
    with pytest.raises(StoreError, match=r"tried \d+ times"):
        store.write("f", half_then(process.kill))
    assert direct.read("f") == b"old"
    direct.write("f", [LARGE])
    assert direct.read("f") == LARGE


def test_a_write_outlives_a_gateway_that_is_restarted(
    s3_place: S3Place, second_gateway: Abused
) -> None:
    place, process = second_gateway
    again: list[subprocess.Popen[bytes]] = []

    def restart() -> None:
        process.kill()
        process.wait()
        config, port = Path(place.ceph_config), urlsplit(place.endpoint).port
        with config.with_name("gateway.out").open("ab") as log:
            again.append(ceph.gateway(config, f"r{port}", log, port=port)[0])

    try:
        store = store_of(place, deadline_s=60.0)
        assert store.write("f", half_then(restart)) == len(LARGE)
        assert store_of(s3_place).read("f") == LARGE
    finally:
        keeper.end(*again)


def test_a_write_outlives_a_gateway_that_stops_for_a_while(
    s3_place: S3Place, second_gateway: Abused
) -> None:
    place, process = second_gateway
    waking = threading.Timer(1.5, process.send_signal, [signal.SIGCONT])

    def stop() -> None:
        process.send_signal(signal.SIGSTOP)
        waking.start()

    store = store_of(place, stall_s=0.5, deadline_s=30.0)
    assert store.write("f", half_then(stop)) == len(LARGE)
    waking.join()
    assert store_of(s3_place).read("f") == LARGE


def test_a_gateway_that_stays_stopped_is_given_up_in_time(second_gateway: Abused) -> None:
    place, process = second_gateway
    store_of(place).write("f", [bytes(100)])
    store, room = store_of(place, stall_s=0.5, deadline_s=1.2), bytearray(100)
    file = store.open("f")
    process.send_signal(signal.SIGSTOP)
    start_s = time.monotonic()
    for action in (
        lambda: file.read_into([room], 0),
        lambda: store.read("f"),
        lambda: store.replace("f", b"x", expected=None),
    ):
        with pytest.raises(StoreError, match=r"tried \d+ times.*[Tt]ime"):
            action()
    assert time.monotonic() - start_s < 60


def test_an_upload_nobody_writes_any_more_is_swept(s3_place: S3Place) -> None:
    s3, key = ceph.client(s3_place.facts), f"{s3_place.prefix}/d/f"
    address = {"Bucket": s3_place.bucket, "Key": key}

    def left() -> list[str]:
        found = s3.list_multipart_uploads(Bucket=s3_place.bucket, Prefix=s3_place.prefix)
        return [upload["Key"] for upload in found.get("Uploads", ())]

    upload = s3.create_multipart_upload(**address)["UploadId"]
    s3.upload_part(**address, UploadId=upload, PartNumber=1, Body=LARGE[: 5 * MIB])
    store_of(s3_place).sweep("d")
    assert left() == [key]  # its writer may live
    deadline_s = time.monotonic() + 30
    while left():  # the server's clock has seconds
        store_of(s3_place, abandoned_s=0.5).sweep("d")
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def test_an_upload_of_a_file_that_was_published_since_is_swept(s3_place: S3Place) -> None:
    s3, store = ceph.client(s3_place.facts), store_of(s3_place)
    address = {"Bucket": s3_place.bucket, "Key": f"{s3_place.prefix}/d/f"}
    s3.create_multipart_upload(**address)
    other = {"Bucket": s3_place.bucket, "Key": f"{s3_place.prefix}/d/deeper/g"}
    s3.create_multipart_upload(**other)

    def left() -> list[str]:
        found = s3.list_multipart_uploads(Bucket=s3_place.bucket, Prefix=s3_place.prefix)
        return [upload["Key"] for upload in found.get("Uploads", ())]

    deadline_s = time.monotonic() + 30
    while address["Key"] in left():
        store.write("d/f", [b"published"])
        store.sweep("d")
        assert time.monotonic() < deadline_s
    assert left() == [other["Key"]]
    store.remove("d")
    assert left() == [other["Key"]]
    assert store.read("d/f") == b"published"
