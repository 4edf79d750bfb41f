"""Compare-and-set of a small object, on servers that support it.

It is a plain PUT with ``If-None-Match: *`` or ``If-Match``. Servers differ: some need the version
quoted (AWS), some compare it literally and unquoted (Ceph 16), some answer 501, and some ignore the
condition and overwrite. So each bucket is tested once, with an object of its own, before any commit
relies on a condition.
"""

from __future__ import annotations

import logging
import secrets
from typing import Final

from botocore.exceptions import ClientError

from holdfast.ckpt.errors import StoreError
from holdfast.ckpt.store.objects.retries import Deadline
from holdfast.ckpt.store.s3.calls import S3Connection
from holdfast.ckpt.store.s3.errors import FAILURES, is_missing, said, status_of
from holdfast.ckpt.store.s3.read import fetch_once
from holdfast.ckpt.store.s3.unfinished import UploadTarget
from holdfast.ckpt.store.s3.upload import put, put_once

_log = logging.getLogger(__name__)

PROBE: Final = ".holdfast-probe-"
"""The prefix of the names of test objects, which are never listed."""

_NO_VERSION: Final = "0" * 32
_TRYING: Final = b"Holdfast asks whether this server can write on a condition."


def replace(
    connection: S3Connection, target: UploadTarget, data: bytes, *, expected: str | None
) -> bool:
    """Publish ``data`` if the object is still at version ``expected``; say whether it is in place.

    When a reply is lost, the condition fails on the next try; the same happens behind a proxy that
    retries by itself. So after a failed condition the object in place decides: our very bytes count
    as published by us, any others as a lost race.
    """
    quoted = _quoted(connection, target)
    condition = _is_absent() if expected is None else _is_at(expected, quoted=quoted)

    def decide(deadline: Deadline) -> bool:
        if _put_if(connection, target, data, deadline, condition):
            return True
        return _in_place(connection, target, deadline) == data

    return connection.send(decide, where=target.where, doing="replace it")


def _is_absent() -> dict[str, str]:
    return {"IfNoneMatch": "*"}


def _is_at(version: str, *, quoted: bool) -> dict[str, str]:
    return {"IfMatch": f'"{version}"' if quoted else version}


def _put_if(
    connection: S3Connection,
    target: UploadTarget,
    data: bytes,
    deadline: Deadline,
    condition: dict[str, str],
) -> bool:
    """Write the object in one attempt; say whether the server found the condition true."""
    try:
        put_once(connection, target, [memoryview(data)], deadline, **condition)
    except ClientError as error:
        if status_of(error) != 412 and not is_missing(error):
            raise
        return False
    return True


def _in_place(connection: S3Connection, target: UploadTarget, deadline: Deadline) -> bytes | None:
    try:
        return fetch_once(connection, target, deadline)[0]
    except ClientError as error:
        if is_missing(error):
            return None
        raise


def _quoted(connection: S3Connection, target: UploadTarget) -> bool:
    """Return whether the bucket's server needs versions quoted; test it the first time."""
    with connection.probing:
        if (known := connection.quoted_versions.get(target.bucket)) is not None:
            return known
        folder = target.key.rpartition("/")[0]
        name = f"{PROBE}{secrets.token_hex(8)}"
        probe = UploadTarget(
            bucket=target.bucket, key=f"{folder}/{name}" if folder else name, where=target.where
        )
        try:
            found = _probed(connection, probe)
        finally:
            _remove(connection, probe)
        connection.quoted_versions[target.bucket] = found
        return found


def _probed(connection: S3Connection, probe: UploadTarget) -> bool:
    """Test how the server treats conditions. Raises ``StoreError`` if it ignores them."""

    def takes(condition: dict[str, str]) -> bool:
        return connection.send(
            lambda deadline: _put_if(connection, probe, _TRYING, deadline, condition),
            where=probe.where,
            doing="write it on a condition, which a commit needs",
        )

    version = put(connection, probe, [memoryview(_TRYING)])
    if not takes(_is_absent()) and not takes(_is_at(_NO_VERSION, quoted=True)):
        if takes(_is_at(version, quoted=True)):
            return True
        if takes(_is_at(version, quoted=False)) and not takes(_is_at(_NO_VERSION, quoted=False)):
            return False
    raise StoreError(
        f"{probe.where}: the server ignores If-None-Match and If-Match, so two writers could "
        "overwrite each other's commit; use a server with conditional writes"
    )


def _remove(connection: S3Connection, probe: UploadTarget) -> None:
    try:
        connection.client.delete_object(**probe.address)
    except FAILURES as error:
        _log.info("%s: %s stays: %s", probe.where, probe.key, said(error))
