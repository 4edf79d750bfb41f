"""Objects read in ranges, several at once; each range resumes where it was cut off."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from botocore.exceptions import ClientError
from typing_extensions import Buffer

from holdfast.ckpt.errors import InternalError, NotFoundError, StoreError
from holdfast.ckpt.store.objects.ranges import Sink, Views, ranges
from holdfast.ckpt.store.objects.retries import Deadline
from holdfast.ckpt.store.regular import check_size
from holdfast.ckpt.store.s3.calls import S3Connection
from holdfast.ckpt.store.s3.errors import status_of
from holdfast.ckpt.store.s3.unfinished import UploadTarget

_BLOCK_BYTES: Final = 256 << 10


class CutOffError(InternalError, OSError):
    """A reply ended before all its bytes had come; an ``OSError``, as it passes like one."""


def _receive(sink: Sink, reply: dict[str, Any], deadline: Deadline) -> None:
    """Read the body of ``reply`` into the sink. Raises ``CutOffError`` if it ends before."""
    with reply["Body"] as stream:
        while sink.done < sink.nbytes:
            deadline.check()
            block = stream.read1(min(sink.nbytes - sink.done, _BLOCK_BYTES))
            if not block:
                raise CutOffError(f"the reply was cut off after {sink.done} of {sink.nbytes} bytes")
            sink.take(memoryview(block))


def fetch(
    connection: S3Connection, target: UploadTarget, *, most_bytes: int | None = None
) -> tuple[bytes, str]:
    """Return an object's bytes and its version."""
    return connection.send(
        lambda deadline: fetch_once(connection, target, deadline, most_bytes=most_bytes),
        where=target.where,
        doing="read it",
    )


def fetch_once(
    connection: S3Connection,
    target: UploadTarget,
    deadline: Deadline,
    *,
    most_bytes: int | None = None,
) -> tuple[bytes, str]:
    """Like `fetch`, in one attempt: raises the errors of boto3."""
    reply = connection.client.get_object(**target.address)
    check_size(target.where, reply["ContentLength"], most_bytes=most_bytes)
    data = bytearray(reply["ContentLength"])
    _receive(Sink([memoryview(data)]), reply, deadline)
    return bytes(data), str(reply["ETag"]).strip('"')


class S3File:
    """An object at the version that was opened; reads fail once it is replaced or removed."""

    run_bytes = 16 << 20

    def __init__(self, connection: S3Connection, target: UploadTarget) -> None:
        self._connection, self._target = connection, target
        head = connection.send(
            lambda _: connection.client.head_object(**target.address),
            where=target.where,
            doing="open it for reading",
        )
        self.nbytes = int(head["ContentLength"])
        self._tag = str(head["ETag"])

    def read_into(self, buffers: Sequence[Buffer], at: int) -> int:
        """Fill ``buffers`` from offset ``at``; return the bytes read.

        Raises ``NotFoundError`` when another object replaced the opened one.
        """
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        wanted = min(sum(view.nbytes for view in views), max(0, self.nbytes - at))
        if not wanted:
            return 0
        threads = self._connection.config.threads
        self._connection.each(
            [
                partial(self._fill, found, at + start)
                for start, found in ranges(views, wanted, threads=threads)
            ]
        )
        return wanted

    def close(self) -> None:
        """Do nothing: connections belong to the store."""

    def _fill(self, views: Views, at: int) -> None:
        """Fill ``views`` from ``at``; after a broken connection, resume behind received bytes."""
        sink = Sink(views)
        end = at + sink.nbytes
        self._connection.send(
            lambda deadline: _receive(sink, self._range(at + sink.done, end), deadline),
            where=self._target.where,
            doing=f"read bytes {at} to {end} of it",
        )

    def _range(self, at: int, end: int) -> dict[str, Any]:
        """Request the bytes from ``at`` to before ``end`` of the very object that was opened."""
        try:
            reply: dict[str, Any] = self._connection.client.get_object(
                **self._target.address, Range=f"bytes={at}-{end - 1}", IfMatch=self._tag
            )
        except ClientError as error:
            if status_of(error) not in (412, 416):
                raise
            raise NotFoundError(
                f"{self._target.where}: was replaced since it was opened; open it again"
            ) from error
        if (found := reply.get("ContentRange")) != f"bytes {at}-{end - 1}/{self.nbytes}":
            raise StoreError(
                f"{self._target.where}: asked for bytes {at}-{end - 1}/{self.nbytes}, the server "
                f"sent {found or 'no range'}; use a server with ranged reads"
            )
        return reply
