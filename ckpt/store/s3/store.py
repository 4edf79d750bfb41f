"""Checkpoints in a bucket of an S3 server: AWS, Ceph, MinIO and others, by boto3.

S3 publishes whole objects only, so a name shows the old bytes or the new ones. This module adds the
rest: it retries requests within a deadline, and reads back the effect of a lost reply; the server
checks the SHA-256 of every body; small files are replaced on a condition, after the server proved
that it obeys conditions. A version is the object's ETag.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Final

from botocore.exceptions import ClientError
from typing_extensions import Buffer

from holdfast.ckpt.errors import StoreError
from holdfast.ckpt.store.base import SMALL_FILE_BYTES, Unpublished
from holdfast.ckpt.store.objects.retries import Deadline
from holdfast.ckpt.store.s3.calls import S3Connection, connect
from holdfast.ckpt.store.s3.conditions import PROBE, replace
from holdfast.ckpt.store.s3.config import S3Config
from holdfast.ckpt.store.s3.errors import is_missing
from holdfast.ckpt.store.s3.read import S3File, fetch
from holdfast.ckpt.store.s3.unfinished import UploadTarget, sweep, unpublished
from holdfast.ckpt.store.s3.upload import write

_URL: Final = re.compile(r"s3://([^/?#]+)(?:/(.*))?", re.IGNORECASE)
_AT_ONCE: Final = 1000
_PASSING: Final = frozenset(("InternalError", "SlowDown", "ServiceUnavailable"))


class S3Store:
    """The files below a prefix of a bucket. ``root`` is ``s3://bucket/prefix``."""

    def __init__(self, root: str, connection: S3Connection | S3Config) -> None:
        match = _URL.fullmatch(root)
        if match is None:
            raise StoreError(f"{root}: not the address of a bucket; write s3://bucket/prefix")
        self._bucket = match[1]
        self._prefix = (match[2] or "").strip("/")
        self.root = f"s3://{self._bucket}/{self._prefix}".rstrip("/")
        self._given = connection
        _ = self._connection  # raises now if the configuration is wrong

    @property
    def _connection(self) -> S3Connection:
        """The connection of this process: a forked child makes its own."""
        return connect(self._given) if isinstance(self._given, S3Config) else self._given

    def __repr__(self) -> str:
        return f"S3Store({self.root!r})"

    def where(self, name: str) -> str:
        """Return the file's ``s3://`` address."""
        return f"{self.root}/{name}" if name else self.root

    def _file(self, name: str) -> UploadTarget:
        key = f"{self._prefix}/{name}".strip("/")
        return UploadTarget(bucket=self._bucket, key=key, where=self.where(name))

    def _folder(self, name: str) -> UploadTarget:
        """Return the target whose key is the prefix of all files in the folder."""
        found = self._file(name)
        key = f"{found.key}/" if found.key else ""
        return UploadTarget(bucket=self._bucket, key=key, where=f"{found.where}/")

    def names(self, prefix: str) -> list[str]:
        """Return the names directly below the folder ``prefix``, sorted; none if it is absent."""
        folder, names = self._folder(prefix), set[str]()
        for page in self._pages(folder, Delimiter="/"):
            found = [item["Prefix"] for item in page.get("CommonPrefixes", ())]
            found += [item["Key"] for item in page.get("Contents", ())]
            names.update(key.removeprefix(folder.key).rstrip("/") for key in found)
        return sorted(name for name in names if name and not name.startswith(PROBE))

    def size(self, name: str) -> int | None:
        """Return a file's size in bytes, None when it does not exist."""
        target = self._file(name)

        def request(_: Deadline) -> int | None:
            try:
                return int(self._connection.client.head_object(**target.address)["ContentLength"])
            except ClientError as error:
                if is_missing(error):
                    return None
                raise

        return self._connection.send(request, where=target.where, doing="look at it")

    def read(self, name: str, *, most_bytes: int = SMALL_FILE_BYTES) -> bytes:
        """Return a small file's bytes."""
        return fetch(self._connection, self._file(name), most_bytes=most_bytes)[0]

    def open(self, name: str) -> S3File:
        """Open a file for ranged reads."""
        return S3File(self._connection, self._file(name))

    def write(self, name: str, parts: Iterable[Buffer]) -> int:
        """Write a file from ``parts``, replacing any old one; return its size in bytes."""
        return write(self._connection, self._file(name), parts)

    def fetch(self, name: str) -> tuple[bytes, str]:
        """Return a small file's bytes and their ETag."""
        return fetch(self._connection, self._file(name), most_bytes=SMALL_FILE_BYTES)

    def replace(self, name: str, data: bytes, *, expected: str | None) -> bool:
        """Publish a small file if its ETag is ``expected``; say whether it was published.

        A racing writer of the very same bytes counts as this one. Raises ``StoreError`` for a
        server that ignores conditions.
        """
        return replace(self._connection, self._file(name), data, expected=expected)

    def delete(self, names: Iterable[str]) -> None:
        """Remove files; missing ones are ignored."""
        left = iter(names)
        while batch := list(islice(left, _AT_ONCE)):
            self._delete([self._file(name).key for name in batch], self.where(batch[0]))

    def remove(self, folder: str) -> None:
        """Sweep the folder: it exists as long as an object is in it."""
        self.sweep(folder)

    def sweep(self, folder: str) -> None:
        """Remove the abandoned uploads directly below a folder.

        See `holdfast.ckpt.store.s3.unfinished` for how they are recognised.
        """
        sweep(self._connection, self._folder(folder))

    def unpublished(self, folder: str) -> list[Unpublished]:
        """Return the unfinished uploads; abandoned are those that a sweep would remove."""
        return unpublished(self._connection, self._folder(folder))

    def _pages(self, folder: UploadTarget, **more: str) -> Iterator[dict[str, Any]]:
        """Yield the pages of the listing of a folder."""
        while True:
            page: dict[str, Any] = self._connection.send(
                lambda _, more=dict(more): self._connection.client.list_objects_v2(  # type: ignore[misc]
                    Bucket=folder.bucket, Prefix=folder.key, **more
                ),
                where=folder.where,
                doing="list it",
            )
            yield page
            if not page.get("IsTruncated"):
                return
            more["ContinuationToken"] = page["NextContinuationToken"]

    def _delete(self, keys: list[str], where: str) -> None:
        """Remove up to a thousand objects in one request."""

        def request(_: Deadline) -> None:
            reply = self._connection.client.delete_objects(
                Bucket=self._bucket,
                Delete={"Objects": [{"Key": key} for key in keys], "Quiet": True},
            )
            for error in reply.get("Errors", ()):
                if error.get("Code") != "NoSuchKey":
                    status = 503 if error.get("Code") in _PASSING else 403
                    raise ClientError(
                        {"Error": error, "ResponseMetadata": {"HTTPStatusCode": status}},
                        "DeleteObjects",
                    )

        self._connection.send(request, where=where, doing="remove it")
