"""Unfinished uploads: listing, resuming and sweeping.

There is no way to ask whether an upload's owner is alive. So an upload is swept only when that
cannot harm its owner, judged by the server's clock alone:

- it received no part for ``S3Config.abandoned_s`` (a day): a living writer sends one at least every
  ``deadline_s`` while it has bytes, or
- another writer published its file after the upload's last part, so that it is no longer needed. An
  owner that is alive nevertheless finds its very bytes in place, or raises an error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any

from botocore.exceptions import ClientError

from holdfast.ckpt.store.base import Unpublished
from holdfast.ckpt.store.objects.retries import Deadline
from holdfast.ckpt.store.s3.calls import S3Connection
from holdfast.ckpt.store.s3.errors import FAILURES, code_of, is_missing, said

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadTarget:
    """A file in a bucket; ``where`` is its address for people.

    ``pay`` is called after each piece that is sent, with its bytes, and waits as long as the pace
    demands; None: there is no pace.
    """

    bucket: str
    key: str
    where: str
    pay: Callable[[int], None] | None = None

    @property
    def address(self) -> dict[str, str]:
        """Return bucket and key as keyword arguments of requests."""
        return {"Bucket": self.bucket, "Key": self.key}


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """An upload that is not completed, as listed at ``seen`` of the server's clock."""

    target: UploadTarget
    upload_id: str
    began: datetime
    seen: datetime


def unfinished(
    connection: S3Connection, target: UploadTarget, *, direct: bool = False
) -> Iterator[Unfinished]:
    """Yield uploads whose keys begin with the target's; ``direct``: with no slash after it."""
    more: dict[str, str] = {"Delimiter": "/"} if direct else {}
    while True:
        page = connection.send(
            lambda _, more=dict(more): connection.client.list_multipart_uploads(  # type: ignore[misc]
                Bucket=target.bucket, Prefix=target.key, **more
            ),
            where=target.where,
            doing="list its unfinished uploads",
        )
        seen = parsedate_to_datetime(page["ResponseMetadata"]["HTTPHeaders"]["date"])
        for found in page.get("Uploads", ()):
            place = UploadTarget(
                bucket=target.bucket,
                key=found["Key"],
                where=target.where + found["Key"].removeprefix(target.key),
            )
            yield Unfinished(
                target=place, upload_id=found["UploadId"], began=found["Initiated"], seen=seen
            )
        if not page.get("IsTruncated"):
            return
        more["KeyMarker"] = page["NextKeyMarker"]
        more["UploadIdMarker"] = page["NextUploadIdMarker"]


def parts_of(connection: S3Connection, upload: Unfinished) -> list[dict[str, Any]]:
    """Return the parts of an upload, as the server describes them; none if it is gone."""
    found: list[dict[str, Any]] = []
    more: dict[str, int] = {}

    def request(_: Deadline) -> dict[str, Any] | None:
        try:
            page: dict[str, Any] = connection.client.list_parts(
                **upload.target.address, UploadId=upload.upload_id, **more
            )
        except ClientError as error:
            if code_of(error) != "NoSuchUpload":
                raise
            return None
        return page

    while page := connection.send(request, where=upload.target.where, doing="list its parts"):
        found += page.get("Parts", ())
        if not page.get("IsTruncated"):
            break
        more = {"PartNumberMarker": page["NextPartNumberMarker"]}
    return found


def abort(connection: S3Connection, target: UploadTarget, upload_id: str) -> None:
    """Drop an upload with its parts, in one attempt; a rest is invisible, and swept later."""
    try:
        connection.client.abort_multipart_upload(**target.address, UploadId=upload_id)
    except FAILURES as error:
        if code_of(error) != "NoSuchUpload":
            _log.info("%s: an unfinished upload stays for now: %s", target.where, said(error))


def sweep(connection: S3Connection, folder: UploadTarget) -> None:
    """Drop the abandoned uploads directly below ``folder``."""
    for upload in list(unfinished(connection, folder, direct=True)):
        if _is_abandoned(connection, upload):
            abort(connection, upload.target, upload.upload_id)


def unpublished(connection: S3Connection, folder: UploadTarget) -> list[Unpublished]:
    """Return the uploads directly below ``folder``, each with whether `sweep` would drop it."""
    return [
        Unpublished(where=upload.target.where, abandoned=_is_abandoned(connection, upload))
        for upload in list(unfinished(connection, folder, direct=True))
    ]


def _is_abandoned(connection: S3Connection, upload: Unfinished) -> bool:
    parts = parts_of(connection, upload)
    last = max([upload.began, *(part["LastModified"] for part in parts)])
    if (upload.seen - last).total_seconds() > connection.config.abandoned_s:
        return True
    published = _published(connection, upload.target)
    return published is not None and published > last


def _published(connection: S3Connection, target: UploadTarget) -> datetime | None:
    """Return when the file in place was published, by the server's clock; None without a file."""

    def request(_: Deadline) -> datetime | None:
        try:
            published: datetime = connection.client.head_object(**target.address)["LastModified"]
        except ClientError as error:
            if not is_missing(error):
                raise
            return None
        return published

    return connection.send(request, where=target.where, doing="look at it")
