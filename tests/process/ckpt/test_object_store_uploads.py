"""Uploads in parts: cut off and taken up again or begun anew, mixed by two writers, and swept."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import ceph
import pytest
from object_places import ObjectPlace, S3Place
from typing_extensions import Buffer

from holdfast.ckpt.errors import StoreError
from holdfast.ckpt.store.base import Store
from holdfast.ckpt.store.s3.calls import S3Connection
from holdfast.ckpt.store.s3.unfinished import UploadTarget, parts_of, unfinished
from holdfast.ckpt.testing.http_faults import HttpFault, HttpFaultRule, faulty

MIB = 1 << 20
LARGE = os.urandom(11 * MIB + 77)
PARTS = 3
PART = {"s3": r"PUT .*partNumber=", "az": r"PUT .*comp=block(&|$)", "gs": r"PUT .*partNumber="}
"""The request that sends a part."""

WRITER = """
import dataclasses, os, sys
from holdfast.ckpt.store.cloud.config import PROVIDERS, CloudConfig
from holdfast.ckpt.store.cloud.store import CloudStore
from holdfast.ckpt.store.s3.config import S3Config
from holdfast.ckpt.store.s3.store import S3Store
root, path = sys.argv[1:]
scheme = root.partition(":")[0]
if scheme == "s3":
    kind, config = S3Store, S3Config.from_environment(os.environ)
else:
    kind, config = CloudStore, CloudConfig.from_environment(PROVIDERS[scheme], os.environ)
store = kind(root, dataclasses.replace(config, part_bytes=5 << 20, threads=1))
store.write("d/f", [open(path, "rb").read()])
"""


def test_a_killed_writer_is_taken_up_where_it_was_or_begun_anew(
    object_place: ObjectPlace, tmp_path: Path
) -> None:
    direct, part = object_place.store(), PART[object_place.kind]
    (tmp_path / "data").write_bytes(LARGE)
    with faulty(object_place.endpoint) as proxy:
        place = object_place.through(proxy.endpoint)
        proxy.set(HttpFaultRule(pattern=part, fault=HttpFault.STALL, first=PARTS))
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, place.url, str(tmp_path / "data")],
            env={**os.environ, **place.environment},
        )
        deadline_s = time.monotonic() + 60
        while not proxy.hits:
            assert writer.poll() is None and time.monotonic() < deadline_s
            time.sleep(0.02)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        assert direct.names("d") == []
        direct.sweep("d")  # it may live, for all we know
        begun = direct.unpublished("d")
        assert direct.size("d/f") is None
        proxy.set()
        place.store(threads=1).write("d/f", [LARGE])
        sent = [line for line in proxy.seen if re.search(part, line)]
    if object_place.kind == "s3":
        assert [(one.where, one.abandoned) for one in begun] == [(direct.where("d/f"), False)]
        assert len(sent) == 1 and "partNumber=3" in sent[0]
    else:
        assert begun == []  # obstore neither lists nor resumes an upload
        assert len(sent) == PARTS
    assert direct.read("d/f") == LARGE
    assert direct.unpublished("d") == []


@pytest.mark.parametrize("theirs", [LARGE, LARGE[::-1]], ids=["the same", "other"])
def test_another_writer_of_a_name_never_mixes_with_one_under_way(
    object_place: ObjectPlace, theirs: bytes
) -> None:
    store = object_place.store()

    def slowly() -> Iterator[Buffer]:
        yield memoryview(LARGE)[: 6 * MIB]
        if isinstance(object_place, S3Place):
            _await_a_part(object_place)
        store.write("f", [theirs])  # at S3 it takes up our upload
        yield memoryview(LARGE)[6 * MIB :]

    try:
        assert store.write("f", slowly()) == len(LARGE)
    except StoreError as error:
        assert theirs != LARGE
        assert re.search("(another|no other) program", str(error))
        assert store.read("f") == theirs
    else:
        assert store.read("f") == LARGE


def test_writers_of_one_name_at_once_get_their_own_bytes_or_an_error(
    object_place: ObjectPlace,
) -> None:
    # At S3 their parts replace each other's in every order: both may fail, and try again.
    store, files, failed = object_place.store(), {LARGE, LARGE[::-1]}, list[StoreError]()
    writers = [threading.Thread(target=_write, args=(store, [file], failed)) for file in files]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    if len(failed) < len(writers):
        assert store.read("f") in files
    store.write("f", [LARGE])
    assert store.read("f") == LARGE


def _write(store: Store, parts: Iterable[Buffer], failed: list[StoreError]) -> None:
    try:
        store.write("f", parts)
    except StoreError as error:
        failed.append(error)


def _await_a_part(place: S3Place) -> None:
    """Return once an upload of the place's file ``f`` has a part on the server."""
    key = f"{place.prefix}/f"
    target = UploadTarget(bucket=place.container, key=key, where=f"{place.url}/f")
    connection, deadline = S3Connection(place.config()), time.monotonic() + 60
    while not any(parts_of(connection, upload) for upload in unfinished(connection, target)):
        assert time.monotonic() < deadline, "no part arrived"
        time.sleep(0.01)


def _left(place: S3Place) -> list[str]:
    found = ceph.client(place.facts).list_multipart_uploads(
        Bucket=place.container, Prefix=place.prefix
    )
    return [upload["Key"] for upload in found.get("Uploads", ())]


def test_an_upload_nobody_writes_any_more_is_swept(s3_place: S3Place) -> None:
    s3, key = ceph.client(s3_place.facts), f"{s3_place.prefix}/d/f"
    address = {"Bucket": s3_place.container, "Key": key}
    upload = s3.create_multipart_upload(**address)["UploadId"]
    s3.upload_part(**address, UploadId=upload, PartNumber=1, Body=LARGE[: 5 * MIB])
    s3_place.store().sweep("d")
    assert _left(s3_place) == [key]  # its writer may live
    deadline_s = time.monotonic() + 30
    while _left(s3_place):  # the server's clock has seconds
        s3_place.store(abandoned_s=0.5).sweep("d")
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def test_an_upload_of_a_file_that_was_published_since_is_swept(s3_place: S3Place) -> None:
    s3, store = ceph.client(s3_place.facts), s3_place.store()
    keys = [f"{s3_place.prefix}/d/{name}" for name in ("f", "deeper/g")]
    for key in keys:
        s3.create_multipart_upload(Bucket=s3_place.container, Key=key)
    deadline_s = time.monotonic() + 30
    while keys[0] in _left(s3_place):
        store.write("d/f", [b"published"])
        store.sweep("d")
        assert time.monotonic() < deadline_s
    assert _left(s3_place) == keys[1:]
    store.remove("d")
    assert _left(s3_place) == keys[1:]
    assert store.read("d/f") == b"published"
